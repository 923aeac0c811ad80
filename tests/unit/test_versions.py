"""Versions of tables, from changes that were made by hand: which there are, and when a range was
never at a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_core.keys import Incarnation, RangeId, TableId
from ps_server.replay.versions import (
    INITIAL,
    History,
    Origin,
    Participant,
    Reached,
    ReplayedChange,
    ShardKey,
    UpdateDecision,
    Version,
    arranged_by_clock,
    history_of,
    torn_at,
)
from tests.examples import examples

MODEL, OTHER = TableId(1), TableId(2)
LEFT, RIGHT, FAR = (MODEL, RangeId(0)), (MODEL, RangeId(1)), (OTHER, RangeId(0))


def incarnation(rank: int) -> Incarnation:
    return Incarnation(10 + rank)


def bsp(
    clock: int, *ranks: int, skipped: Sequence[int] = (), gone: int = 0, staleness: int = 0
) -> UpdateDecision:
    """The update of a clock."""
    parts = [Participant(rank, incarnation(rank), False) for rank in ranks]
    parts += [Participant(rank, incarnation(rank), True) for rank in skipped]
    return UpdateDecision(clock, True, tuple(parts), gone, staleness)


def asp(clock: int, rank: int, *, skip: bool = False, staleness: int = 0) -> UpdateDecision:
    """A step of one worker."""
    return UpdateDecision(clock, False, (Participant(rank, incarnation(rank), skip),), 0, staleness)


def initial() -> UpdateDecision:
    """The values of rank 0."""
    return UpdateDecision(0, False, (Participant(0, incarnation(0), False),))


def change(
    place: ShardKey,
    clock: int,
    *decisions: UpdateDecision,
    time_s: float = 0.0,
    origin: Origin = Origin.RECORD,
    where: str = "",
) -> ReplayedChange:
    return ReplayedChange(place, origin, clock, time_s, decisions, (), where)


def updates(place: ShardKey, *clocks: int) -> list[ReplayedChange]:
    """Of two workers under BSP, one a second."""
    return [change(place, clock, bsp(clock, 0, 1), time_s=clock) for clock in clocks]


def begin(place: ShardKey, clock: int, time_s: float = 0.0) -> ReplayedChange:
    return change(place, clock, time_s=time_s, origin=Origin.BEGIN)


def jump(place: ShardKey, clock: int, where: str = "") -> ReplayedChange:
    return change(place, clock, origin=Origin.JUMP, where=where)


def at(*clocks: int, first: int = 0) -> dict[ShardKey, Reached]:
    """Where the ranges of the model have come to."""
    return {
        place: Reached(first, clock) for place, clock in zip((LEFT, RIGHT), clocks, strict=False)
    }


def done(*clocks: int) -> Reached:
    """The clocks up to which all steps of each rank are decided."""
    by_worker = {incarnation(rank): clock for rank, clock in enumerate(clocks)}
    return Reached(0, min(clocks), by_worker)


def numbers(history: History) -> list[int]:
    return [version.number for version in history.versions]


# --- steps


def test_a_step_is_a_clock_under_bsp_and_a_workers_else() -> None:
    assert bsp(3, 0, 1).step == (3, None)
    assert asp(3, 1).step == (3, incarnation(1))
    assert initial().step == INITIAL
    assert UpdateDecision(3, False, ()).step == (3, None)


# --- a version is a clock


def test_no_log_has_no_version_but_the_beginning() -> None:
    history = history_of([], at(0))
    assert history.is_by_clock
    assert history.versions == [Version(0, 0, INITIAL, 0, 0.0)]


def test_a_clock_that_every_range_has_is_a_version() -> None:
    changes = [*updates(LEFT, 1, 2, 3), *updates(RIGHT, 1, 2)]
    history = history_of(changes, at(3, 2))
    assert numbers(history) == [0, 1, 2]
    assert history.unfinished == [(3, None)]
    assert [v.ranks for v in history.versions] == [(), (0, 1), (0, 1)]
    assert [v.step for v in history.versions] == [INITIAL, (1, None), (2, None)]


def test_a_range_of_another_table_is_not_waited_for() -> None:
    """A table that is stepped less often has no part in the clocks that it lacks."""
    reached = {LEFT: Reached(0, 2), FAR: Reached(0, 1)}
    history = history_of([*updates(LEFT, 1, 2), *updates(FAR, 1)], reached)
    assert numbers(history) == [0, 1, 2]


def test_a_restored_run_begins_at_its_clock() -> None:
    history = history_of(updates(LEFT, 6, 7), at(7, first=5))
    assert history.versions[0] == Version(5, 5, None, 5, 6)  # seconds: nothing before is known
    assert numbers(history) == [5, 6, 7]


def test_what_is_left_of_one_range_begins_the_versions_of_all() -> None:
    """The clocks that other ranges have before that are none; the newest change up to there is the
    time of the first version.
    """
    late = [change(RIGHT, 3, bsp(3, 0, 1), time_s=12.0), *updates(RIGHT, 4)]
    changes = [begin(LEFT, 3, time_s=10.0), *updates(LEFT, 4), *updates(RIGHT, 1, 2), *late]
    history = history_of(changes, at(4, 4))
    assert numbers(history) == [3, 4]
    assert history.versions[0] == Version(3, 3, None, 3, 12.0)


def test_a_snapshot_with_which_the_log_begins_may_be_the_newest_of_the_first_version() -> None:
    changes = [begin(LEFT, 3, time_s=10.0), *updates(LEFT, 40), *updates(RIGHT, 1, 2, 3, 40)]
    assert history_of(changes, at(40, 40)).versions[0].time_s == 10.0


def test_a_change_without_a_decision_is_not_the_time_of_the_first_version() -> None:
    changes = [begin(LEFT, 3, time_s=10.0), change(LEFT, 3, time_s=11.0)]
    assert history_of(changes, at(3)).versions[0].time_s == 10.0


def test_clocks_between_two_logs_are_lost() -> None:
    changes = [*updates(LEFT, 1), jump(LEFT, 4), *updates(LEFT, 5), *updates(RIGHT, 1, 2, 3, 4, 5)]
    history = history_of(changes, at(5, 5))
    assert numbers(history) == [0, 1, 4, 5]
    assert history.lost_count == 2


def test_a_change_of_an_earlier_clock_does_not_put_a_range_back() -> None:
    changes = [*updates(LEFT, 1, 2), change(LEFT, 0), jump(LEFT, 4), *updates(RIGHT, 1, 2, 3, 4)]
    assert [clock for clock, each in arranged_by_clock(changes) if each.place == LEFT] == [
        1, 2, 2, 4,
    ]  # fmt: skip
    history = history_of(changes, at(4, 4))
    assert numbers(history) == [0, 1, 2, 4]
    assert history.lost_count == 1


def test_changes_are_arranged_by_clock_and_those_of_a_shard_stay_in_order() -> None:
    changes = [*updates(LEFT, 1, 2), *updates(RIGHT, 1), change(LEFT, 2, where="later")]
    arranged = [(clock, each.place, each.where) for clock, each in arranged_by_clock(changes)]
    assert arranged == [(1, LEFT, ""), (1, RIGHT, ""), (2, LEFT, ""), (2, LEFT, "later")]


def test_a_version_has_the_most_of_each_of_its_changes() -> None:
    changes = [
        change(LEFT, 1, bsp(1, 0, 1, skipped=(2,), gone=1, staleness=4), time_s=8.0),
        change(RIGHT, 1, bsp(1, 0, 2, skipped=(1, 3)), time_s=7.0),
    ]
    assert history_of(changes, at(1, 1)).versions[1] == Version(
        1, 1, (1, None), 1, 8.0,
        ranks=(0,), partial_ranks=(1, 2), skipped_ranks=(3,), gone_count=1, staleness=4,
    )  # fmt: skip


# --- versions are counted


def test_one_step_of_a_worker_alone_makes_all_versions_counted() -> None:
    changes = [*updates(LEFT, 1), change(LEFT, 2, asp(2, 0))]
    assert not history_of(changes, {LEFT: done(2, 2)}).is_by_clock
    assert history_of([change(LEFT, 0, initial()), *updates(LEFT, 1)], at(1)).is_by_clock


def test_steps_count_in_the_order_in_which_they_were_completed() -> None:
    changes = [
        change(LEFT, 1, asp(1, 0), time_s=1.0),
        change(LEFT, 1, asp(1, 1), time_s=2.0),
        change(RIGHT, 1, asp(1, 1), time_s=3.0),
        change(RIGHT, 1, asp(1, 0, skip=True), time_s=4.0),
        change(LEFT, 2, asp(2, 1, staleness=3), time_s=5.0),
    ]
    history = history_of(changes, {LEFT: done(1, 2), RIGHT: done(1, 1)})
    assert history.unfinished == [(2, incarnation(1))]
    assert [each for _, each in history.changes] == changes
    assert history.versions == [
        Version(0, 0, None, -1, 1.0),
        Version(1, 1, (1, incarnation(1)), 2, 3.0, ranks=(1,)),
        Version(2, 1, (1, incarnation(0)), 3, 4.0, ranks=(0,)),
    ]


def test_a_step_counts_by_what_its_own_worker_has_done() -> None:
    """Whatever clock the range has come to."""
    changes = [change(LEFT, 2, asp(2, 0)), change(LEFT, 1, asp(1, 1))]
    history = history_of(changes, {LEFT: Reached(0, 1, {incarnation(0): 2})})
    assert [v.step for v in history.versions[1:]] == [(2, incarnation(0))]
    assert history.unfinished == [(1, incarnation(1))]


def test_no_change_is_no_version_but_the_beginning() -> None:
    changes = [change(LEFT, 1, asp(1, 0), time_s=5.0)]
    history = history_of(changes, {LEFT: Reached(0)})
    assert history.versions == [Version(0, 0, None, -1, 5.0)]


def test_initial_values_are_the_first_version() -> None:
    """Of all ranges: what was there before the last of them is none."""
    changes = [
        change(LEFT, 0, initial(), time_s=1.0),
        change(LEFT, 1, asp(1, 0), time_s=2.0),
        change(RIGHT, 0, initial(), time_s=3.0),
        change(LEFT, 1, asp(1, 1), time_s=4.0),
    ]
    only_left = {LEFT: done(1, 1)}
    history = history_of(changes, only_left)
    assert history.versions == [
        Version(0, 0, INITIAL, 2, 3.0),
        Version(1, 1, (1, incarnation(1)), 3, 4.0, ranks=(1,)),
    ]
    assert history.unfinished == []
    assert (history.earlier_count, history.late_table) == (1, MODEL)


def test_a_step_whose_last_change_is_that_of_the_beginning_is_no_further_version() -> None:
    both = change(LEFT, 1, initial(), asp(1, 0))
    history = history_of([both], {LEFT: done(1)})
    assert numbers(history) == [0]
    assert history.earlier_count == 0, "version 0 has it"


def test_a_snapshot_with_which_the_log_begins_is_the_first_version() -> None:
    changes = [
        change(LEFT, 7, asp(7, 0), time_s=1.0),
        begin(RIGHT, 7, time_s=2.0),
        change(LEFT, 8, asp(8, 0), time_s=3.0),
        change(RIGHT, 8, asp(8, 0), time_s=4.0),
    ]
    history = history_of(changes, {LEFT: done(8), RIGHT: done(8)})
    assert history.versions == [
        Version(0, 7, None, 1, 2.0),
        Version(1, 8, (8, incarnation(0)), 3, 4.0, ranks=(0,)),
    ]
    assert history.earlier_count == 0, "the log has not all of what was before"


def test_steps_before_a_late_table_are_counted_from_the_beginning_of_the_log() -> None:
    changes = [
        change(LEFT, 7, asp(7, 0)),
        begin(LEFT, 7),
        *(change(LEFT, clock, asp(clock, 0)) for clock in (8, 9)),
        change(FAR, 0, initial()),
        change(LEFT, 10, asp(10, 0)),
    ]
    history = history_of(changes, {LEFT: done(10), FAR: Reached(0)})
    assert [version.step for version in history.versions] == [INITIAL, (10, incarnation(0))]
    assert (history.earlier_count, history.late_table) == (2, OTHER)


# --- a range that never was at a clock


def torn(changes: Sequence[ReplayedChange], clock: int) -> str:
    places = {each.place for each in changes}
    return torn_at(changes, {place: Reached(0) for place in places}, clock)


def test_a_step_that_comes_after_a_later_one_tears_its_clock() -> None:
    changes = [
        change(LEFT, 1, asp(1, 0)),
        change(LEFT, 3, asp(3, 0), where="log 1"),
        change(LEFT, 3, asp(3, 2), where="log 2"),
        change(LEFT, 2, asp(2, 1), where="log 3"),
    ]
    assert torn(changes, 1) == ""
    words = torn(changes, 2)
    assert words == "range 0 got clock 3 (log 1) before all of clock 2 (log 3)"
    assert torn(changes, 3) == ""


def test_each_range_has_moments_of_its_own() -> None:
    changes = [change(LEFT, 3, asp(3, 0)), change(RIGHT, 2, asp(2, 0))]
    assert torn(changes, 2) == ""
    changes.append(change(RIGHT, 1, asp(1, 1)))
    assert "range 1 got clock 2" in torn(changes, 1)


def test_a_log_that_begins_beyond_a_clock_never_was_at_it() -> None:
    assert "range 0 is at clock 4 where its log goes on" in torn([begin(LEFT, 4)], 3)
    assert torn([begin(LEFT, 4)], 4) == ""


def test_a_gap_tears_the_clocks_in_it_and_no_other() -> None:
    changes = [*updates(LEFT, 1, 2, 3), jump(LEFT, 6), *updates(LEFT, 7)]
    assert [clock for clock in range(8) if torn(changes, clock)] == [4, 5]


def test_a_gap_before_the_first_change_of_a_table_tears_the_clocks_in_it() -> None:
    """Another table of the range has updates before the gap."""
    changes = [*updates(LEFT, 1, 2), jump(LEFT, 5), jump(FAR, 4)]
    assert "range 0 is at clock 4" in torn_at(changes[3:], {FAR: Reached(0)}, 3)
    assert torn_at(changes[3:], {FAR: Reached(0)}, 0) == ""
    assert torn_at(changes[3:], {FAR: Reached(3)}, 3) == "", "it was restored at that clock"


class Moments:
    """A shard's moments, one after each change: the newest clock in the values, and the clocks
    whose steps came with it.
    """

    def __init__(self, first_clock: int) -> None:
        self.newest = [first_clock]
        self.came: list[set[int]] = [set()]

    def take(self, each: ReplayedChange) -> None:
        newest = self.newest[-1]
        came = {decision.clock for decision in each.decisions}
        if each.origin is Origin.JUMP:
            came = set(range(newest + 1, each.clock + 1))
        self.newest.append(max(newest, each.clock))
        self.came.append(came)
        if each.origin is Origin.BEGIN:  # what was before is in no log
            self.newest, self.came = [each.clock], [set()]

    def was_at(self, clock: int) -> bool:
        """True if some moment has all that came up to that clock, and nothing beyond it."""
        return any(
            newest <= clock and not any(0 < c <= clock for came in self.came[i + 1 :] for c in came)
            for i, newest in enumerate(self.newest)
        )


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[ReplayedChange], Mapping[ShardKey, Reached]]:
    """Steps in any order, snapshots between them, and what some ranges begin with; of a new run, or
    of one that was restored at clock 2.
    """
    places = [LEFT, RIGHT, FAR]
    first_clock = draw(st.sampled_from([0, 0, 2]))
    reached = {place: Reached(first_clock) for place in places}
    newest = dict.fromkeys(places, first_clock)
    changes = []
    for place in draw(st.sets(st.sampled_from(places))):
        newest[place] = first_clock + draw(st.integers(0, 3))
        changes.append(begin(place, newest[place]))
    for place, what in draw(
        st.lists(st.tuples(st.sampled_from(places), st.integers(-2, 6)), max_size=12)
    ):
        if what <= 0:
            newest[place] += 1 - what
            changes.append(jump(place, newest[place]))
        else:
            newest[place] = max(newest[place], what)
            changes.append(change(place, what, asp(what, 0)))
    return changes, reached


@settings(max_examples=examples(300), deadline=None)
@given(logs(), st.integers(0, 5))
def test_a_clock_is_torn_where_a_range_had_no_moment_of_it(
    log: tuple[list[ReplayedChange], Mapping[ShardKey, Reached]], beyond_count: int
) -> None:
    changes, reached = log
    clock = reached[LEFT].first_clock + beyond_count
    moments = {place: Moments(each.first_clock) for place, each in reached.items()}
    for each in changes:
        moments[each.place].take(each)
    assert bool(torn_at(changes, reached, clock)) == (
        not all(each.was_at(clock) for each in moments.values())
    )


@pytest.mark.parametrize("origin", [Origin.RECORD, Origin.SAME])
def test_a_snapshot_of_what_was_made_before_tears_nothing(origin: Origin) -> None:
    changes = [*updates(LEFT, 1, 2), change(LEFT, 2, origin=origin)]
    assert [torn(changes, clock) for clock in (0, 1, 2, 3)] == [""] * 4
