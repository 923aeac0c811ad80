"""Memory that large messages are received into, used again when nobody reads them any more.

A message lives as long as somebody has a view of it: a push until its step takes effect. Given
back to the allocator meanwhile, its pages go to the system (protobuf asks glibc for that now and
then), and on a virtual machine a page that comes back costs more than all that is done with it.

Rules:
    - Views of a piece hold an object of their own; its end, in whatever thread, says that nobody
      reads the piece any more, and nobody has to give anything back.
    - The piece that was read last is used first: the processor's caches may have some of it.
    - What was not needed between two calls of `trim` is let go.

Invariants:
    MEM-1  A piece is handed out only while nobody else has a view of it.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

LEAST_BYTES = 64 * 1024
"""Smaller ones come from the allocator, which has them at hand."""

_STEPS = 8
"""Sizes between one power of two and the next: at most an eighth of a piece is not used."""


@dataclass(slots=True)
class _Pieces:
    """Those of one size that nobody reads, and how few there were at least since the last trim."""

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
        # What is there at the interpreter's end goes with it.
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
        """All that is kept, read or not."""
        return sum(size * found.count for size, found in self._of_size.items())

    def take(self, length: int) -> memoryview:
        """Writable memory of `length` bytes; it may hold anything."""
        if length < LEAST_BYTES:
            return np.empty(length, np.uint8).data
        size = _size_of(length)
        found = self._of_size.get(size)
        if found is None:
            found = self._of_size[size] = _Pieces()
        return found.take(size, length)

    def trim(self) -> None:
        """Let go of what was not needed since the last call."""
        for size, found in list(self._of_size.items()):
            found.trim()
            if not found.count:
                del self._of_size[size]


def _size_of(length: int) -> int:
    """The least size for `length`."""
    step = (1 << (length - 1).bit_length() - 1) // _STEPS
    return -(-length // step) * step
