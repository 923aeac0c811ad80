"""A range that is cut for a checkpoint: exactly what is up to its clock, read between two updates;
and a range that starts from one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core import limits
from ps_core.change import Join, TableChange, TableCut
from ps_core.cluster_view import Node, NodeState, Role
from ps_core.consistency import parsed
from ps_core.errors import InvalidConfig, UpdateFailed, WaitExpired
from ps_core.keys import Incarnation, NodeId
from ps_core.ledger import Outcome
from ps_server.ranges.events import AnswerPull, Apply, Effect, PullEvent, RefusePull, ReplyTo
from ps_server.ranges.read_gate import WaitCause
from ps_server.ranges.schedule import checkpoint_cut
from tests.unit.machine_harness import (
    PLACE,
    Bench,
    answers,
    applied,
    make_table,
    outcomes,
    problem,
)

NUMBER = 3
WAITER = 70
"""Of the server's own read at the cut."""


class Cutting(Bench):
    """A bench whose table is cut, as a scheduler would."""

    def step(self, rank: int, clock: int) -> list[Effect]:
        """A push and its seal."""
        first = 2 * (clock - self.machine.state.first_clock) - 1
        return self.push(rank, first, clock) + self.seal(rank, first + 1, clock)

    def propose(self, number: int = NUMBER) -> int:
        """The clock that is prepared."""
        change = self.machine.state.schedule.prepared + 1
        setting = self.table.consistency
        proposed = TableChange(change, 0, setting, checkpoint=number)
        self.table = replace(self.table, proposed=proposed)
        self.observe(self.table)
        held = self.machine.state.schedule.hold_point
        assert held is not None
        return held

    def cut(self, clock: int, number: int = NUMBER) -> list[Effect]:
        """It is settled, and its server asks for it at once."""
        self.table = replace(self.table, proposed=None, cut=TableCut(number, clock))
        return self.observe(self.table) + self.read(clock, number)

    def read(self, clock: int, number: int = NUMBER) -> list[Effect]:
        """As `ParameterNode.reading_at_cut`."""
        deadline_s = self.now_s + limits.CHECKPOINT_CUT_S
        cut_id = checkpoint_cut(number)
        event = PullEvent(PLACE, WAITER, None, clock, True, deadline_s, cut_id)
        return self._note(self.machine.pull(event, self.now_s))

    def withdraw_proposal(self) -> list[Effect]:
        self.table = replace(self.table, proposed=None, cut=None)
        return self.observe(self.table)

    def pass_time(self, seconds: float) -> list[Effect]:
        self.now_s += seconds
        return self._note(self.machine.tick(self.now_s))

    def captured(self) -> list[int]:
        """The clocks of the updates that were applied before the read at the cut was answered."""
        found = []
        for effect in self.effects:
            if isinstance(effect, Apply):
                found.append(effect.record.clock)
            elif isinstance(effect, AnswerPull) and effect.waiter == WAITER:
                return found
        raise AssertionError("it was not answered")

    @property
    def is_held(self) -> bool:
        return self.machine.state.schedule.holds(1_000)


def bench(setting: str, workers: int = 2) -> Cutting:
    return Cutting(make_table(parsed(setting)), workers=workers)


# --- held where it is, and at the cut


@pytest.mark.parametrize("setting", ["bsp", "ssp:4", "ssp:0..4"])
def test_a_range_has_all_up_to_the_cut_and_nothing_beyond_it(setting: str) -> None:
    """One worker runs ahead as far as it may; the other comes to the cut last."""
    cut = bench(setting)
    cut.step(0, 1)
    assert cut.propose() == 1
    for clock in (2, 3, 4):
        cut.step(0, clock)
    assert not [a for a in applied(cut.effects) if a[0] > 1]
    assert answers(cut.cut(2)) == []
    cut.step(1, 1)
    assert answers(cut.step(1, 2)) == [WAITER]
    assert sorted(cut.captured()) == ([1, 2] if setting == "bsp" else [1, 1, 2, 2])
    for clock in (3, 4):
        cut.step(1, clock)
    assert not cut.is_held
    assert {clock for clock, _ in applied(cut.effects)} == {1, 2, 3, 4}


