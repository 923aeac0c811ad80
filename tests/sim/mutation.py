"""A deliberate bug, put into a module as it is loaded: the file stays as it is.

What it deliberately does not do: import anything that a mutant may change.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).parents[2]


class MutantNotApplied(Exception):
    """The text that a mutant replaces is not there once, or its module has been loaded already."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug.

    Attributes:
        name: what it does, in words.
        rule: the section of SEMANTICS whose rule it breaks.
        path: the module's file, from the repository's root.
        old: the text that it replaces, which is there exactly once.
        new: by what.
        kinds: the simulations that can see it, the likeliest first.
        first_seed: what is seen by one seed of a thousand is looked for from here.
    """

    name: str
    rule: str
    path: str
    old: str
    new: str
    kinds: tuple[str, ...]
    first_seed: int = 0

    @property
    def module(self) -> str:
        """The name by which it is imported."""
        return self.path.removesuffix(".py").replace("/", ".")

    def source(self) -> str:
        """The module's source with the bug in it.

        Raises:
            MutantNotApplied: the text is not there, or more than once.
        """
        source = (ROOT / self.path).read_text(encoding="utf-8")
        count = source.count(self.old)
        if count != 1:
            raise MutantNotApplied(
                f"mutant '{self.name}': its text is {count} times in {self.path}; expected once"
            )
        return source.replace(self.old, self.new)


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, source: str) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - the one that it loads
        """Never what was compiled before."""
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._name = mutant.module
        self._source = mutant.source()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of the one module; others are found as ever."""
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            raise MutantNotApplied(f"there is no module {fullname}")
        spec.loader = _Loader(fullname, spec.origin, self._source)
        return spec


def apply(mutant: Mutant) -> None:
    """From now on, in this process, the module has the bug.

    Raises:
        MutantNotApplied: it cannot be put in.
    """
    if mutant.module in sys.modules:
        raise MutantNotApplied(f"mutant '{mutant.name}': {mutant.module} has been loaded already")
    sys.meta_path.insert(0, _Finder(mutant))
