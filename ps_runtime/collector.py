"""The garbage collector of a process whose loop shall be at nothing for long.

A full collection looks at all that may be in a cycle: a third of a second where a server holds a
table of 65,000 blocks, again and again. So what has survived one is frozen: not looked at again.
What its last reference leaves goes all the same; only a cycle that was frozen stays. When a million
more objects are frozen than there were, all is looked at once, whatever that takes.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

_THRESHOLDS = 700, 10, 4
"""Python's own, but for the last: what was made since the last full collection is at most some
30,000 objects, a few milliseconds."""

_STRAY_COUNT = 1_000_000
"""Objects; some 100 MB."""


class Collector:
    """Full collections in this process, from `start` to `stop`.

    Args:
        stray_count: so many more frozen objects let all be looked at.
    """

    def __init__(self, stray_count: int = _STRAY_COUNT) -> None:
        self._stray_count = stray_count
        self._expected = 0  # objects that were frozen when they were counted last
        self._new_count = 0  # that were frozen since; most of them may be gone
        self._looks_at_all = False
        self._before = gc.get_threshold()

    def start(self) -> None:
        """Freeze what there is, and what survives a collection from now on."""
        gc.collect()
        gc.freeze()
        self._expected, self._new_count = gc.get_freeze_count(), 0
        gc.set_threshold(*_THRESHOLDS)
        gc.callbacks.append(self._called)

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
            self._expected, self._new_count, self._looks_at_all = gc.get_freeze_count(), 0, False
            return
        self._new_count += len(gc.get_objects(2))
        gc.freeze()
        if self._new_count >= self._stray_count:  # to count what is left of them takes a moment
            self._new_count = 0
            if gc.get_freeze_count() >= self._expected + self._stray_count:
                self._looks_at_all = True
                gc.unfreeze()