def test_a_seal_that_is_held_at_the_cut_counts_as_soon_as_it_is_read() -> None:
    cut = bench("ssp:4")
    cut.step(0, 1)
    cut.propose()
    cut.cut(1)
    held = cut.step(0, 2)
    assert outcomes(held) == {}
    effects = cut.step(1, 1)
    assert answers(effects) == [WAITER]
    assert outcomes(effects)[0, 4] is Outcome.APPLIED
    order = [type(e).__name__ for e in effects if isinstance(e, Apply | AnswerPull)]
    assert order == ["Apply", "AnswerPull", "Apply"]


@pytest.mark.parametrize("setting", ["bsp", "ssp:4"])
def test_reads_are_not_held(setting: str) -> None:
    """A worker at the cut computes the step that it will push when it is let go."""
    cut = bench(setting)
    for rank in (0, 1):
        cut.step(rank, 1)
    assert cut.propose() == 1
    assert answers(cut.pull(0, 1, waiter=5)) == [5]
    assert cut.propose(NUMBER + 1) == 1  # what was read for has not taken effect
    cut.step(0, 2)
    cut.cut(1)
    assert answers(cut.pull(1, 1, waiter=6)) == [6]


def test_a_change_that_is_proposed_still_holds_reads() -> None:
    changing = bench("ssp:4")
    changing.table = replace(changing.table, proposed=TableChange(1, 0, parsed("asp")))
    changing.observe(changing.table)
    assert answers(changing.pull(0, 0, waiter=5)) == []
    assert changing.machine.read_gate.cause(5) is WaitCause.CHANGE


def test_eager_pushes_are_held_until_the_cut_is_settled() -> None:
    cut = bench("ssp:4")
    cut.propose()
    cut.push(0, 1, 1, eager=())
    assert applied(cut.effects) == []
    cut.table = replace(cut.table, proposed=None, cut=TableCut(NUMBER, 1))
    cut.observe(cut.table)
    assert applied(cut.effects) == [(1, [(0, 1)])]


def test_what_is_asynchronous_holds_nothing_for_a_cut() -> None:
    """It is torn whatever waits: a silent worker would have all others wait for its lease."""
    cut = bench("asp")
    cut.step(0, 1)
    assert cut.propose() == 1
    cut.step(0, 2)
    cut.push(0, 5, 3, eager=())
    assert [clock for clock, _ in applied(cut.effects)] == [1, 2, 3]
    cut.table = replace(cut.table, proposed=None, cut=TableCut(NUMBER, 1))
    cut.observe(cut.table)
    assert not cut.is_held


def test_what_is_asynchronous_and_about_to_be_otherwise_is_held() -> None:
    """The cut may be where it is not: then it is of one clock."""
    cut = bench("asp")
    cut.step(0, 1)
    cut.table = replace(cut.table, change=TableChange(1, 3, parsed("ssp:4")))
    cut.observe(cut.table)
    cut.propose()
    cut.step(0, 2)
    assert [clock for clock, _ in applied(cut.effects)] == [1]


def test_nothing_is_held_for_a_cut_while_the_scheduler_is_silent() -> None:
    cut = bench("ssp:4")
    cut.step(0, 1)
    cut.propose()
    cut.step(0, 2)
    assert cut.machine.state.schedule.give_up_cut()
    cut.effects += cut.machine.resume(0.0)
    assert [clock for clock, _ in applied(cut.effects)] == [1, 2]
    cut.observe(cut.table)
    cut.step(0, 3)
    assert [clock for clock, _ in applied(cut.effects)] == [1, 2, 3]


def test_what_is_asynchronous_up_to_the_cut_is_not_held_by_a_change_after_it() -> None:
    cut = bench("asp")
    cut.step(0, 1)
    change = TableChange(1, 3, parsed("bsp"))
    cut.table = replace(cut.table, change=change)
    cut.observe(cut.table)
    cut.propose()
    cut.table = replace(cut.table, proposed=None, cut=TableCut(NUMBER, 2))
    cut.observe(cut.table)
    assert not cut.is_held


