"""What makes a bound move: the rule case by case, and the periods that it is applied to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ps_core.change import TableChange
from ps_core.cluster_view import ClusterView, Node, NodeState, Role
from ps_core.consistency import Consistency, parsed
from ps_core.keys import Incarnation, NodeId, TableId
from ps_core.losses import NO_LOSSES, LossTotals
from ps_core.tables.table import Table
from scheduler.machine.adaptation import (
    FIRST_HOLD_COUNT,
    FORGOTTEN_COUNT,
    LEAST_CLOCK_COUNT,
    Adaptation,
    Course,
    Move,
    Report,
)
from tests.unit.machine_harness import make_table

INTERVAL_S = 5.0
TABLE = TableId(1)


def losses(mean: float, count: int = 100, spread: float = 0.1) -> LossTotals:
    """So many losses about `mean`."""
    return LossTotals(count, mean * count, (mean * mean + spread * spread) * count)


class Table1:
    """A bound that moves, period by period."""

    def __init__(self, text: str = "ssp:2..40") -> None:
        self.setting = parsed(text)
        self.course = Course()
        self.reason = ""

    def period(self, share: float, of: LossTotals = NO_LOSSES) -> int:
        verdict = self.course.step(self.setting, share, of)
        self.reason = verdict.reason
        self.setting = replace(self.setting, staleness=verdict.staleness)
        return verdict.staleness

    def periods(self, shares: Sequence[float]) -> list[int]:
        return [self.period(share) for share in shares]


# --- the rule


def test_long_waits_raise_it_by_half_up_to_the_most() -> None:
    table = Table1("ssp:2..12")
    assert table.periods([0.5] * 6) == [3, 4, 6, 9, 12, 12]
    assert Table1("ssp:0..3").periods([0.5] * 4) == [1, 2, 3, 3]


def test_the_reason_says_how_long() -> None:
    table = Table1()
    table.period(0.234)
    assert table.reason == "half of the workers or more waited 23% of the time"


def test_two_quiet_periods_lower_it_by_one() -> None:
    table = Table1("ssp:2..40@5")
    assert table.periods([0.01] * 8) == [5, 4, 4, 3, 3, 2, 2, 2]


def test_a_period_that_is_not_quiet_begins_the_count_again() -> None:
    table = Table1("ssp:2..40@5")
    assert table.periods([0.01, 0.05, 0.01, 0.05, 0.01, 0.01]) == [5, 5, 5, 5, 5, 4]


def test_waits_that_are_neither_long_nor_short_move_nothing() -> None:
    assert set(Table1("ssp:2..40@5").periods([0.02, 0.05, 0.0999] * 30)) == {5}


def test_where_it_turned_out_too_low_it_comes_back_to_ever_later() -> None:
    """Nobody waits from 4 on; at 3 all do."""
    table = Table1("ssp:2..40@4")
    lasted = []
    for _ in range(8):
        count = 0
        while table.period(0.0) == 4:
            count += 1
        lasted.append(count + 1)
        assert table.setting.staleness == 3
        assert table.period(0.5) == 4, "back to where it was, not half as much again"
    assert lasted == [2, 4, 8, 16, 32, 64, 64, 64]


def test_what_turns_out_well_after_all_is_forgotten() -> None:
    table = Table1("ssp:0..40@4")
    assert table.periods([0.0, 0.0, 0.5]) == [4, 3, 4]
    assert table.periods([0.0] * 4) == [4, 4, 4, 3]
    assert table.periods([0.0] * 6) == [3, 2, 2, 1, 1, 0], "as fast as ever"


def test_a_loss_that_rises_halves_it_and_holds_it() -> None:
    table = Table1("ssp:2..40@20")
    table.period(0.05, losses(1.0))
    assert table.period(0.5, losses(1.2)) == 10
    assert table.reason == "the loss rose from 1 to 1.2"
    assert table.periods([0.5] * FIRST_HOLD_COUNT) == [10] * FIRST_HOLD_COUNT
    assert table.period(0.5) == 15
    assert table.period(0.0, losses(1.5)) == 7
    assert table.period(0.0, losses(2.0)) == 3
    assert table.period(0.0, losses(3.0)) == 2
    assert table.period(0.0, losses(4.0)) == 2


def test_each_rise_holds_it_longer_until_there_was_none_for_long() -> None:
    table = Table1("ssp:2..40@20")
    table.period(0.05, losses(1.0))
    held = []
    loss = 1.0
    for _ in range(6):
        loss *= 2
        table.period(0.05, losses(loss))
        s, count = table.setting.staleness, 0
        while table.period(0.5, losses(loss)) == s:
            count += 1
        held.append(count)
    assert held == [6, 12, 24, 48, 64, 64]
    table.periods([0.05] * FORGOTTEN_COUNT)
    table.period(0.05, losses(2 * loss))
    s = table.setting.staleness
    assert table.periods([0.5] * 7) == [s] * 6 + [s + max(1, s // 2)]


def test_quiet_lowers_it_while_it_is_held() -> None:
    table = Table1("ssp:2..40@20")
    table.period(0.05, losses(1.0))
    table.period(0.05, losses(2.0))
    assert table.periods([0.0] * 4) == [10, 9, 9, 8]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (losses(1.0, count=10_000), losses(1.04, count=10_000)),  # not by 5 %
        (losses(-1.0, count=10_000), losses(-0.96, count=10_000)),
        (losses(1.0, spread=2.0), losses(1.5, spread=2.0)),  # 1.8 standard errors
        (losses(1.0, count=7), losses(9.0)),  # too few to say
        (losses(1.0), losses(9.0, count=7)),
        (NO_LOSSES, losses(9.0)),
        (losses(9.0), NO_LOSSES),
        (losses(2.0), losses(1.0)),
    ],
)
def test_what_is_no_rise_of_the_loss(before: LossTotals, now: LossTotals) -> None:
    table = Table1("ssp:2..40@20")
    table.period(0.05, before)
    assert table.period(0.05, now) == 20


def test_a_negative_loss_rises_too() -> None:
    table = Table1("ssp:2..40@20")
    table.period(0.05, losses(-2.0))
    assert table.period(0.05, losses(-1.5)) == 10


def test_a_loss_that_is_not_finite_has_risen() -> None:
    table = Table1("ssp:2..40@20")
    assert table.period(0.5, LossTotals(non_finite_count=1)) == 10
    assert table.reason == "a loss was not finite"


# --- the periods


class Watching:
    """An adaptation, two servers, and workers that train on one table."""

    def __init__(self, text: str = "ssp:2..8", workers: int = 3) -> None:
        self.now_s = 100.0
        self.adaptation = Adaptation(INTERVAL_S)
        self.servers = [NodeId(1), NodeId(2)]
        self.workers = [NodeId(3 + rank) for rank in range(workers)]
        self.states = dict.fromkeys([*self.servers, *self.workers], NodeState.ALIVE)
        self.clocks = dict.fromkeys(self.workers, 0)
        self.losses = dict.fromkeys(self.workers, NO_LOSSES)
        self.waits_s: dict[NodeId, dict[tuple[TableId, NodeId], float]] = {
            server: {} for server in self.servers
        }
        self.table = make_table(parsed(text))
        self.number = 0
        self.publish(self.table)

    def publish(self, *tables: Table) -> None:
        self.number += 1
        nodes = tuple(
            Node(
                node_id,
                Incarnation(node_id),
                Role.SERVER if node_id in self.servers else Role.WORKER,
                0,
                "",
                state,
            )
            for node_id, state in self.states.items()
        )
        self.adaptation.observe(ClusterView(self.number, "c", 3, 2, nodes, (), tables))

    def run(
        self,
        seconds: float,
        waited: Sequence[float] = (0.0, 0.0, 0.0),
        rates: Sequence[float] = (10.0, 10.0, 10.0),
        silent: Sequence[NodeId] = (),
    ) -> list[Move]:
        """Let time go by; everybody says each second how it does."""
        found: list[Move] = []
        for _ in range(round(seconds)):
            self.now_s += 1.0
            for worker, share, rate in zip(self.workers, waited, rates, strict=False):
                self.clocks[worker] += round(rate)
                place = (TABLE, worker)
                waits = self.waits_s[self.servers[worker % 2]]
                waits[place] = waits.get(place, 0.0) + share
            for server in self.servers:
                if server not in silent:
                    report = Report(self.now_s, waits_s=dict(self.waits_s[server]))
                    self.adaptation.heard(server, report)
            for worker in self.workers:
                if worker not in silent:
                    clocks = {TABLE: self.clocks[worker]}
                    said = Report(self.now_s, clocks, losses=self.losses[worker])
                    self.adaptation.heard(worker, said)
            found += self.adaptation.look(self.now_s)
        return found

    def start_again(self) -> None:
        """The scheduler dies; another one knows what was kept."""
        self.adaptation = Adaptation(INTERVAL_S, self.adaptation.courses)
        self.publish(self.table)

    def moved(self, text: str) -> None:
        """The change was made."""
        self.table = replace(self.table, change=TableChange(self.number, 0, parsed(text)))
        self.publish(self.table)


def _at(moves: list[Move]) -> list[Consistency]:
    return [move.consistency for move in moves]


def test_half_of_the_workers_count() -> None:
    assert Watching().run(20, waited=(0.5, 0.0, 0.0)) == []
    moves = Watching().run(7, waited=(0.5, 0.5, 0.0))
    assert _at(moves) == [parsed("ssp:2..8@3")]
    assert moves[0].table_name == "model"
    assert moves[0].reason == "half of the workers or more waited 50% of the time"
    assert _at(Watching(workers=2).run(7, waited=(0.0, 0.2))) == [parsed("ssp:2..8@3")]


def test_a_period_lasts_as_long_as_it_should() -> None:
    watching = Watching()
    watching.run(1)
    assert watching.run(4, waited=(1, 1, 1)) == []
    assert len(watching.run(1, waited=(1, 1, 1))) == 1


def test_and_until_everybody_has_taken_steps_enough() -> None:
    watching = Watching("ssp:2..8")
    watching.moved("ssp:2..8@6")
    watching.run(1, rates=(10, 10, 1))
    needed = LEAST_CLOCK_COUNT + 6
    assert watching.run(needed - 1, waited=(1, 1, 0), rates=(10, 10, 1)) == []
    assert _at(watching.run(1, waited=(1, 1, 0), rates=(10, 10, 1))) == [parsed("ssp:2..8@8")]


def test_who_waits_for_a_worker_that_stands_still_moves_nothing() -> None:
    watching = Watching()
    assert watching.run(60, waited=(1, 1, 0), rates=(10, 10, 0)) == []


@pytest.mark.parametrize("which", [0, 2])
def test_who_waits_for_a_silent_node_moves_nothing(which: int) -> None:
    watching = Watching()
    node_id = [*watching.servers, *watching.workers][which]
    assert watching.run(4, waited=(1, 1, 0)) == []
    assert watching.run(1, waited=(1, 1, 0), silent=[node_id]) == []
    watching.states[node_id] = NodeState.SILENT
    watching.publish(watching.table)
    assert watching.run(30, waited=(1, 1, 0), silent=[node_id]) == []
    watching.states[node_id] = NodeState.ALIVE
    watching.publish(watching.table)
    assert watching.run(4, waited=(1, 1, 0)) == [], "what was before is no part of a period"
    assert len(watching.run(4, waited=(1, 1, 0))) == 1


@pytest.mark.parametrize("state", [NodeState.LEFT, NodeState.GONE])
def test_who_has_left_is_not_waited_for(state: NodeState) -> None:
    watching = Watching()
    watching.run(2)
    watching.states[watching.workers[2]] = state
    watching.publish(watching.table)
    assert len(watching.run(6, waited=(1, 1), rates=(10, 10))) == 1


def test_a_worker_that_joins_counts_from_the_next_period() -> None:
    watching = Watching(workers=2)
    watching.run(4, waited=(1, 1))
    watching.workers.append(NodeId(9))
    watching.states[NodeId(9)] = NodeState.ALIVE
    watching.clocks[NodeId(9)], watching.losses[NodeId(9)] = 0, NO_LOSSES
    watching.publish(watching.table)
    assert len(watching.run(2, waited=(1, 1, 0), rates=(10, 10, 0))) == 1
    assert watching.run(20, waited=(1, 1, 0), rates=(10, 10, 0)) == []


def test_each_change_begins_a_period() -> None:
    watching = Watching()
    watching.run(5, waited=(1, 1, 1))
    watching.moved("ssp:2..8@3")
    assert watching.run(5, waited=(1, 1, 1)) == []
    assert _at(watching.run(1, waited=(1, 1, 1))) == [parsed("ssp:2..8@4")]


def test_nothing_is_decided_while_a_change_is_proposed_and_then_a_period_begins() -> None:
    watching = Watching()
    watching.run(5, waited=(1, 1, 1))
    watching.publish(replace(watching.table, proposed=TableChange(1, 0, parsed("asp"))))
    assert watching.run(20, waited=(1, 1, 1)) == []
    watching.publish(watching.table)  # withdrawn
    assert watching.run(5, waited=(1, 1, 1)) == []
    assert len(watching.run(1, waited=(1, 1, 1))) == 1


def test_a_move_that_was_not_made_is_decided_again() -> None:
    watching = Watching()
    assert len(watching.run(7, waited=(1, 1, 1))) == 1
    assert _at(watching.run(5, waited=(1, 1, 1))) == [parsed("ssp:2..8@3")]


@pytest.mark.parametrize("text", ["ssp:2", "asp", "bsp"])
def test_a_bound_that_is_fixed_is_not_looked_at(text: str) -> None:
    watching = Watching(text)
    assert watching.adaptation.is_idle
    assert watching.run(30, waited=(1, 1, 1)) == []


def test_other_bounds_know_nothing_of_those_before() -> None:
    watching = Watching()
    watching.losses = dict.fromkeys(watching.workers, LossTotals(non_finite_count=1))
    watching.run(1)
    watching.losses = dict.fromkeys(watching.workers, LossTotals(non_finite_count=2))
    assert watching.run(15, waited=(1, 1, 1)) == [], "it is held"
    watching.moved("ssp:4..9")
    assert _at(watching.run(6, waited=(1, 1, 1))) == [parsed("ssp:4..9@6")]


def test_a_server_that_joins_counts_from_a_period_of_its_own() -> None:
    watching = Watching()
    watching.run(4, waited=(1, 1, 1))
    watching.servers.append(NodeId(9))
    watching.states[NodeId(9)], watching.waits_s[NodeId(9)] = NodeState.ALIVE, {}
    watching.publish(watching.table)
    assert watching.run(6, waited=(1, 1, 1)) == []
    assert len(watching.run(1, waited=(1, 1, 1))) == 1


def test_a_bound_that_becomes_fixed_is_left_alone_and_other_bounds_begin_anew() -> None:
    watching = Watching()
    watching.run(5, waited=(1, 1, 1))
    watching.moved("ssp:4")
    assert watching.adaptation.is_idle
    assert watching.run(30, waited=(1, 1, 1)) == []
    watching.moved("ssp:4..9")
    assert watching.run(5, waited=(1, 1, 1)) == []
    assert _at(watching.run(2, waited=(1, 1, 1))) == [parsed("ssp:4..9@6")]


def test_the_losses_of_a_period_are_those_of_all_workers_in_it() -> None:
    watching = Watching()
    watching.moved("ssp:2..8@8")

    def train(seconds: int, loss: float) -> list[Move]:
        found = []
        for _ in range(seconds):
            for worker in watching.workers:
                watching.losses[worker] = watching.losses[worker].with_loss(loss)
            found += watching.run(1, waited=(0.05, 0.05, 0.05))
        return found

    assert train(30, 1.0) == []
    watching.losses[watching.workers[0]] = watching.losses[watching.workers[0]].with_loss(0.5)
    moves = train(10, 2.0)
    assert _at(moves)[0] == parsed("ssp:2..8@4")
    assert moves[0].reason.startswith("the loss rose from 1")
    watching.moved("ssp:2..8@4")
    assert train(30, 2.0) == []
    assert _at(train(7, math.nan))[0] == parsed("ssp:2..8@2")


def held() -> Watching:
    """A bound of which a loss that was not finite says that it is not to be raised for long."""
    watching = Watching()
    for number in (1, 2):
        watching.losses = dict.fromkeys(watching.workers, LossTotals(non_finite_count=number))
        watching.run(6)
    assert watching.run(15, waited=(1, 1, 1)) == [], "it is held"
    return watching


def test_a_scheduler_that_is_started_again_remembers_what_was_tried() -> None:
    watching = held()
    watching.start_again()
    assert watching.run(10, waited=(1, 1, 1)) == [], "it is held"
    watching.start_again()
    assert watching.run(10, waited=(1, 1, 1)) == [], "it is held"


def test_what_is_remembered_is_of_these_bounds_and_no_others() -> None:
    watching = held()
    watching.table = replace(watching.table, change=TableChange(9, 0, parsed("ssp:2..9")))
    watching.start_again()
    assert watching.adaptation.courses == {}
    assert _at(watching.run(7, waited=(1, 1, 1))) == [parsed("ssp:2..9@3")]


def test_before_a_view_came_nothing_is_forgotten() -> None:
    courses = held().adaptation.courses
    assert set(courses) == {TABLE}
    again = Adaptation(INTERVAL_S, courses)
    assert again.courses == courses
    again.observe(ClusterView(1, "c", 3, 2, (), (), ()))
    assert again.courses == {}


def test_what_was_remembered_does_not_change_with_the_periods_to_come() -> None:
    watching = held()
    (before,) = watching.adaptation.courses.values()
    was = replace(before.course)
    watching.run(12, waited=(1, 1, 1))
    assert before.course == was
    assert watching.adaptation.courses[TABLE] is not before
