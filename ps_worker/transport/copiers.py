"""Copies of megabytes by several threads, where a machine has cores to spare: one core copies 4 to
10 GB/s, which a pull from the shared memory of eight servers would wait for.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ps_core.sequence_locks import Copies, copy_each
from ps_runtime.system.capacity import usable_core_count

CORES_PER_COPIER = 4
MAX_COUNT = 4
"""Four threads of an H100's machine copy as fast as its servers update."""

_MIN_BYTES = 2 * 2**20
"""Fewer are copied by the calling thread: the others would have to wake up first."""


class Copiers:
    """Threads that copy; they are made when there is much to copy, and end with `close`.

    Args:
        count: the threads that copy at once, the calling one among them; None: what the machine is
            good for.
    """

    def __init__(self, count: int | None = None) -> None:
        if count is None:
            count = max(1, min(MAX_COUNT, usable_core_count() // CORES_PER_COPIER))
        self._count = count
        self._others: ThreadPoolExecutor | None = None

    def copy(self, copies: Copies) -> None:
        """Make all copies. Blocking: until they are made."""
        if self._count == 1 or sum(target.nbytes for target, _ in copies) < _MIN_BYTES:
            copy_each(copies)
            return
        if self._others is None:
            self._others = ThreadPoolExecutor(self._count - 1, "pushpull-copier")
        mine, *theirs = (copies[first :: self._count] for first in range(self._count))
        waited = [self._others.submit(copy_each, part) for part in theirs if part]
        copy_each(mine)
        for each in waited:
            each.result()

    def close(self) -> None:
        """End the threads; a later copy makes new ones."""
        if self._others is not None:
            self._others.shutdown()
            self._others = None