def test_what_was_asynchronous_at_the_cut_is_torn_though_nothing_after_it_is() -> None:
    """The setting of the cut's clock is forgotten as soon as that clock is past."""
    cut = bench("asp", workers=1)
    for clock in (1, 2):
        cut.step(0, clock)
    cut.table = replace(cut.table, change=TableChange(1, 2, parsed("bsp")))
    cut.observe(cut.table)
    cut.propose()
    for clock in (3, 4):
        cut.step(0, clock)
    assert cut.machine.state.clock == 2
    settled = TableCut(NUMBER, 2)
    cut.table = replace(cut.table, proposed=None, cut=settled)
    cut.observe(cut.table)
    assert cut.machine.state.clock == 4
    assert cut.machine.state.schedule.is_torn_at(settled)
    assert not cut.machine.state.schedule.is_torn_at(replace(settled, checkpoint=NUMBER + 1))


# --- what goes wrong


def test_nobody_is_held_by_a_cut_that_took_too_long() -> None:
    cut = bench("ssp:4")
    cut.step(0, 1)
    cut.propose()
    cut.cut(1)
    cut.step(0, 2)
    assert cut.pass_time(limits.CHECKPOINT_CUT_S - 1) == []
    effects = cut.pass_time(1)
    assert isinstance(problem([e for e in effects if isinstance(e, RefusePull)]), WaitExpired)
    assert outcomes(effects) == {(0, 3): Outcome.APPLIED, (0, 4): Outcome.APPLIED}
    assert cut.machine.wake_s is None


def test_a_read_that_comes_when_its_cut_is_held_no_more_is_refused() -> None:
    """What is there then may be more than the cut."""
    cut = bench("ssp:4")
    cut.propose()
    cut.table = replace(cut.table, proposed=None, cut=TableCut(NUMBER, 1))
    cut.observe(cut.table)
    cut.pass_time(limits.CHECKPOINT_CUT_S)
    assert isinstance(problem(cut.read(1)), WaitExpired)


def test_a_proposal_that_is_withdrawn_holds_nothing() -> None:
    cut = bench("ssp:4")
    cut.propose()
    cut.step(0, 1)
    assert outcomes(cut.withdraw_proposal()) == {(0, 1): Outcome.APPLIED, (0, 2): Outcome.APPLIED}


def test_a_cut_that_was_given_up_before_it_was_read_holds_nothing() -> None:
    """Its server could not write, say: nobody will read it."""
    cut = bench("ssp:4")
    cut.propose()
    cut.table = replace(cut.table, proposed=None, cut=TableCut(NUMBER, 1))
    cut.observe(cut.table)
    cut.step(0, 1)
    cut.step(0, 2)
    assert [clock for clock, _ in applied(cut.effects)] == [1]
    cut.withdraw_proposal()
    assert [clock for clock, _ in applied(cut.effects)] == [1, 2]
    assert not cut.is_held


def test_a_newer_cut_ends_one_that_nobody_read() -> None:
    cut = bench("ssp:4")
    cut.cut(1, NUMBER)
    cut.machine.cancel(WAITER)
    cut.cut(2, NUMBER + 1)
    assert cut.machine.state.schedule._cuts.keys() == {checkpoint_cut(NUMBER + 1)}


def test_a_view_that_comes_again_begins_no_cut_anew() -> None:
    cut = bench("ssp:4")
    for rank in (0, 1):
        cut.step(rank, 1)
    cut.propose()
    assert answers(cut.cut(1)) == [WAITER]
    cut.observe(cut.table)
    assert not cut.is_held


def test_a_part_that_was_made_after_the_cut_does_not_begin_it() -> None:
    """Whoever serves it now was not asked for it."""
    table = replace(make_table(parsed("ssp:4")), cut=TableCut(NUMBER, 1))
    late = Cutting(table)
    late.observe(table)
    assert not late.is_held
    later = replace(table, cut=TableCut(NUMBER + 1, 5))
    late.observe(later)
    assert late.is_held


