"""A range whose table's consistency changes: the corners that a training loop does not get to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.change import Join, TableChange
from ps_core.cluster_view import Node, NodeState, Role
from ps_core.consistency import parsed
from ps_core.errors import AlreadyPast, InvalidConfig, InvariantViolation
from ps_core.keys import Incarnation, NodeId
from ps_core.ledger import Outcome, ReplyKind
from ps_server.ranges.events import (
    AnswerPull,
    Effect,
    Forget,
    PullEvent,
    PushEvent,
    SealEvent,
    SealTerms,
    Sender,
)
from tests.unit.machine_harness import (
    PLACE,
    Bench,
    answers,
    applied,
    kinds,
    make_table,
    outcomes,
    problem,
)


class Changing(Bench):
    """A bench whose table changes at once."""

    def change(self, setting: str, after_clock: int = 0) -> int:
        """Propose and commit; the clock after which it is so."""
        self.propose(setting, after_clock)
        return self.settle()

    def propose(self, setting: str, after_clock: int = 0) -> int:
        number = self.machine.state.schedule.number + 1
        proposed = TableChange(number, after_clock, parsed(setting))
        self.table = replace(self.table, proposed=proposed)
        self.observe(self.table)
        held = self.machine.state.schedule.hold_point
        assert held is not None
        return held

    def settle(self, further: int = 0) -> int:
        held, proposed = self.machine.state.schedule.hold_point, self.table.proposed
        assert held is not None
        assert proposed is not None
        change = replace(proposed, after_clock=held + further)
        self.table = replace(self.table, change=change, proposed=None)
        self.observe(self.table)
        return change.after_clock


def _bench(setting: str, workers: int = 2) -> Changing:
    return Changing(make_table(parsed(setting)), workers=workers)


def test_an_eager_push_beyond_the_clock_that_is_held_waits() -> None:
    bench = _bench("asp")
    bench.push(0, 1, 1)
    bench.seal(0, 2, 1)
    assert bench.propose("asp:divide") == 1
    bench.push(0, 3, 2, eager=())
    assert applied(bench.effects) == [(1, [(0, 1)])]
    bench.settle()
    assert applied(bench.effects) == [(1, [(0, 1)]), (2, [(0, 3)])]
    assert outcomes(bench.seal(0, 4, 2)) == {(0, 4): Outcome.APPLIED}


def test_an_eager_push_does_not_overtake_the_last_update_of_bsp() -> None:
    bench = _bench("bsp")
    bench.push(0, 1, 1)
    bench.seal(0, 2, 1)
    assert bench.change("asp") == 1
    bench.push(0, 3, 2, eager=())
    assert applied(bench.effects) == []
    bench.push(1, 1, 1)
    bench.seal(1, 2, 1)
    assert applied(bench.effects) == [(1, [(0, 1), (1, 1)]), (2, [(0, 3)])]


def test_a_consistent_read_has_exactly_its_clock_even_if_more_forms_at_once() -> None:
    """Worker 1's first seal waits for a push that is on its way; then two updates form together."""
    bench = _bench("bsp")
    for clock in (1, 2):
        bench.push(0, 2 * clock - 1, clock)
        bench.seal(0, 2 * clock, clock)
    bench.pull(None, 1, waiter=7, consistent=True)
    bench.seal(1, 2, 1)
    bench.push(1, 3, 2)
    bench.seal(1, 4, 2)
    assert applied(bench.effects) == []
    effects = bench.push(1, 1, 1)
    assert [clock for clock, _ in applied(effects)] == [1, 2]
    order = [type(effect).__name__ for effect in effects if not hasattr(effect, "kind")]
    assert order.index("AnswerPull") < len(order) - 1 - order[::-1].index("Apply")
    assert answers(effects) == [7]


def test_a_consistent_read_of_a_clock_without_its_own_state_is_refused() -> None:
    """Out of BSP after clock 1: what is beyond it may be there already, and clock 2 never is."""
    bench = _bench("bsp")
    bench.pull(None, 2, waiter=1, consistent=True)
    for rank in (0, 1):
        bench.push(rank, 1, 1)
        bench.seal(rank, 2, 1)
    effects = bench.observe(replace(bench.table, proposed=TableChange(1, 0, parsed("asp"))))
    bench.table = replace(bench.table, proposed=TableChange(1, 0, parsed("asp")))
    assert effects == []
    before = len(bench.effects)
    assert bench.settle() == 1
    assert isinstance(problem(bench.effects[before:]), InvalidConfig)
    assert answers(bench.pull(None, 1, waiter=2, consistent=True)) == [2]
    bench.push(0, 3, 2)
    bench.seal(0, 4, 2)
    assert bench.machine.state.clock == 1, "worker 1 has not gone on"
    assert isinstance(problem(bench.pull(None, 1, waiter=3, consistent=True)), AlreadyPast)


