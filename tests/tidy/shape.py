"""Sizes and names: how long a thing may be, and what it may not be called."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.tidy.source import Finding, Source

MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 800
MAX_PARAMETERS = 6
MAX_LINE_CHARACTERS = 100

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

FILE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "data", "info", "base"}
"""Names of files that say nothing of what is inside."""

WORDS = {"Manager", "Helper", "Utils", "Util", "Misc", "Stuff"}
"""Words that no class or function carries."""

BARE_NAMES = {"data", "epoch", "info", "stuff", "timestamp", "tmp"}
"""Names of shipped variables that mean nothing, or several things: an epoch is of an assignment."""

UNITLESS = re.compile(r"(?:^|_)(timeout|deadline|interval|delay|duration|elapsed|grace|lease)$")
"""Names of times; a number of that name says its unit: `deadline_s`."""


def functions(source: Source) -> Iterator[FunctionNode]:
    """Every function of a file, methods and nested ones included."""
    for node in source.nodes:
        if isinstance(node, FunctionNode):
            yield node


def check_function_length(source: Source) -> Iterator[Finding]:
    """A function has at most 70 lines, docstring included, decorators not."""
    for node in functions(source):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield Finding(
                source.path, node.lineno,
                f"{node.name} has {lines} lines; at most {MAX_FUNCTION_LINES}",
            )  # fmt: skip


def check_file_length(source: Source) -> Iterator[Finding]:
    """A file has at most 800 lines: one idea, however long, is not cut for its length."""
    lines = source.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield Finding(source.path, lines, f"the file has {lines} lines; at most {MAX_FILE_LINES}")


def check_parameters(source: Source) -> Iterator[Finding]:
    """A function has at most 6 parameters, `self` and `cls` not counted."""
    for node in functions(source):
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = len([argument for argument in given if argument.arg not in ("self", "cls")])
        if count > MAX_PARAMETERS:
            yield Finding(
                source.path, node.lineno,
                f"{node.name} has {count} parameters; at most {MAX_PARAMETERS}",
            )  # fmt: skip


def check_line_length(source: Source) -> Iterator[Finding]:
    """A line has at most 100 characters, its remark to a tool or an address at its end aside."""
    for number, line in enumerate(source.text.splitlines(), 1):
        length = len(re.sub(r"\s*(# (noqa|type: ignore|fmt:).*|\"?https?://\S+)$", "", line))
        if length > MAX_LINE_CHARACTERS:
            yield Finding(source.path, number, f"{length} characters; at most 100")


def check_names(source: Source) -> Iterator[Finding]:
    """No file, class, function or variable has a name that means nothing or too much."""
    stem = source.module.rsplit(".", maxsplit=1)[-1]
    if stem in FILE_NAMES:
        yield Finding(source.path, 1, f"a file called {stem} says nothing of what is inside")
    banned = BARE_NAMES if source.is_shipped else set()
    for node in source.nodes:
        for name, line in _named(node):
            words = set(re.findall(r"[A-Z][a-z]+|[a-z]+", name))
            words = {word.capitalize() for word in words}
            if isinstance(node, ast.ClassDef | FunctionNode) and words & WORDS:
                yield Finding(source.path, line, f"{name}: say what it does instead")
            if name in banned and not isinstance(node, FunctionNode):
                yield Finding(source.path, line, f"{name}: say what it is of")


def _named(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.ClassDef | FunctionNode):
        yield node.name, node.lineno
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node.lineno
    elif isinstance(node, ast.arg):
        yield node.arg, node.lineno


def check_units(source: Source) -> Iterator[Finding]:
    """A time that is a number says its unit in its name."""
    for node in source.nodes:
        if isinstance(node, ast.arg):
            name, annotation = node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, annotation = node.target.id, node.annotation
        else:
            continue
        if annotation is None or not UNITLESS.search(name):
            continue
        if re.match(r"(float|int)\b", ast.unparse(annotation)):
            yield Finding(source.path, node.lineno, f"{name} is a number without a unit")


def check_marks(source: Source) -> Iterator[Finding]:
    """Nothing is left for later in the code."""
    mark = re.compile(r"#.*\b(TO" + r"DO|FIX" + r"ME|X" + r"XX|HA" + r"CK)\b")
    for number, line in enumerate(source.text.splitlines(), 1):
        if mark.search(line):
            yield Finding(source.path, number, "work left for later belongs in an issue")