@pytest.mark.parametrize("setting", ["bsp", "ssp:4"])
def test_who_is_gone_is_not_waited_for_at_the_cut(setting: str) -> None:
    cut = bench(setting)
    cut.step(0, 1)
    cut.propose()
    cut.cut(1)
    gone = Node(NodeId(9), Incarnation(1001), Role.WORKER, 1, "", NodeState.GONE)
    assert answers(cut.gone(gone)) == [WAITER]


def test_a_table_that_has_failed_is_not_written() -> None:
    cut = bench("bsp")
    cut.propose()
    cut.cut(2)
    refused = cut.fail(UpdateFailed("it has a bug"))
    assert isinstance(problem([e for e in refused if isinstance(e, RefusePull)]), UpdateFailed)
    assert isinstance(problem(cut.read(2)), UpdateFailed)


def test_an_update_that_waits_for_its_scale_is_in_no_cut_before_it_has_it() -> None:
    """Clipped: the sum of clock 1 is reduced, and the values do not have it yet."""
    cut = bench("bsp", workers=1)
    cut.push(0, 1, 1)
    cut.seal(0, 2, 1, clip_scale=1.0)
    assert cut.propose() == 1
    assert answers(cut.cut(1)) == []
    cut.push(0, 3, 2)
    cut.seal(0, 4, 2, clip_scale=1.0)
    effects = cut.scale(0, 5, 1, 0.5)
    assert answers(effects) == [WAITER]
    assert cut.captured() == [1]


def test_backup_workers_left_behind_do_not_hold_the_cut() -> None:
    cut = bench("bsp:backup=1")
    cut.step(0, 1)
    assert cut.propose() == 1
    cut.step(0, 2)
    assert answers(cut.cut(2)) == [WAITER]
    assert cut.captured() == [1, 2]
    cut.step(0, 3)
    assert cut.machine.state.clock == 3


# --- a range that starts from a checkpoint


def restored(setting: str, clock: int = 41, workers: int = 2) -> Cutting:
    table = make_table(parsed(setting), from_rank_zero=True)
    return Cutting(replace(table, restored_clock=clock), workers=workers)


SETTINGS = ("bsp", "ssp:1", "asp")


@pytest.mark.parametrize("setting", SETTINGS)
def test_reads_wait_until_it_is_loaded(setting: str) -> None:
    range_ = restored(setting)
    assert answers(range_.pull(0, 41, waiter=5) + range_.pull(None, 0, waiter=6)) == []
    assert range_.machine.read_gate.cause(5) is WaitCause.INITIAL_VALUES
    (said,) = set(range_.machine.read_gate.waits(range_.now_s))
    assert "to load the checkpoint" in said
    effects = range_.machine.loaded(dict.fromkeys(range(4), 17), range_.now_s)
    assert answers(effects) == [5, 6]
    assert {e.range_clock for e in effects if isinstance(e, AnswerPull)} == {41}
    assert next(e.versions for e in effects if isinstance(e, AnswerPull)) == dict.fromkeys(
        range(4), 17
    )


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("is_early", [True, False])
def test_all_workers_begin_after_its_clock(setting: str, is_early: bool) -> None:
    """Rank 0 included, which has nothing to give; before it is loaded or after."""
    range_ = restored(setting)
    if not is_early:
        range_.machine.loaded({}, range_.now_s)
    for rank in (0, 1):
        range_.step(rank, 42)
    if is_early:
        assert applied(range_.effects) == []
        range_.effects += range_.machine.loaded({}, range_.now_s)
    assert {clock for clock, _ in applied(range_.effects)} == {42}
    assert range_.machine.state.clock == 42
    assert answers(range_.pull(1, 42)) == [1]


@pytest.mark.parametrize("clock", [1, 41])
def test_steps_of_before_are_refused(clock: int) -> None:
    range_ = restored("bsp")
    effects = range_.push(0, 1, clock)
    assert outcomes(effects) == {(0, 1): Outcome.INVALID}
    assert "expected 42" in problem(effects).message


