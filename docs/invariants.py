"""Makes docs/reference/INVARIANTS.md from the invariants that modules list, and the tests of them.

`make reference`, or `python -m docs.invariants` in the repository root, writes it; a tidy test
fails when it is not what this script would write.

A module lists its invariants at the end of its docstring, below `Invariants:`, each with a number.
Code that finds one broken raises `InvariantViolation` with that number; a test that fails without
it has the number in its docstring or in a comment.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from docs.reference import table

ROOT = Path(__file__).resolve().parents[1]

PAGE = ROOT / "docs" / "reference" / "INVARIANTS.md"

PACKAGES = ("ps_core", "ps_runtime", "scheduler", "ps_server", "ps_worker", "ps_cli")

NUMBER = re.compile(r"\b[A-Z]{2,6}-\d+\b")

HEAD = """# Invariants

Made from the code by `make reference`; do not edit it.

An invariant is a sentence that holds whatever happens; the module in whose docstring it stands
keeps it. Code that checks it while it runs raises `InvariantViolation`, which is a bug of ours.
Tests name the invariants that they try. The rules behind most of them are in
[SEMANTICS](SEMANTICS.md).
"""

_ENTRY = re.compile(r"    ([A-Z]{2,6}-\d+)  (\S.*)")
_FURTHER_LINE = re.compile(r" {6,}\S")


class Invariant(NamedTuple):
    """One that a module lists; `path` is the module's file."""

    number: str
    sentence: str
    path: str


class Mention(NamedTuple):
    """Where a number is named: the file, and the function or class; empty outside of one."""

    path: str
    name: str


class Found(NamedTuple):
    """All of a tree's invariants, in the order of their files, and where each number is named."""

    invariants: tuple[Invariant, ...]
    raised: Mapping[str, tuple[Mention, ...]]
    cited: Mapping[str, tuple[Mention, ...]]


def sources() -> dict[str, str]:
    """Every file of ours that may list, check or test an invariant, by its path.

    Tests of the house's rules are left out: they name made-up ones.
    """
    found = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in (*PACKAGES, "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    }
    return {path: text for path, text in found.items() if not path.startswith("tests/tidy/")}


def found_in(texts: Mapping[str, str]) -> Found:
    """What these files say."""
    listed: list[Invariant] = []
    raised: defaultdict[str, dict[Mention, None]] = defaultdict(dict)
    cited: defaultdict[str, dict[Mention, None]] = defaultdict(dict)
    for path, text in texts.items():
        if not NUMBER.search(text):
            continue
        tree = ast.parse(text, filename=path)
        if path.startswith("tests/"):
            for number, name in _named(tree, text):
                cited[number][Mention(path, name)] = None
            continue
        checks = list(_checks(tree, ""))
        listed += _listed(path, ast.get_docstring(tree) or "", checks)
        for number, name, _ in checks:
            raised[number][Mention(path, name)] = None
    return Found(
        tuple(listed),
        {number: tuple(places) for number, places in raised.items()},
        {number: tuple(places) for number, places in cited.items()},
    )


def _listed(path: str, docstring: str, checks: list[tuple[str, str, str]]) -> Iterator[Invariant]:
    _, _, below = docstring.partition("Invariants:\n")
    entry: list[str] = []
    for line in [*below.split("\n"), ""]:
        if entry and _FURTHER_LINE.match(line):
            entry.append(line.strip())
            continue
        if entry:
            yield Invariant(entry[0], " ".join(entry[1:]), path)
        started = _ENTRY.fullmatch(line)
        entry = list(started.groups()) if started else []
    for kind in re.findall(r"\b([A-Z]{2,6})-\*", docstring):
        for number, _, condition in checks:
            if number.startswith(f"{kind}-"):
                yield Invariant(number, f"`{condition}`", path)


def _checks(node: ast.AST, around: str) -> Iterator[tuple[str, str, str]]:
    """The number, the function around it, and the condition, of each place that checks one."""
    for child in ast.iter_child_nodes(node):
        inner = around
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{around}.{child.name}" if around else child.name
        elif isinstance(child, ast.Call) and _called(child) in ("check", "InvariantViolation"):
            for argument in child.args[:2]:
                if isinstance(argument, ast.Constant) and NUMBER.fullmatch(str(argument.value)):
                    yield str(argument.value), inner, ast.unparse(child.args[0])
        yield from _checks(child, inner)


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _named(tree: ast.Module, text: str) -> Iterator[tuple[str, str]]:
    """Each number in a test's text, and the function or class around it."""
    spans = [
        (min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    for line, content in enumerate(text.split("\n"), 1):
        for number in NUMBER.findall(content):
            around = [span for span in spans if span[0] <= line <= (span[1] or 0)]
            yield number, max(around)[2] if around else ""


def unproved(found: Found) -> list[Invariant]:
    """Those that no code checks and no test names."""
    return [
        each
        for each in found.invariants
        if each.number not in found.raised and each.number not in found.cited
    ]


def listed_twice(found: Found) -> list[str]:
    """Numbers that two sentences have."""
    numbers = [each.number for each in found.invariants]
    return sorted({number for number in numbers if numbers.count(number) > 1})


def page(found: Found) -> str:
    """The whole page."""
    sections = [HEAD]
    for package in PACKAGES:
        rows = [
            (
                each.number,
                each.sentence,
                _link(each.path.removesuffix(".py").replace("/", "."), each.path),
                _places(found.raised.get(each.number, ())),
                _places(found.cited.get(each.number, ())),
            )
            for each in found.invariants
            if each.path.startswith(f"{package}/")
        ]
        if rows:
            head = ("number", "invariant", "module", "checked in", "tests")
            sections.append(f"## `{package}`\n\n" + table(head, rows))
    return "\n".join(sections)


def _places(places: Iterable[Mention]) -> str:
    """One link a file, with the names in it."""
    by_path: defaultdict[str, list[str]] = defaultdict(list)
    for place in places:
        by_path[place.path] += [place.name] if place.name else []
    return ", ".join(
        " ".join((_link(Path(path).stem, path), ", ".join(f"`{name}`" for name in names))).strip()
        for path, names in by_path.items()
    )


def _link(text: str, path: str) -> str:
    return f"[{text}](../../{path})"


if __name__ == "__main__":
    PAGE.write_text(page(found_in(sources())), encoding="utf-8")
