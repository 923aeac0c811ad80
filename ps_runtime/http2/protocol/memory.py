"""Reusable memory for large received messages.

A message lives as long as a view of it: a push until its step takes effect. If its pages went back
to the allocator meanwhile, they would go to the system (protobuf asks glibc for that now and then),
and on a virtual machine a page that comes back costs more than all work on it.

Rules:
    - The views of a piece share an object; its end, in any thread, frees the piece.
    - The last freed piece is used first: the processor's caches may have some of it.
    - `trim` releases pieces that were not needed since its last call.

Invariants:
    MEM-1  A piece is handed out only while no view of it exists.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

LEAST_BYTES = 64 * 1024
"""Smaller messages come from the allocator, which has such memory at hand."""

_STEPS = 8
"""Sizes between two powers of two: at most an eighth of a piece is unused."""


@dataclass(slots=True)
class _Pieces:
    """Free pieces of one size, and the least count of them since the last trim."""

    free: deque[npt.NDArray[np.uint8]] = field(default_factory=deque)
    least_count: int = 0
    count: int = 0

    def take(self, size: int, length: int) -> memoryview:
        if self.free:
            piece = self.free.pop()
        else:
            piece = np.empty(size, np.uint8)
            self.count += 1
        self.least_count = min(self.least_count, len(self.free))
        view = piece[:length]
        # At the interpreter's end, its memory goes with it.
        weakref.finalize(view, self.free.append, piece).atexit = False
        return view.data

    def trim(self) -> None:
        for _ in range(self.least_count):
            self.free.popleft()
        self.count -= self.least_count
        self.least_count = len(self.free)


class MessageMemory:
    """The memory of all connections of one server or client."""

    def __init__(self) -> None:
        self._of_size: dict[int, _Pieces] = {}

    @property
    def byte_count(self) -> int:
        """The bytes of all pieces, free or not."""
        return sum(size * found.count for size, found in self._of_size.items())

    def take(self, length: int) -> memoryview:
        """Writable memory of `length` bytes, with any content."""
        if length < LEAST_BYTES:
            return np.empty(length, np.uint8).data
        step = (1 << (length - 1).bit_length() - 1) // _STEPS
        size = -(-length // step) * step  # the smallest of a piece for it
        found = self._of_size.get(size)
        if found is None:
            found = self._of_size[size] = _Pieces()
        return found.take(size, length)

    def trim(self) -> None:
        """Release what was not needed since the last call."""
        for size, found in list(self._of_size.items()):
            found.trim()
            if not found.count:
                del self._of_size[size]
