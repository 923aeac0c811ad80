"""What a backup knows of a part, and what the next primary makes of it."""

from __future__ import annotations

from dataclasses import replace

from ps_core.change import Join, TableChange
from ps_core.consistency import parsed
from ps_core.keys import Incarnation
from ps_core.ledger import Outcome
from ps_core.sliced_work import at_once
from ps_server.ranges.events import Apply, Effect
from ps_server.ranges.range_copy import RangeDelta, copying, delta_of, facts_of, fresh_copy, restore
from tests.unit.machine_harness import Bench, make_table, outcomes


def moved(at: Bench) -> Bench:
    """The same range at another server, as its copy has it."""
    other = Bench(at.table, workers=at.workers)
    restore(at_once(copying(at.machine.state)), other.machine.state, at.now_s)
    return other


def test_what_was_answered_is_answered_again_alike() -> None:
    """PC-1."""
    at = Bench(make_table(), workers=2)
    for rank in range(2):
        at.push(rank, 1, 1, block=rank)
        at.seal(rank, 2, 1)
    before = outcomes(at.effects)
    other = moved(at)
    for rank in range(2):
        again = other.push(rank, 1, 1, block=rank) + other.seal(rank, 2, 1)
        assert outcomes(again) == {k: v for k, v in before.items() if k[0] == rank}
    assert other.machine.state.versions == at.machine.state.versions
    assert other.machine.state.clock == 1


def test_what_was_not_answered_comes_again_and_counts_once() -> None:
    """PC-1."""
    at = Bench(make_table(), workers=2)
    at.push(0, 1, 1)
    at.seal(0, 2, 1)
    other = moved(at)
    other.push(0, 1, 1)
    other.seal(0, 2, 1)
    other.push(1, 1, 1)
    assert set(outcomes(other.seal(1, 2, 1)).values()) == {Outcome.APPLIED}
    assert other.machine.state.update_count == 1


def test_a_goodbye_is_kept_if_it_was_answered() -> None:
    at = Bench(make_table(), workers=2)
    at.seal(1, 1, 1, skip=True, last=True)
    other = moved(at)
    other.push(0, 1, 1)
    assert outcomes(other.seal(0, 2, 1))[0, 2] is Outcome.APPLIED


def test_a_goodbye_that_was_not_answered_is_said_again() -> None:
    at = Bench(make_table(), workers=2)
    at.push(1, 1, 1)
    at.seal(1, 2, 1, last=True)  # its step counts: the update waits for the other
    other = moved(at)
    assert not other.machine.state.by_rank[1].has_left
    other.push(0, 1, 1)
    assert (0, 2) not in outcomes(other.seal(0, 2, 1))
    other.push(1, 1, 1)
    other.seal(1, 2, 1, last=True)
    assert other.machine.state.clock == 1


def test_a_sum_that_waits_for_its_scale_waits_at_the_next_primary() -> None:
    at = Bench(make_table(), workers=1)
    at.push(0, 1, 1)
    at.seal(0, 2, 1, clip_scale=0.5)
    other = moved(at)
    assert other.machine.state.clock == 0
    assert outcomes(other.scale(0, 3, 1, 0.25)) == {(0, 3): Outcome.APPLIED}
    assert other.machine.state.clock == 1
    assert other.machine.state.versions[0] == 1


def test_a_read_that_may_have_been_answered_counts_in_what_is_promised() -> None:
    """A change that is prepared by the new primary is after every step that was read for."""
    at = Bench(make_table(), workers=1)
    at.push(0, 1, 1)
    at.seal(0, 2, 1)
    at.pull(0, 1)  # for its step 2
    assert at.machine.state.read_clock == 2
    assert moved(at).machine.state.read_clock == 2


def test_a_read_counts_beyond_where_a_join_is_prepared() -> None:
    """S6: a change of setting after the failover is after the step that it was for, too."""
    at = Bench(make_table(), workers=1)
    at.push(0, 1, 1)
    at.seal(0, 2, 1)
    at.pull(0, 1)
    join = TableChange(9, 0, at.table.consistency, Join(0, Incarnation(2000)))
    at.observe(replace(at.table, proposed=join))
    assert at.machine.state.schedule.hold_point == 1
    other = moved(at)
    other.observe(at.table)
    other.observe(replace(at.table, proposed=TableChange(10, 0, parsed("ssp:1"))))
    assert other.machine.state.schedule.hold_point == 2


def test_a_copy_is_what_the_state_is() -> None:
    """Told by deltas or as a whole, a backup knows the same."""
    at = Bench(make_table(), workers=2)
    told = fresh_copy(at.table, range(4))
    for rank, sequence, clock in ((0, 1, 1), (1, 1, 1), (1, 3, 2), (0, 3, 2)):
        for effects in (at.push(rank, sequence, clock), at.seal(rank, sequence + 1, clock)):
            told.take(_delta(at, effects))
    whole = at_once(copying(at.machine.state))
    assert told.facts == whole.facts == facts_of(at.machine.state)
    assert told.versions == whole.versions
    for incarnation, worker in whole.workers.items():
        other = told.workers[incarnation]
        assert (other.facts, other.own_updates) == (worker.facts, worker.own_updates)
        assert other.ledger.low_water == worker.ledger.low_water


def _delta(at: Bench, effects: list[Effect]) -> RangeDelta:
    counted = [effect.record for effect in effects if isinstance(effect, Apply)]
    return delta_of(at.machine.state, effects, counted)
