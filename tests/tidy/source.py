"""The repository's own source files, parsed once."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from ps_runtime.system.collector import spared

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("ps_core", "ps_runtime", "scheduler", "ps_server", "ps_worker", "ps_cli")
"""What a user installs, beside the generated stubs."""

PYTHON_FOLDERS = (
    *PACKAGES,
    "protos",
    "tests",
    "examples",
    "docs",
    "deploy",
    "clients",
)

_NOT_OURS = {"node_modules", "__pycache__", ".venv"}


@dataclass(frozen=True)
class Source:
    """One Python file: where it is, what it says, and its syntax tree."""

    path: str
    """Relative to the repository, with forward slashes."""
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of its tree."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Imports at run time, at any depth: what only annotations need is left out."""
        return tuple(_imports_below(self.tree))

    @property
    def module(self) -> str:
        """The dotted name under which the file is imported."""
        inside = self.path.removeprefix("protos/")
        return inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> str:
        """The first folder: a package, `tests`, `examples`, ..."""
        return self.path.removeprefix("protos/").split("/", maxsplit=1)[0]

    @property
    def is_shipped(self) -> bool:
        """Whether a user installs it."""
        return self.package in (*PACKAGES, "pushpull")

    @property
    def is_test(self) -> bool:
        """Whether it lies under tests/."""
        return self.package == "tests"


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that does not hold somewhere."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def parse(path: str, text: str) -> Source:
    """A source file from its text."""
    return Source(path, text, ast.parse(text, filename=path))


def is_generated(path: Path) -> bool:
    """Whether protoc wrote the file."""
    return path.stem.endswith(("_pb2", "_pb2_grpc"))


@cache
def python_sources() -> tuple[Source, ...]:
    """Every Python file that a person wrote."""
    with spared():  # a million nodes, all of which stay
        return tuple(
            parse(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
            for folder in PYTHON_FOLDERS
            for path in files_under(ROOT / folder, ".py")
            if not is_generated(path)
        )


def files_under(folder: Path, *suffixes: str) -> Iterator[Path]:
    """Files of ours below `folder` whose name ends in one of `suffixes`."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _NOT_OURS)
        yield from (Path(place, name) for name in sorted(names) if name.endswith(suffixes))


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: `from module import name`, or `import module` where `name` is empty."""

    module: str
    name: str
    line: int

    @property
    def dotted(self) -> str:
        """Module and name together."""
        return f"{self.module}.{self.name}" if self.name else self.module


def _imports_below(node: ast.AST) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, "", child.lineno)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                yield Import(child.module or "", alias.name, child.lineno)
        elif isinstance(child, ast.expr):
            continue  # no import is in one
        elif not isinstance(child, ast.If) or not ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from _imports_below(child)
