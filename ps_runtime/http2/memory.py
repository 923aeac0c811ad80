"""Memory that large messages are received into, used again when nobody reads them any more.

A message lives as long as somebody has a view of it: a push until its step takes effect. Given
back to the allocator meanwhile, its pages go to the system (protobuf asks glibc for that now and
then), and on a virtual machine a page that comes back costs more than all that is done with it.

Rules:
    - Whether a piece is still read is told by its references: views of it hold it. So it is
      CPython's count that says so, and nobody has to give anything back.
    - What was not needed between two calls of `trim` is let go.

Invariants:
    MEM-1  A piece is handed out only while nobody else has a view of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from sys import getrefcount

import numpy as np
import numpy.typing as npt

_Piece = npt.NDArray[np.uint8]

LEAST_BYTES = 64 * 1024
"""Smaller ones come from the allocator, which has them at hand."""

_STEPS = 8
"""Sizes between one power of two and the next: at most an eighth of a piece is not used."""

_UNSEEN = 2
"""The references to a piece that is looked at and that nobody reads."""


@dataclass(slots=True)
class _Pieces:
    """Those of one size, the one that was handed out longest ago first."""

    pieces: deque[_Piece] = field(default_factory=deque)
    taken_count: int = 0

    def take(self, size: int) -> _Piece:
        self.taken_count += 1
        piece = self.pieces.popleft() if self.pieces else None
        if piece is None or getrefcount(piece) > _UNSEEN:
            # The one that was read first is read still: so, most often, are all others.
            if piece is not None:
                self.pieces.append(piece)
            piece = np.empty(size, np.uint8)
        self.pieces.append(piece)
        return piece

    def trim(self) -> None:
        for _ in range(max(len(self.pieces) - self.taken_count, 0)):
            piece = self.pieces.popleft()
            if getrefcount(piece) > _UNSEEN:
                self.pieces.append(piece)
        self.taken_count = 0


class MessageMemory:
    """The memory of all connections of one server or client."""

    def __init__(self) -> None:
        self._of_size: dict[int, _Pieces] = {}

    @property
    def byte_count(self) -> int:
        """All that is kept, read or not."""
        return sum(size * len(found.pieces) for size, found in self._of_size.items())

    def take(self, length: int) -> memoryview:
        """Writable memory of `length` bytes; it may hold anything."""
        if length < LEAST_BYTES:
            return np.empty(length, np.uint8).data
        size = _size_of(length)
        found = self._of_size.get(size)
        if found is None:
            found = self._of_size[size] = _Pieces()
        return found.take(size)[:length].data

    def trim(self) -> None:
        """Let go of what was not needed since the last call."""
        for size, found in list(self._of_size.items()):
            found.trim()
            if not found.pieces:
                del self._of_size[size]


def _size_of(length: int) -> int:
    """The least size for `length`."""
    step = (1 << (length - 1).bit_length() - 1) // _STEPS
    return -(-length // step) * step
