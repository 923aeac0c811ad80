"""Which segments an update log has, which it needs, and when another begins (SEMANTICS S13).

    begin --appended--> newest --full--> older --every range begins later--> let go

Rules:
    - A segment with updates enough is followed by another: snapshots do not count, or a log of a
      large model would be begun again and again. The oldest go when the log is above its bound, and
      every range begins in a later one.
    - A range that begins in an older segment lags, until a snapshot of it is on its way.
    - What is appended is written in that order: how many beginnings are written says which.

Invariants:
    SEG-1  A segment in which a range begins, of which all is there, is not let go, nor any later.

What it deliberately does not do: write, or remove files (`ps_server.update_log.writer` does).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from ps_core.keys import RangeId
from ps_server.update_log.format import FrameKind

_SEGMENTS_A_BOUND = 4


class LogSegments:
    """The segments of one log, as its writer's loop knows them.

    Args:
        bound_bytes: above it the oldest go that nothing needs.
        sizes: those that there are, by number, in bytes.
        starts: the ranges that they have all of, and in which segment each begins.
    """

    def __init__(
        self, bound_bytes: int, sizes: Mapping[int, int], starts: Mapping[RangeId, int]
    ) -> None:
        self._bound_bytes = bound_bytes
        self._sizes = dict(sizes)
        self._starts = dict(starts)
        # Beginnings that are not written yet: range, segment; None where the range has ended since.
        self._on_its_way: deque[tuple[RangeId, int] | None] = deque()
        self._update_bytes = 0  # in the newest segment

    @property
    def newest(self) -> int:
        """The number of the segment that is written to; 0 before the first."""
        return max(self._sizes, default=0)

    @property
    def byte_count(self) -> int:
        """Bytes of all of them, and of what is to be written."""
        return sum(self._sizes.values())

    @property
    def lagging(self) -> list[RangeId]:
        """The ranges that lag, the oldest first: a snapshot of each lets what is old go."""
        newest, coming = self.newest, self._coming
        found = [r for r, at in self._starts.items() if at < newest and r not in coming]
        return sorted(found, key=lambda range_id: (self._starts[range_id], range_id))

    @property
    def _coming(self) -> set[RangeId]:
        """The ranges that begin in what is not written yet."""
        return {each[0] for each in self._on_its_way if each is not None}

    def begin(self, byte_count: int) -> int:
        """Another segment, which begins with so much; its number."""
        number = self.newest + 1
        self._sizes[number] = byte_count
        self._update_bytes = 0
        return number

    def append(self, kind: FrameKind, range_id: RangeId, byte_count: int) -> None:
        """Frames more in the newest segment, on their way."""
        self._sizes[self.newest] += byte_count
        if kind is FrameKind.RECORD:
            self._update_bytes += byte_count
        elif kind in (FrameKind.SNAPSHOT, FrameKind.BEGIN):
            self._on_its_way.append((range_id, self.newest))
        elif kind is FrameKind.END:
            still = [None if each and each[0] == range_id else each for each in self._on_its_way]
            self._on_its_way = deque(still)
            self._starts.pop(range_id, None)

    def wrote(self, begin_count: int) -> None:
        """So many beginnings more are written, `BASE` and `BEGUN`: the first that were not."""
        for _ in range(begin_count):
            begun = self._on_its_way.popleft()
            if begun is not None:
                self._starts[begun[0]] = begun[1]

    def is_full(self, state_bytes: int) -> bool:
        """Whether another segment should begin.

        Args:
            state_bytes: what snapshots of all ranges would take, about.
        """
        if self.lagging or self._coming:
            return False
        return self._update_bytes >= max(self._bound_bytes // _SEGMENTS_A_BOUND, state_bytes)

    def let_go(self) -> list[int]:
        """The segments that nothing needs and there is no room for: they are none of the log's
        from now on (SEG-1).
        """
        gone = []
        needed = min(self._starts.values(), default=self.newest)
        for number in sorted(self._sizes):
            if number >= needed or self.byte_count <= self._bound_bytes:
                break
            del self._sizes[number]
            gone.append(number)
        return gone
