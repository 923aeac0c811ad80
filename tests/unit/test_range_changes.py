"""A range whose table's consistency changes: the corners that a training loop does not get to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.change import Change
from ps_core.consistency import parsed
from ps_core.errors import AlreadyPast, InvalidConfig, InvariantViolation
from ps_core.ledger import Outcome, ReplyKind
from ps_server.events import Forget
from tests.unit.machine_harness import Bench, answers, applied, kinds, make_table, outcomes, problem


class Changing(Bench):
    """A bench whose table changes at once."""

    def change(self, setting: str, after_clock: int = 0) -> int:
        """Propose and commit; the clock after which it is so."""
        self.propose(setting, after_clock)
        return self.settle()

    def propose(self, setting: str, after_clock: int = 0) -> int:
        number = self.machine.state.schedule.number + 1
        proposed = Change(number, after_clock, parsed(setting))
        self.table = replace(self.table, proposed=proposed)
        self.observe(self.table)
        held = self.machine.state.schedule.hold_clock
        assert held is not None
        return held

    def settle(self, further: int = 0) -> int:
        held, proposed = self.machine.state.schedule.hold_clock, self.table.proposed
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
    effects = bench.observe(replace(bench.table, proposed=Change(1, 0, parsed("asp"))))
    bench.table = replace(bench.table, proposed=Change(1, 0, parsed("asp")))
    assert effects == []
    before = len(bench.effects)
    assert bench.settle() == 1
    assert isinstance(problem(bench.effects[before:]), InvalidConfig)
    assert answers(bench.pull(None, 1, waiter=2, consistent=True)) == [2]
    bench.push(0, 3, 2)
    bench.seal(0, 4, 2)
    assert bench.machine.state.clock == 1, "worker 1 has not gone on"
    assert isinstance(problem(bench.pull(None, 1, waiter=3, consistent=True)), AlreadyPast)


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
        bench.observe(replace(bench.table, change=Change(1, 0, parsed("bsp"))))


def test_a_step_that_is_held_says_for_whom() -> None:
    bench = _bench("asp")
    bench.pull(0, 0)
    assert bench.propose("ssp:1") == 1
    bench.push(0, 1, 1)
    bench.seal(0, 2, 1)
    bench.pull(0, 1, waiter=5)
    (told,) = bench.machine.reads.waits(bench.now_s)
    assert "waits for the scheduler: a change of its consistency after clock 1" in told
    assert kinds(bench.push(0, 3, 2)) == [ReplyKind.RECEIVED]
    bench.table = replace(bench.table, proposed=None)
    assert answers(bench.observe(bench.table)) == [5], "withdrawn: as before"
