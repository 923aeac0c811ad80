"""An allocator of pieces of a ring, which are freed in about the order of their allocation.

Pure; `ps_worker.transport.lane` has the memory.

Rules:
    - A piece is contiguous and begins at a multiple of ALIGNMENT_BYTES.
    - A piece that is freed out of order can be used again once all older pieces are free.

Invariants:
    RING-1  Pieces in use never overlap.
    RING-2  When no piece is in use, a piece of the whole ring can be taken.
"""

from __future__ import annotations

from collections import deque

from ps_core.errors import check

ALIGNMENT_BYTES = 64


class Ring:
    """The used bytes of a ring; its size is a multiple of ALIGNMENT_BYTES."""

    def __init__(self, byte_count: int) -> None:
        check(byte_count % ALIGNMENT_BYTES == 0, "RING-1", f"a ring of {byte_count} bytes")
        self._byte_count = byte_count
        self._begin = 0
        self._taken: deque[list[int]] = deque()  # [offset, size, 1 while in use], oldest first
        self._by_offset: dict[int, list[int]] = {}

    def take(self, byte_count: int) -> int | None:
        """The offset of a free piece of `byte_count` bytes (1 or more); None if there is none."""
        size = -(-byte_count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        begin = self._begin
        if not self._taken:
            if size > self._byte_count:
                return None
            begin = 0
        else:
            oldest = self._taken[0][0]
            # Used: [oldest, begin) or, once wrapped around, [oldest, end) and [0, begin).
            limit = oldest if begin <= oldest else self._byte_count
            if begin + size > limit:
                if begin <= oldest or size > oldest:
                    return None
                begin = 0
        piece = [begin, size, 1]
        self._taken.append(piece)
        self._by_offset[begin] = piece
        self._begin = begin + size
        return begin

    def give_back(self, offset: int) -> None:
        """End the use of the piece at `offset`."""
        self._by_offset.pop(offset)[2] = 0
        while self._taken and not self._taken[0][2]:
            self._taken.popleft()