def test_a_consistent_read_is_refused_before_held_steps_bring_its_clock() -> None:
    """They go on under SSP, where each range is at clock 2 with other steps beyond it."""
    bench = _bench("bsp")
    bench.pull(None, 2, waiter=1, consistent=True)
    for rank in (0, 1):
        bench.push(rank, 1, 1)
        bench.seal(rank, 2, 1)
    assert bench.propose("ssp:0") == 1
    for rank in (0, 1):
        bench.push(rank, 3, 2)
        bench.seal(rank, 4, 2)
    before = len(bench.effects)
    bench.settle()
    assert bench.machine.state.clock == 2
    assert answers(bench.effects[before:]) == []
    assert isinstance(problem(bench.effects[before:]), InvalidConfig)


def test_what_was_kept_for_compensation_is_forgotten_when_no_step_can_need_it() -> None:
    bench = _bench("asp:compensate=1")
    for rank in (0, 1):
        bench.pull(rank, 0, waiter=rank)
    assert bench.change("asp") == 1
    for rank in (0, 1):
        bench.push(rank, 1, 1)
        bench.seal(rank, 2, 1)
    assert [e for e in bench.effects if isinstance(e, Forget)] == []
    for rank in (0, 1):
        bench.push(rank, 3, 2)
        bench.seal(rank, 4, 2)
    forgotten = [e.reader for e in bench.effects if isinstance(e, Forget)]
    assert sorted(forgotten) == [1000, 1001]
    assert not bench.machine.state.schedule.varies


def test_a_change_is_void_where_a_later_one_comes_before_it() -> None:
    bench = _bench("bsp")
    assert bench.change("asp", after_clock=50) == 50
    assert bench.change("ssp:2", after_clock=3) == 3
    at = bench.machine.state.schedule.at
    assert [str(at(clock)) for clock in (0, 3, 4, 50, 51)] == ["bsp", "bsp"] + ["ssp:2"] * 3


def test_a_change_behind_what_has_happened_is_the_schedulers_bug_and_says_so() -> None:
    bench = _bench("asp")
    bench.push(0, 1, 1)
    bench.seal(0, 2, 1)
    with pytest.raises(InvariantViolation, match="SC-1"):
        bench.observe(replace(bench.table, change=TableChange(1, 0, parsed("bsp"))))


def test_a_step_that_is_held_says_for_whom() -> None:
    bench = _bench("asp")
    bench.pull(0, 0)
    assert bench.propose("ssp:1") == 1
    bench.push(0, 1, 1)
    bench.seal(0, 2, 1)
    bench.pull(0, 1, waiter=5)
    (told,) = bench.machine.read_gate.waits(bench.now_s)
    assert "waits for the scheduler: a change of its consistency after clock 1" in told
    assert kinds(bench.push(0, 3, 2)) == [ReplyKind.RECEIVED]
    bench.table = replace(bench.table, proposed=None)
    assert answers(bench.observe(bench.table)) == [5], "withdrawn: as before"


# --- a worker takes the place of one that is gone


def _dead(rank: int) -> Node:
    return Node(
        NodeId(rank + 1), Incarnation(1000 + rank), Role.WORKER, rank, "", NodeState.GONE, 30_000
    )


class Replacing(Changing):
    """A bench on which a rank is given anew; its new worker's incarnation is 2000 + rank."""

    def die(self, rank: int) -> None:
        self._note(self.machine.ended(_dead(rank), self.now_s))

    def join(self, rank: int, after_clock: int = 0) -> int:
        """The clock after which the new worker is there: where others are, or later."""
        incarnation = Incarnation(2000 + rank)
        proposed = TableChange(9, after_clock, self.table.consistency, Join(rank, incarnation))
        self.table = replace(self.table, proposed=proposed)
        self.observe(self.table)
        held = self.machine.state.schedule.hold_point
        assert held is not None
        join = Join(rank, incarnation, held)
        self.table = replace(self.table, proposed=None, joins=(join,))
        self.observe(self.table)
        return held

    def successor_steps(self, rank: int, clock: int, sequence: int = 1) -> None:
        sender = Sender(Incarnation(2000 + rank), rank, rank)
        push = PushEvent(PLACE, sender, sequence, clock, 0, 256, (2000 + rank, sequence))
        self._note(self.machine.entry(push, self.now_s))
        seal = SealEvent(PLACE, sender, sequence + 1, SealTerms(clock))
        self._note(self.machine.entry(seal, self.now_s))

    def successor_reads(self, rank: int, clock: int, waiter: int) -> list[Effect]:
        incarnation = Incarnation(2000 + rank)
        event = PullEvent(PLACE, waiter, incarnation, clock, False, self.now_s + 10, rank=rank)
        return self._note(self.machine.pull(event, self.now_s))


def _replacing(setting: str) -> Replacing:
    return Replacing(make_table(parsed(setting)), workers=2)


