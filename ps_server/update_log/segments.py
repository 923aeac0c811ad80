"""Decides when an update log's next segment begins, and which old ones go (SEMANTICS S13).

    begin --appended--> newest --full--> older --every range begins later--> let go

Rules:
    - A segment with enough updates is followed by another. Snapshots do not count: a log of a large
      model would begin segments without end. The oldest segments go when the log is above its bound
      and every range begins in a later one.
    - A range that begins in an older segment lags, until a snapshot of it is on its way.
    - A snapshot is due while the newest segment has more bytes of updates than of snapshots. A disk
      that is busy is given only what is due, but that it is given: else a log whose updates never
      pause would grow for ever.
    - Segments with ranges that the server may not go on with are kept, beside the bound. When each
      of these ranges has ended, or begins anew in a later segment, they are segments like others.
    - When tables were removed that had a quarter of what remains, or more, another segment begins
      as soon as no range lags, however little the newest has: a server that is started again makes
      room for each table that it reads of.
    - Frames are written in the order in which they are appended, so a count says which are written.

Invariants:
    SEG-1  A segment in which a whole range begins is not let go, nor is any later one.
    SEG-2  A kept segment is not let go while one of the withheld ranges has not ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from ps_core.keys import RangeId
from ps_server.update_log.format import FrameKind

_SEGMENTS_A_BOUND = 4
_REMAINS_A_REMOVED = 4
"""A snapshot of what remains is written for so much that was removed, at most."""


class LogSegments:
    """The segments of one log, as its event loop knows them.

    Args:
        sizes: bytes of each segment, by number.
        starts: the ranges that the segments have all of, and the segment in which each begins.
        withheld: ranges that the server may not go on with.
        kept_to: the newest segment that has something of them. All up to it are kept, if there are
            none for as long as the server lives.
    """

    def __init__(
        self,
        bound_bytes: int,
        sizes: Mapping[int, int],
        starts: Mapping[RangeId, int],
        withheld: Iterable[RangeId] = (),
        kept_to: int = 0,
    ) -> None:
        self._bound_bytes = bound_bytes
        self._withheld = set(withheld)
        self._kept = {number: size for number, size in sizes.items() if number <= kept_to}
        self._sizes = {number: size for number, size in sizes.items() if number > kept_to}
        self._starts = dict(starts)
        # Beginnings that are not written yet: range, segment; None if the range has ended since.
        self._on_its_way: deque[tuple[RangeId, int] | None] = deque()
        self._update_bytes = self._snapshot_bytes = 0  # in the newest segment
        self._removed_bytes = 0  # of removed tables that the newest segment names

    @property
    def newest(self) -> int:
        """The segment that is written to; 0 before the first."""
        return max(self._sizes or self._kept, default=0)

    @property
    def byte_count(self) -> int:
        """Bytes of all segments but the kept ones, those that wait to be written included."""
        return sum(self._sizes.values())

    @property
    def disk_bytes(self) -> int:
        """Bytes of all segments, the kept ones and those that wait to be written included."""
        return self.byte_count + sum(self._kept.values())

    @property
    def lagging(self) -> list[RangeId]:
        """Ranges that lag, the oldest first: old segments can go when each has a snapshot."""
        newest, coming = self.newest, self._coming
        found = [r for r, at in self._starts.items() if at < newest and r not in coming]
        return sorted(found, key=lambda range_id: (self._starts[range_id], range_id))

    @property
    def _coming(self) -> set[RangeId]:
        return {each[0] for each in self._on_its_way if each is not None}

    def begin(self, byte_count: int) -> int:
        """Begin another segment with `byte_count` bytes. Returns its number."""
        number = self.newest + 1
        self._sizes[number] = byte_count
        self._update_bytes = self._snapshot_bytes = 0
        self._removed_bytes = 0
        return number

    def forget_table(self, state_bytes: int) -> None:
        """A table of so many bytes was removed that the newest segment names."""
        self._removed_bytes += state_bytes

    def append(self, kind: FrameKind, range_id: RangeId, byte_count: int) -> None:
        self._sizes[self.newest] += byte_count
        if kind is FrameKind.RECORD:
            self._update_bytes += byte_count
        elif kind in (FrameKind.SNAPSHOT, FrameKind.BEGIN):
            self._on_its_way.append((range_id, self.newest))
            if kind is FrameKind.SNAPSHOT:
                self._snapshot_bytes += byte_count
        elif kind is FrameKind.END:
            still = [None if each and each[0] == range_id else each for each in self._on_its_way]
            self._on_its_way = deque(still)
            self._starts.pop(range_id, None)
            self._unkeep(range_id)

    def wrote(self, begin_count: int) -> None:
        """The first `begin_count` beginnings that waited, `SNAPSHOT` or `BEGIN`, are written."""
        for _ in range(begin_count):
            written = self._on_its_way.popleft()
            if written is not None:
                self._starts[written[0]] = written[1]
                self._unkeep(written[0])

    def _unkeep(self, range_id: RangeId) -> None:
        """Keep no segment for the sake of this range any more (SEG-2)."""
        if self._withheld == {range_id}:
            self._sizes = {**self._kept, **self._sizes}
            self._kept = {}
        self._withheld.discard(range_id)

    @property
    def snapshot_is_due(self) -> bool:
        """True if a snapshot may be written though the disk is busy."""
        return self._update_bytes > self._snapshot_bytes

    def is_full(self, state_bytes: int) -> bool:
        """True if another segment should begin; all snapshots have about `state_bytes`."""
        if self.lagging or self._coming:
            return False
        enough_bytes = max(self._bound_bytes // _SEGMENTS_A_BOUND, state_bytes)
        has_removed = self._removed_bytes * _REMAINS_A_REMOVED >= max(state_bytes, 1)
        return has_removed or self._update_bytes >= enough_bytes

    def let_go(self) -> list[int]:
        """Forget the segments above the bound that no range needs (SEG-1), and return them."""
        gone = []
        needed = min(self._starts.values(), default=self.newest)
        for number in sorted(self._sizes):
            if number >= needed or self.byte_count <= self._bound_bytes:
                break
            del self._sizes[number]
            gone.append(number)
        return gone
