"""Words and sentences: the glossary's names, and docstrings that begin with their subject."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.tidy.source import Finding, Source

READ = (
    "ps_cli/",
    "ps_core/",
    "ps_runtime/",
    "ps_server/",
    "ps_worker/",
    "scheduler/",
    "tests/tidy/prose.py",
)
"""Beginnings of the paths of files that were read for their words and sentences; in the end all."""

WEAK_STARTS = {"What", "Who", "Whom", "Whose", "Whether", "Of", "That", "Where", "How", "Why"}
"""A docstring that begins so hides its noun: 'Bytes that wait', not 'How much waits'."""

OLD_WORDS = {
    "room": "staging memory, quota, space",
    "forming": "aggregation",
    "fold": "accumulate",
    "folded": "accumulated",
    "folding": "accumulating",
    "wish": "request",
    "wishes": "requests",
    "stand": "a plain verb",
    "settle": "a plain verb: decide, end",
    "promise": "prepare",
    "promises": "prepared changes",
    "promised": "prepared",
    "tenure": "term",
    "heir": "candidate",
    "heirs": "candidates",
    "deed": "committed effect",
    "deeds": "committed effects",
    "lent": "shared read",
    "stamp": "sequence lock",
    "stamps": "sequence locks",
    "homes": "segments",
    "captures": "copy-on-write snapshots",
    "goodbye": "final seal",
    "successor": "replacement",
    "succession": "replacement",
    "newcomer": "late joiner",
    "deserted": "without replicas",
    "lacks": "unacknowledged",
}
"""Words that stood for what has a name of its own in the field, and that name."""

STANDARD_NAMES = {"PUSH_PROMISE"}
"""Names that others' standards give, with an old word in them."""


def check_first_words(source: Source) -> Iterator[Finding]:
    """A docstring begins with its subject or its verb."""
    if not source.path.startswith(READ):
        return
    for node in source.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            first = re.match(r"\s*(\w+)", text) if isinstance(text, str) else None
            if first and first[1] in WEAK_STARTS:
                yield Finding(source.path, node.lineno, f"a docstring begins with '{first[1]}'")


def check_glossary(source: Source) -> Iterator[Finding]:
    """No name that is defined here has a word that the glossary replaces, save RPC methods."""
    if not source.path.startswith(READ):
        return
    for node in source.nodes:
        for name in set(_defined(node)) - STANDARD_NAMES:
            for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name):
                better = OLD_WORDS.get(word.lower())
                if better is not None:
                    line = getattr(node, "lineno", 1)
                    yield Finding(source.path, line, f"'{name}': for '{word}' say {better}")


def _defined(node: ast.AST) -> Iterator[str]:
    """The names that a node defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name[0].isupper():
            return  # the wire's name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
