"""What code may do: in tests, on the wire, and where an invariant is breached."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.tidy.layers import layer_of
from tests.tidy.source import ROOT, Finding, Source

FIXED_PORT = re.compile(r"(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1?\]):[1-9]\d+\b")
"""Port 1 is let pass: nobody may bind it, so it stands for an address where nobody answers."""

HIDING = re.compile(r"(pytest|unittest|mark)\.(skip\w*|xfail|importorskip)$|\.skipTest$")
"""What hides a test instead of passing it."""

MOCKING = {"unittest.mock", "mock", "pytest_mock"}

REPLICATED = ("ps_server/rows/", "ps_server/values/", "ps_core/codecs/", "ps_core/rows.py")

ROUNDED_BY_PROCESSOR = {
    f"np.{name}"
    for name in (
        *("power", "float_power", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "cbrt"),
        *("sin", "cos", "tan", "arcsin", "arccos", "arctan", "arctan2", "hypot", "logaddexp"),
        *("sinh", "cosh", "tanh", "arcsinh", "arccosh", "arctanh", "logaddexp2"),
    )
}
"""With AVX-512 numpy computes them by SVML, else by its own loops or the C library."""

PURE_TESTS = ("tests/unit/", "tests/property/", "tests/sim/")
"""Tests without sockets and processes; addresses in them are values that nobody binds."""


def check_sleep(source: Source) -> Iterator[Finding]:
    """Tests wait for events, never for time."""
    if not source.is_test:
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and _called(node) == "sleep":
            yield Finding(source.path, node.lineno, "a test sleeps; wait for what should happen")


def check_fixed_ports(source: Source) -> Iterator[Finding]:
    """Tests that open sockets bind port 0."""
    if not source.is_test or source.path.startswith((*PURE_TESTS, "tests/tidy/")):
        return
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = FIXED_PORT.search(node.value)
            if found:
                yield Finding(source.path, node.lineno, f"fixed port in {found[0]!r}; bind port 0")


def check_hidden_tests(source: Source) -> Iterator[Finding]:
    """No test is skipped or expected to fail: what is missing is a failure."""
    if not source.is_test:
        return
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and HIDING.search(ast.unparse(node)):
            yield Finding(source.path, node.lineno, f"{ast.unparse(node)} hides a test")


def check_mocks(source: Source) -> Iterator[Finding]:
    """Tests run the real code: nothing is mocked or patched."""
    if not source.is_test:
        return
    for imported in source.imports:
        if imported.module in MOCKING or imported.dotted in MOCKING:
            yield Finding(source.path, imported.line, f"{imported.dotted}: run the real code")
    for node in source.nodes:
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "setattr"
            and ast.unparse(node.value) == "monkeypatch"
        ):
            yield Finding(source.path, node.lineno, "monkeypatch.setattr: run the real code")


def check_pure_tests(source: Source) -> Iterator[Finding]:
    """Unit, property and simulation tests open no socket and start no process."""
    if not source.path.startswith(PURE_TESTS):
        return
    for imported in source.imports:
        if imported.module.split(".", maxsplit=1)[0] in ("socket", "subprocess"):
            yield Finding(source.path, imported.line, f"imports {imported.module}: integration")


def check_deadlines(source: Source) -> Iterator[Finding]:
    """Every unary call has a deadline."""
    if source.package not in ("ps_runtime", "scheduler", "ps_server", "ps_worker", "ps_cli"):
        return
    for node in source.nodes:
        if not isinstance(node, ast.Call) or _called(node) not in unary_methods():
            continue
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self":
            continue
        if not any(keyword.arg in ("timeout", None) for keyword in node.keywords):
            yield Finding(source.path, node.lineno, f"{_called(node)} is called without timeout=")


@cache
def unary_methods() -> frozenset[str]:
    """Names of the contract's calls that stream in neither direction."""
    pattern = re.compile(r"^\s*rpc (\w+)\((stream )?[\w.]+\) returns \((stream )?", re.MULTILINE)
    return frozenset(
        name
        for path in (ROOT / "protos/pushpull/v1").glob("*.proto")
        for name, sends_stream, returns_stream in pattern.findall(path.read_text(encoding="utf-8"))
        if not sends_stream and not returns_stream
    )


def check_invariants(source: Source) -> Iterator[Finding]:
    """An invariant that code enforces is described, by number, in its module's docstring."""
    if not source.is_shipped:
        return
    described = ast.get_docstring(source.tree) or ""
    for node in source.nodes:
        if not isinstance(node, ast.Call) or _called(node) not in ("check", "InvariantViolation"):
            continue
        for argument in node.args[:2]:
            number = argument.value if isinstance(argument, ast.Constant) else None
            if not isinstance(number, str) or not re.fullmatch(r"[A-Z]+-\d+", number):
                continue
            if number not in described and f"{number.split('-')[0]}-*" not in described:
                yield Finding(
                    source.path, node.lineno, f"invariant {number} is not in the docstring"
                )


def check_equal_bits(source: Source) -> Iterator[Finding]:
    """What replicas must agree on has no function of numpy's that rounds otherwise on another
    processor; a power whose exponent is no constant may be one.
    """
    if not source.path.startswith(REPLICATED):
        return
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ROUNDED_BY_PROCESSOR:
            word = ast.unparse(node)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            ends = {type(each) for each in ast.walk(node.right)}
            if ends <= {ast.Constant, ast.UnaryOp, ast.USub}:
                continue
            word = ast.unparse(node)
        else:
            continue
        yield Finding(source.path, node.lineno, f"{word}: use math's, number by number")


def check_prints(source: Source) -> Iterator[Finding]:
    """Roles log; entry points print, and functions that say so in their name."""
    if not source.is_shipped or layer_of(source.module) == 3:
        return
    for name, node in _with_function(source.tree, ""):
        if not isinstance(node, ast.Call) or name.startswith("print_"):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            yield Finding(source.path, node.lineno, "print in a role; log, or return it")


def _with_function(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node below, with the name of the innermost function around it."""
    for child in ast.iter_child_nodes(node):
        inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else name
        yield inner, child
        yield from _with_function(child, inner)


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""
