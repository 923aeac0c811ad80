"""The segments of an update log against a twin that looks at all frames again each time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from ps_core.keys import RangeId
from ps_server.update_log.format import FrameKind
from ps_server.update_log.segments import LogSegments

BOUND_BYTES = 40
STATE_BYTES = 12
RANGES = 3
BEGINNINGS = FrameKind.BEGIN, FrameKind.SNAPSHOT

Step = tuple[str, FrameKind, int, int]
STEPS = st.tuples(
    st.sampled_from(["append", "append", "write", "turn"]),
    st.sampled_from([FrameKind.BEGIN, FrameKind.SNAPSHOT, FrameKind.RECORD, FrameKind.END]),
    st.integers(0, RANGES - 1),
    st.integers(1, 8),
)


@dataclass
class Twin:
    """All frames that were ever appended: segment, kind, range, bytes; how many are written. And
    segments of before, which are kept for the sake of withheld ranges.
    """

    frames: list[tuple[int, FrameKind, int, int]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    written: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    withheld: set[int] = field(default_factory=set)

    def keeps(self) -> bool:
        """Whether some withheld range has neither ended nor begun anew (SEG-2)."""
        settled = {
            range_id
            for index, (_, kind, range_id, _) in enumerate(self.frames)
            if kind is FrameKind.END or (kind in BEGINNINGS and index < self.written)
        }
        return not self.withheld or not self.withheld <= settled

    def starts(self) -> dict[int, int]:
        """Where each range begins that has not ended, by what is written."""
        found: dict[int, int] = {}
        for index, (segment, kind, range_id, _) in enumerate(self.frames):
            if kind is FrameKind.END:
                found.pop(range_id, None)
            elif kind in BEGINNINGS and index < self.written:
                found[range_id] = segment
        return found

    def on_its_way(self) -> set[int]:
        """Ranges of which a beginning is not written."""
        found: set[int] = set()
        for _, kind, range_id, _ in self.frames[self.written :]:
            if kind is FrameKind.END:
                found.discard(range_id)
            elif kind in BEGINNINGS:
                found.add(range_id)
        return found

    def sizes(self) -> Counter[int]:
        """Of the segments that are there, and count."""
        found = Counter(dict.fromkeys(self.begun, 1) | ({} if self.keeps() else self.kept))
        for segment, _, _, byte_count in self.frames:
            found[segment] += byte_count
        return Counter({number: size for number, size in found.items() if number not in self.gone})

    def update_bytes(self) -> int:
        """In the newest segment."""
        newest = self.begun[-1]
        return sum(f[3] for f in self.frames if f[0] == newest and f[1] is FrameKind.RECORD)


def _appended(segments: LogSegments, kind: FrameKind, range_id: int) -> None:
    segments.append(kind, RangeId(range_id), 1)


def test_the_first_of_two_bases_is_written_and_the_second_is_still_on_its_way() -> None:
    segments = LogSegments(BOUND_BYTES, {}, {})
    segments.begin(1)
    _appended(segments, FrameKind.BEGIN, 0)
    segments.begin(1)
    _appended(segments, FrameKind.SNAPSHOT, 0)
    segments.wrote(1)
    assert segments.lagging == []
    assert not segments.is_full(0)
    segments.wrote(1)
    segments.begin(1)
    assert segments.lagging == [RangeId(0)]


def test_a_base_that_is_written_after_its_range_ended_begins_nothing() -> None:
    segments = LogSegments(BOUND_BYTES, {}, {})
    segments.begin(1)
    _appended(segments, FrameKind.SNAPSHOT, 0)
    _appended(segments, FrameKind.END, 0)
    segments.begin(1)
    _appended(segments, FrameKind.BEGIN, 0)
    segments.wrote(1)  # the snapshot: the range begins in the second segment
    segments.append(FrameKind.RECORD, RangeId(1), 2 * BOUND_BYTES)
    assert segments.let_go() == [1]
    segments.wrote(1)
    assert segments.let_go() == []


def test_a_segment_begins_for_removed_tables_that_had_a_quarter_of_what_remains() -> None:
    segments = LogSegments(BOUND_BYTES, {}, {})
    segments.begin(1)
    segments.forget_table(15)
    assert not segments.is_full(100)
    segments.forget_table(10)
    assert segments.is_full(100)
    segments.begin(1)
    assert not segments.is_full(100), "the newest segment names none"
    segments.forget_table(0)
    assert not segments.is_full(0)
    segments.forget_table(1)
    assert segments.is_full(0)


@given(
    st.lists(st.integers(1, BOUND_BYTES), max_size=2),
    st.sets(st.integers(0, RANGES - 1), max_size=2),
    st.lists(STEPS, max_size=60),
)
def test_segments_are_what_all_frames_say(
    before: list[int], withheld: set[int], steps: list[Step]
) -> None:
    kept = dict(enumerate(before, 1))
    twin = Twin(kept=kept, withheld=withheld)
    segments = LogSegments(BOUND_BYTES, kept, {}, map(RangeId, withheld), len(kept))
    twin.begun.append(segments.begin(1))
    for action, kind, number, byte_count in steps:
        if action == "append":
            segments.append(kind, RangeId(number), byte_count)
            twin.frames.append((segments.newest, kind, number, byte_count))
        elif action == "write":
            _write(segments, twin, byte_count)
        else:
            _turn(segments, twin)
        starts = twin.starts()
        lagging = [r for r in starts if starts[r] < twin.begun[-1] and r not in twin.on_its_way()]
        assert segments.lagging == sorted(lagging, key=lambda r: (starts[r], r))
        assert segments.byte_count == twin.sizes().total()
        kept_bytes = sum(kept.values()) if twin.keeps() else 0
        assert segments.disk_bytes == twin.sizes().total() + kept_bytes


def _write(segments: LogSegments, twin: Twin, count: int) -> None:
    """Some frames more are written: the thread says how many ranges begin in them."""
    some = twin.frames[twin.written : twin.written + count]
    twin.written = min(twin.written + count, len(twin.frames))
    segments.wrote(sum(kind in BEGINNINGS for _, kind, _, _ in some))


def _turn(segments: LogSegments, twin: Twin) -> None:
    is_full = segments.is_full(STATE_BYTES)
    starts = twin.starts()
    waits = bool(segments.lagging or twin.on_its_way())
    assert is_full == (twin.update_bytes() >= STATE_BYTES and not waits)
    if is_full:
        twin.begun.append(segments.begin(1))
    before, gone = sorted(twin.sizes()), segments.let_go()
    assert gone == before[: len(gone)]
    twin.gone |= set(gone)
    kept = twin.sizes()
    assert not twin.gone & {*starts.values(), twin.begun[-1]}  # SEG-1
    assert kept.total() <= BOUND_BYTES or min(kept) == min([*starts.values(), twin.begun[-1]])
