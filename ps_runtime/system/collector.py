"""The garbage collector passes by long-lived objects.

Imported objects stay until the process ends. torch's import makes a quarter of a million, and the
collector walks them again and again: during the import, at each full collection, and three times at
the interpreter's end. Together that is a third of the CPU time of a process that does little else.
`spared` turns the collector off during an import and freezes the objects after it. Later objects
are collected as ever. The price is some cyclic garbage of the import, about 1 MB for torch.

A full collection blocks the event loop of a server with a table of 65,000 blocks for a third of a
second, again and again. So `Collector` freezes what has survived one. A frozen object still goes
with its last reference; only a frozen cycle stays. When two million more blocks of memory are in
use than at the last count of useful ones, `Collector` looks at all objects once, however long that
takes. Counting frozen objects would take longer than a turn may.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import starmap
from types import ModuleType

_THRESHOLDS = 700, 10, 2
"""Python's own, but for the last: at most 15,000 objects are new since the last full collection, a
few milliseconds' work."""

_STRAY_COUNT = 2_000_000
"""Blocks of memory, one or two for an object; some 200 MB."""


class Collector:
    """Full collections in this process, from `start` to `stop`: the collector looks at all objects
    when `stray_count` more blocks of memory are used.
    """

    def __init__(self, stray_count: int = _STRAY_COUNT) -> None:
        self._stray_count = stray_count
        self._expected = 0  # blocks of memory in use when all were last known to be useful
        self._new_count = 0  # objects that were frozen since; most of them may be gone
        self._looks_at_all = False
        self._before = gc.get_threshold()

    def start(self) -> None:
        """Freeze all objects, and those that survive a collection from now on."""
        gc.collect()
        gc.freeze()
        gc.collect()  # the next one waits until a quarter of what this one found is new: none
        self.expect()
        gc.set_threshold(*_THRESHOLDS)
        gc.callbacks.append(self._called)

    def expect(self) -> None:
        """Count what is in use now as useful, because a server's ranges have changed."""
        self._expected, self._new_count = sys.getallocatedblocks(), 0

    def stop(self) -> None:
        """Restore the thresholds; frozen objects stay frozen. Idempotent."""
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
        self._new_count += object_count(2)
        gc.freeze()
        if self._new_count >= self._stray_count // 2:  # to count takes a millisecond or two
            self._new_count = 0
            if sys.getallocatedblocks() >= self._expected + self._stray_count:
                self._looks_at_all = True
                gc.unfreeze()


def object_count(generation: int) -> int:
    """The objects of a generation. No bytecode runs while there is a list of them: another thread
    that is completing a tuple, which nobody else may refer to then (SystemError), could go on.
    """
    return sum(map(len, starmap(gc.get_objects, [(generation,)])))


@contextmanager
def spared() -> Iterator[None]:
    """Import inside of it: the collector is off meanwhile, and passes by the new objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def spare_import_of(module: str) -> None:
    """Make the import of `module` `spared`, unless it has been imported: for a process that runs
    others' code, which chooses when to import it.
    """
    if module not in sys.modules:
        sys.meta_path.insert(0, _Once(module))


class _Once(MetaPathFinder):
    """Finds one module as the other finders do, once, and has it executed `spared`."""

    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - as `importlib` calls it
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
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
