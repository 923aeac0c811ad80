"""The garbage collector: it need not look at what stays.

What imports have made stays until the process ends. torch's import makes a quarter of a million
objects, and the collector walks them again and again: while they are made, at each of its full
turns, and three times when the interpreter ends. Together that is a third of the CPU time of a
process that does little else. Here it is off while a module is imported, and what is there
afterwards is frozen: not looked at again. All that is made later is collected as ever. The price is
some cyclic garbage of the import itself, about 1 MB for torch.

In a process whose loop shall be at nothing for long, a full collection is a third of a second where
a server holds a table of 65,000 blocks, again and again. So what has survived one is frozen, too.
What its last reference leaves goes all the same; only a cycle that was frozen stays. When two
million more blocks of memory are in use than when all were known to be of use, all is looked at
once, whatever that takes. To count what is frozen would take longer than a turn may.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_THRESHOLDS = 700, 10, 2
"""Python's own, but for the last: what was made since the last full collection is at most some
15,000 objects, a few milliseconds."""

_STRAY_COUNT = 2_000_000
"""Blocks of memory, of which an object has one or two; some 200 MB."""


class Collector:
    """Full collections in this process, from `start` to `stop`.

    Args:
        stray_count: so many more blocks of memory in use let all be looked at.
    """

    def __init__(self, stray_count: int = _STRAY_COUNT) -> None:
        self._stray_count = stray_count
        self._expected = 0  # blocks of memory that were in use when what is used was known
        self._new_count = 0  # objects that were frozen since; most of them may be gone
        self._looks_at_all = False
        self._before = gc.get_threshold()

    def start(self) -> None:
        """Freeze what there is, and what survives a collection from now on."""
        gc.collect()
        gc.freeze()
        gc.collect()  # of nothing: the next waits until a quarter of what this one found is new
        self.expect()
        gc.set_threshold(*_THRESHOLDS)
        gc.callbacks.append(self._called)

    def expect(self) -> None:
        """What is in use now is of use: a server has other ranges than before."""
        self._expected, self._new_count = sys.getallocatedblocks(), 0

    def stop(self) -> None:
        """As it was; what is frozen stays so. Idempotent."""
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)
            gc.set_threshold(*self._before)

    def _called(self, phase: str, collection: Mapping[str, int]) -> None:
        if phase != "stop" or collection["generation"] != 2:
            return
        if self._looks_at_all:
            gc.freeze()
            self._looks_at_all = False
            self.expect()
            return
        self._new_count += len(gc.get_objects(2))
        gc.freeze()
        if self._new_count >= self._stray_count // 2:  # to count takes a millisecond or two
            self._new_count = 0
            if sys.getallocatedblocks() >= self._expected + self._stray_count:
                self._looks_at_all = True
                gc.unfreeze()


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
