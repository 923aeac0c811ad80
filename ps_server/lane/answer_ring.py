"""A server's memory in which one session finds the rows that it pulls.

    begin: the oldest pieces make room --the rows are written--> end: at rest
    --the ring comes round--> overwritten

Rules:
    - Pieces follow one another in the ring. The server never waits for the session: a piece is
      overwritten when its turn comes; a reader that comes later finds that its lock has another
      value, and asks again.
    - A sequence lock (`ps_core.sequence_locks`) is odd while its piece is written or no piece has
      it, and never the same for two pieces.

Invariants:
    AR-1  What lies under a lock at rest does not change.
    AR-2  A piece is no longer than half of the ring.
"""

from __future__ import annotations

import contextlib
import platform
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ps_core import limits, sequence_locks
from ps_core.errors import check
from ps_runtime.system.shared_memory import Bytes, SharedSegment

_ALIGNMENT_BYTES = 64

CAN_SHARE = platform.machine() in ("x86_64", "AMD64")
"""True if this processor orders loads and stores as the sequence locks need it."""


class SharedPlace(NamedTuple):
    """The place of values in a segment, in bytes, and the number of their lock."""

    offset_bytes: int
    byte_count: int
    lock_number: int


class AnswerRing:
    """A segment of `byte_count` bytes for the rows of at most `piece_count` pieces, and their
    locks before them. OSError: there is no memory, or this system cannot share any.
    """

    def __init__(
        self,
        segment_id: int,
        byte_count: int = limits.LANE_ANSWER_BYTES,
        piece_count: int = limits.LANE_ANSWER_COUNT,
    ) -> None:
        self.segment_id = segment_id
        self._begin = _aligned(piece_count * sequence_locks.LOCK_BYTES)
        self._end = self._begin + byte_count
        self.segment = SharedSegment("pushpull-answers", self._end)
        self._locks: sequence_locks.SequenceLocks
        self._locks = self.segment.array[: piece_count * sequence_locks.LOCK_BYTES].view(np.uint64)
        sequence_locks.begin(self._locks, range(piece_count))
        self._free = deque(range(piece_count))
        self._pieces: deque[SharedPlace] = deque()  # at rest, oldest first
        self._at = self._begin

    @contextlib.contextmanager
    def piece(self, byte_count: int) -> Iterator[tuple[SharedPlace, Bytes]]:
        """Memory to write within; afterwards it is at rest, and `lock` gives its lock. After an
        exception nobody finds it.
        """
        check(2 * byte_count <= self._end - self._begin, "AR-2", f"a piece of {byte_count} bytes")
        size = max(_aligned(byte_count), _ALIGNMENT_BYTES)
        if self._at + size > self._end:
            while self._pieces and self._pieces[0].offset_bytes >= self._at:
                self._drop_oldest()
            self._at = self._begin
        while self._pieces and self._is_oldest_in(self._at, self._at + size):
            self._drop_oldest()
        if not self._free:
            self._drop_oldest()
        piece = SharedPlace(self._at, byte_count, self._free[0])
        yield piece, self.segment.array[self._at : self._at + byte_count]
        self._free.popleft()
        self._at += size
        sequence_locks.end(self._locks, (piece.lock_number,))
        self._pieces.append(piece)

    def lock(self, piece: SharedPlace) -> int:
        """The sequence lock of a piece at rest."""
        return sequence_locks.now(self._locks, piece.lock_number)

    def close(self) -> None:
        """Close the segment; the session keeps what it has mapped."""
        self.segment.close()

    def _is_oldest_in(self, begin: int, end: int) -> bool:
        oldest = self._pieces[0]
        reaches = oldest.offset_bytes + max(oldest.byte_count, 1)
        return oldest.offset_bytes < end and reaches > begin

    def _drop_oldest(self) -> None:
        number = self._pieces.popleft().lock_number
        sequence_locks.begin(self._locks, (number,))
        self._free.append(number)


def _aligned(byte_count: int) -> int:
    return -(-byte_count // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
