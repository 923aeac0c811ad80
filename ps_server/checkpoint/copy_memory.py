"""Memory for copies of blocks: one mapping, of which pieces are taken and given back.

Rules:
    - Pieces come from the lowest place with room: where little is copied at once, little is ever
      touched.
    - It is not the allocator's. That keeps what is freed (`channels.tune_allocator`) in the arena
      of the thread that asked for it, where other threads do not find it: copies that are made by
      one thread and by another would take their memory twice.
    - A page that was touched stays. To copy to fresh pages takes four times as long.

Invariants:
    CM-1  No byte is in two pieces.

What it deliberately does not do: grow, or wait until there is room.
"""

from __future__ import annotations

import bisect
import mmap
import threading
from typing import NamedTuple

import numpy as np

_ALIGNMENT_BYTES = 64
_TOUCHED_AT_ONCE_BYTES = 8 * 1024 * 1024
"""Whoever wants a piece meanwhile does without so much, for some milliseconds."""


class Piece(NamedTuple):
    """Bytes [begin, end) of the memory; `view` (writable, "B") is as long as was asked for."""

    begin: int
    end: int
    view: memoryview


class CopyMemory:
    """So many bytes, and never more. Thread-safe.

    Args:
        byte_count: virtual; pages are there once they were touched.
    """

    def __init__(self, byte_count: int) -> None:
        self.byte_count = byte_count - byte_count % _ALIGNMENT_BYTES
        self._lock = threading.Lock()
        self._memory: memoryview | None = None
        self._free = [(0, self.byte_count)] if self.byte_count else []
        self._touched_bytes = 0

    def take(self, byte_count: int) -> Piece | None:
        """A piece of unspecified content, the caller's until it is given back; None: there is no
        room.

        Raises:
            OSError: the system refuses the mapping.
        """
        length = _aligned(byte_count)
        with self._lock:
            for at, (begin, end) in enumerate(self._free):
                if end - begin >= length:
                    return self._taken(at, begin, begin + length, byte_count)
        return None

    def give_back(self, piece: Piece) -> None:
        """Ends the caller's use of a piece."""
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
        """Have the pages of the first `byte_count` bytes, but those that are in use.

        Blocking: a page fault each, 0.1 s for 256 MiB.

        Raises:
            OSError: the system refuses the mapping.
        """
        wanted = min(byte_count, self.byte_count)
        while self._touched_bytes < wanted:
            begin = self._touched_bytes
            self._touched_bytes = min(begin + _TOUCHED_AT_ONCE_BYTES, self.byte_count)
            piece = self._take_at(begin, self._touched_bytes)
            if piece is not None:
                np.frombuffer(piece.view, np.uint8)[:: mmap.PAGESIZE] = 0
                self.give_back(piece)

    def _take_at(self, begin: int, end: int) -> Piece | None:
        with self._lock:
            at = bisect.bisect_right(self._free, (begin, self.byte_count)) - 1
            if at < 0 or self._free[at][1] < end:
                return None
            return self._taken(at, begin, end, end - begin)

    def _taken(self, at: int, begin: int, end: int, byte_count: int) -> Piece:
        """Out of the stretch that is the free one number `at`; under the lock."""
        if self._memory is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = memoryview(mmap.mmap(-1, self.byte_count, flags=flags))
        free = self._free[at]
        rest = [(free[0], begin), (end, free[1])]
        self._free[at : at + 1] = [each for each in rest if each[0] < each[1]]
        return Piece(begin, end, self._memory[begin : begin + byte_count])


def _aligned(byte_count: int) -> int:
    return max(1, -(-byte_count // _ALIGNMENT_BYTES)) * _ALIGNMENT_BYTES
