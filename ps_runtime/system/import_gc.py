"""What imports have made stays until the process ends: the garbage collector need not look at it.

torch's import makes a quarter of a million objects, and the collector walks them again and again:
while they are made, at each of its full turns, and three times when the interpreter ends. Together
that is a third of the CPU time of a process that does little else. Here it is off while a module is
imported, and what is there afterwards is frozen: not looked at again. All that is made later is
collected as ever. The price is some cyclic garbage of the import itself, about 1 MB for torch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


@contextmanager
def spared() -> Iterator[None]:
    """Import inside of it: the collector is off meanwhile, and passes by what was made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def spare_import_of(module: str) -> None:
    """Let the import of `module` be `spared`, whoever does it, should that ever be.

    For a process that runs others' code: when they import it, and what they set up before, is
    theirs. Nothing happens if it has been imported.
    """
    if module not in sys.modules:
        sys.meta_path.insert(0, _Once(module))


class _Once(MetaPathFinder):
    """Finds one module as it is found anyway, once, and has it executed `spared`."""

    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - as `importlib` calls it
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """The module's spec; None, "not by me", for all others."""
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_spared(module: ModuleType) -> None:
            loader.exec_module = execute  # type: ignore[method-assign]
            with spared():
                execute(module)

        loader.exec_module = execute_spared  # type: ignore[method-assign]
        return spec