def _step(bench: Bench, rank: int, clock: int) -> None:
    bench.push(rank, 2 * clock - 1, clock)
    bench.seal(rank, 2 * clock, clock)


def test_what_the_dead_had_sealed_still_counts_when_its_rank_is_given_anew() -> None:
    bench = _replacing("bsp")
    _step(bench, 0, 1)
    bench.die(0)
    assert bench.join(0) == 1
    _step(bench, 1, 1)
    assert applied(bench.effects) == [(1, [(0, 1), (1, 1)])]
    _step(bench, 1, 2)
    assert len(applied(bench.effects)) == 1, "update 2 waits for the successor"
    bench.successor_steps(0, 2)
    assert applied(bench.effects)[1:] == [(2, [(2000, 1), (1, 3)])]


def test_a_successors_reads_wait_until_it_has_joined_and_begin_there() -> None:
    bench = _replacing("bsp")
    for clock in (1, 2, 3):
        _step(bench, 0, clock)
        _step(bench, 1, clock)
    bench.die(0)
    bench.successor_reads(0, 0, waiter=5)
    assert answers(bench.effects) == []
    (told,) = bench.machine.read_gate.waits(bench.now_s)
    assert "worker 0 has not joined the table" in told
    assert bench.join(0) == 3
    (answer,) = [e for e in bench.effects if isinstance(e, AnswerPull)]
    assert (answer.waiter, answer.range_clock) == (5, 3)


def test_a_successor_does_not_overtake_the_last_update_of_bsp() -> None:
    bench = _replacing("bsp")
    _step(bench, 0, 1)
    assert bench.change("asp") == 1
    bench.die(0)
    assert bench.join(0) == 1
    bench.successor_steps(0, 2)
    assert applied(bench.effects) == [], "update 1 waits for worker 1"
    _step(bench, 1, 1)
    assert applied(bench.effects) == [(1, [(0, 1), (1, 1)]), (2, [(2000, 1)])]


def test_a_clock_before_a_successor_that_all_others_have_left_is_passed() -> None:
    bench = _replacing("bsp")
    _step(bench, 0, 1)
    _step(bench, 1, 1)
    bench.die(0)
    bench.seal(1, 3, 2, skip=True, last=True)
    assert bench.join(0, after_clock=2) == 2, "another range has reached it"
    bench.successor_steps(0, 3)
    assert applied(bench.effects)[1:] == [(3, [(2000, 1)])]


@pytest.mark.parametrize("setting", ["bsp", "ssp:0", "asp"])
def test_who_joins_a_table_that_sleeps_is_where_the_others_are(setting: str) -> None:
    bench = _replacing(setting)
    bench.pull(0, 0)
    bench.pull(1, 0)
    bench.seal(1, 1, 1, skip=True, last=True)
    bench.die(1)
    assert bench.join(1) == 0, "neither a pull nor a final seal is a step"
    assert answers(bench.successor_reads(1, 0, waiter=9))


def test_another_setting_begins_beyond_what_was_pulled_for() -> None:
    bench = _replacing("asp")
    bench.pull(0, 0)
    assert bench.change("bsp") == 1


def test_who_joins_takes_part_in_the_step_that_the_others_have_pulled_for() -> None:
    bench = _replacing("bsp")
    _step(bench, 0, 1)
    _step(bench, 1, 1)
    bench.pull(1, 1)
    bench.die(0)
    assert bench.join(0) == 1
    _step(bench, 1, 2)
    assert len(applied(bench.effects)) == 1
    bench.successor_steps(0, 2)
    assert applied(bench.effects)[1:] == [(2, [(2000, 1), (1, 3)])]


def test_a_bsp_clock_that_nobody_is_in_is_passed_between_two_asynchronous_ones() -> None:
    bench = _replacing("asp")
    _step(bench, 0, 1)
    assert bench.change("bsp") == 1
    assert bench.change("asp", after_clock=2) == 2
    bench.die(0)
    assert bench.join(0, after_clock=2) == 2
    bench.die(1)
    bench.successor_steps(0, 3)
    assert applied(bench.effects) == [(1, [(0, 1)]), (3, [(2000, 1)])]


def test_a_join_starts_no_setting_that_is_to_come() -> None:
    bench = _replacing("bsp")
    assert bench.change("asp", after_clock=50) == 50
    bench.die(0)
    assert bench.join(0) == 0
    assert [str(bench.machine.state.schedule.at(clock)) for clock in (1, 50, 51)] == [
        "bsp", "bsp", "asp",
    ]  # fmt: skip


def test_a_successor_that_dies_too_is_not_waited_for() -> None:
    bench = _replacing("bsp")
    bench.die(0)
    bench.join(0)
    _step(bench, 1, 1)
    assert applied(bench.effects) == []
    second = replace(_dead(0), incarnation=Incarnation(2000))
    bench._note(bench.machine.ended(second, bench.now_s))
    assert applied(bench.effects) == [(1, [(1, 1)])]
