"""Memory for copies of blocks: one mapping, of which pieces are taken and given back.

Rules:
    - A piece comes from the lowest place with space: while few copies wait, few pages are touched.
    - The mapping is not the allocator's, which keeps freed memory (`channels.tune_allocator`) in
      the arena of the thread that took it: copies of two threads would take their memory twice.
    - A page that was touched stays. A copy to fresh pages takes four times as long.

Invariants:
    CM-1  No byte is in two pieces.
"""

from __future__ import annotations

import bisect
import mmap
import threading
from typing import NamedTuple

import numpy as np

_ALIGNMENT_BYTES = 64
_TOUCHED_AT_ONCE_BYTES = 8 * 1024 * 1024
"""Bytes that `touch` holds at once, for some milliseconds, in which nobody can take them."""


class MemorySpan(NamedTuple):
    """Bytes [begin, end) of the memory. `view` (writable, "B") has the requested length."""

    begin: int
    end: int
    view: memoryview


class CopyMemory:
    """Memory of a fixed size, whose pages exist once they were touched. Thread-safe."""

    def __init__(self, byte_count: int) -> None:
        self.byte_count = byte_count - byte_count % _ALIGNMENT_BYTES
        self._lock = threading.Lock()
        self._memory: memoryview | None = None
        self._free = [(0, self.byte_count)] if self.byte_count else []
        self._touched_bytes = 0

    def take(self, byte_count: int) -> MemorySpan | None:
        """Take a piece of unspecified content until it is given back; None if there is no space.
        Raises OSError if the system refuses the mapping, as `touch` does.
        """
        length = max(1, -(-byte_count // _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES
        with self._lock:
            for at, (begin, end) in enumerate(self._free):
                if end - begin >= length:
                    return self._taken(at, begin, begin + length, byte_count)
        return None

    def give_back(self, piece: MemorySpan) -> None:
        begin, end = piece.begin, piece.end
        with self._lock:
            at = bisect.bisect_left(self._free, (begin, end))
            if at < len(self._free) and self._free[at][0] == end:
                end = self._free.pop(at)[1]
            if at and self._free[at - 1][1] == begin:
                at -= 1
                begin = self._free.pop(at)[0]
            self._free.insert(at, (begin, end))

    def touch(self, byte_count: int) -> None:
        """Touch the pages of the first `byte_count` bytes, except those in use.

        Blocking: a page fault each, 0.1 s for 256 MiB.
        """
        wanted = min(byte_count, self.byte_count)
        while self._touched_bytes < wanted:
            begin = self._touched_bytes
            end = self._touched_bytes = min(begin + _TOUCHED_AT_ONCE_BYTES, self.byte_count)
            with self._lock:
                at = bisect.bisect_right(self._free, (begin, self.byte_count)) - 1
                is_free = at >= 0 and self._free[at][1] >= end
                piece = self._taken(at, begin, end, end - begin) if is_free else None
            if piece is not None:
                np.frombuffer(piece.view, np.uint8)[:: mmap.PAGESIZE] = 0
                self.give_back(piece)

    def _taken(self, at: int, begin: int, end: int, byte_count: int) -> MemorySpan:
        """Take bytes out of the free stretch number `at`, under the lock."""
        if self._memory is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = memoryview(mmap.mmap(-1, self.byte_count, flags=flags))
        free = self._free[at]
        rest = [(free[0], begin), (end, free[1])]
        self._free[at : at + 1] = [each for each in rest if each[0] < each[1]]
        return MemorySpan(begin, end, self._memory[begin : begin + byte_count])