@pytest.mark.parametrize("is_loaded", [True, False])
def test_nobody_assigns_it_other_values(is_loaded: bool) -> None:
    range_ = restored("bsp")
    if is_loaded:
        range_.machine.loaded({}, range_.now_s)
    assert isinstance(problem(range_.push(0, 1, 0, is_assign=True)), InvalidConfig)
    assert isinstance(problem(range_.seal(0, 2, 0)), InvalidConfig)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_newcomer_begins_where_the_others_are(setting: str) -> None:
    range_ = restored(setting)
    range_.machine.loaded({}, range_.now_s)
    for clock in (42, 43):
        for rank in (0, 1):
            range_.step(rank, clock)
    joined = replace(range_.table, joins=(Join(2, Incarnation(1002), 43),))
    range_.observe(joined)
    effects = range_.pull(2, 0, waiter=9)
    assert [e.range_clock for e in effects if isinstance(e, AnswerPull)] == [43]
    for rank in (0, 1):
        range_.step(rank, 44)
    range_.push(2, 1, 44)
    effects = range_.seal(2, 2, 44)
    assert outcomes(effects)[2, 2] is Outcome.APPLIED
    assert range_.machine.state.clock == 44


@pytest.mark.parametrize("setting", SETTINGS)
def test_who_has_its_rank_from_the_start_takes_no_clock_back(setting: str) -> None:
    """A rank beyond the first, in a table that was made when its worker was there already."""
    table = restored(setting).table
    range_ = Cutting(replace(table, joins=(Join(2, Incarnation(1002), 41),)))
    range_.observe(range_.table)
    range_.machine.loaded({}, range_.now_s)
    clocks = [range_.machine.state.clock]
    for rank in (0, 1, 2):
        range_.step(rank, 42)
        clocks.append(range_.machine.state.clock)
    assert clocks == [41, 41, 41, 42]


@pytest.mark.parametrize("setting", SETTINGS)
def test_who_left_before_it_was_loaded_is_not_waited_for(setting: str) -> None:
    range_ = restored(setting)
    gone = Node(NodeId(9), Incarnation(1001), Role.WORKER, 1, "", NodeState.LEFT)
    range_.gone(gone)
    range_.step(0, 42)
    range_.effects += range_.machine.loaded({}, range_.now_s)
    assert applied(range_.effects) == [(42, [(0, 1)])]
    assert range_.machine.state.clock == 42


@pytest.mark.parametrize("setting", SETTINGS)
def test_rank_zero_may_leave_before_it_is_loaded(setting: str) -> None:
    """It has nothing to give: reads go on waiting for the server."""
    range_ = restored(setting)
    range_.pull(1, 41, waiter=5)
    range_.gone(Node(NodeId(8), Incarnation(1000), Role.WORKER, 0, "", NodeState.GONE))
    assert not [e for e in range_.effects if isinstance(e, RefusePull)]
    assert answers(range_.machine.loaded({}, range_.now_s)) == [5]


def test_a_checkpoint_of_a_range_that_is_not_loaded_waits_for_that() -> None:
    range_ = restored("bsp")
    assert range_.propose() == 41
    assert answers(range_.cut(41)) == []
    assert answers(range_.machine.loaded({}, range_.now_s)) == [WAITER]


def test_a_table_that_cannot_be_loaded_refuses_what_waits_and_what_comes() -> None:
    range_ = restored("bsp")
    range_.step(0, 42)
    range_.pull(0, 42, waiter=5)
    effects = range_.fail(UpdateFailed("the checkpoint cannot be loaded"))
    assert {e.waiter for e in effects if isinstance(e, RefusePull)} == {5}
    assert {e.ending.outcome for e in effects if isinstance(e, ReplyTo) and e.ending} == {
        Outcome.INVALID
    }
    assert isinstance(problem(range_.pull(1, 41, waiter=6)), UpdateFailed)


def test_it_is_clipped_as_before() -> None:
    range_ = restored("bsp", workers=1)
    range_.machine.loaded({}, range_.now_s)
    range_.push(0, 1, 42)
    range_.seal(0, 2, 42, clip_scale=1.0)
    assert applied(range_.effects) == []
    range_.scale(0, 3, 42, 0.5)
    assert [clock for clock, _ in applied(range_.effects)] == [42]
