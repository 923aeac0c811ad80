"""Workers whose view says that they have left, at the servers' machines (SEMANTICS S6): nobody
waits for them in tables that they never heard of.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.change import Join
from ps_core.cluster_view import ClusterView, Node, NodeState, RangeAssignment, Role
from ps_core.consistency import parsed
from ps_core.errors import Fenced, InvalidConfig
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.ledger import Outcome, ReplyKind
from ps_core.sliced_work import at_once
from ps_core.tables.table import Table
from ps_server.ranges.events import (
    AnswerPull,
    Apply,
    Effect,
    Forget,
    PullEvent,
    PushEvent,
    SealEvent,
    SealTerms,
    Sender,
    StepId,
)
from ps_server.ranges.server_machine import ServerMachine
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

WORKERS = 3


def left(rank: int = 2) -> Node:
    """The worker of a rank, as a view shows it when it has left."""
    incarnation = Incarnation(1000 + rank)
    return Node(NodeId(10 + rank), incarnation, Role.WORKER, rank, "", NodeState.LEFT)


def bench(text: str = "bsp", *, from_rank_zero: bool = False) -> Bench:
    return Bench(make_table(parsed(text), from_rank_zero=from_rank_zero), workers=WORKERS)


def step(of: Bench, rank: int, clock: int) -> list[Effect]:
    """One push and its seal; a step takes two numbers."""
    of.push(rank, 2 * clock - 1, clock)
    return of.seal(rank, 2 * clock, clock)


def test_bsp_does_not_wait_for_one_that_was_never_heard() -> None:
    bsp = bench()
    bsp.gone(left())
    for clock in (1, 2):
        for rank in (0, 1):
            step(bsp, rank, clock)
    assert applied(bsp.effects) == [(1, [(0, 1), (1, 1)]), (2, [(0, 3), (1, 3)])]


def test_an_update_that_waited_for_it_forms() -> None:
    bsp = bench()
    step(bsp, 0, 1)
    step(bsp, 1, 1)
    bsp.pull(0, 1)
    assert answers(bsp.gone(left())) == [1]


def test_it_is_not_counted_as_missing_from_an_update() -> None:
    bsp = bench()
    bsp.gone(left())
    step(bsp, 0, 1)
    step(bsp, 1, 1)
    (record,) = [e.record for e in bsp.effects if isinstance(e, Apply)]
    assert (record.gone_count, record.contributor_count) == (0, 2)


@pytest.mark.parametrize("text", ["ssp:0", "ssp:2"])
def test_ssp_does_not_wait_for_it_either(text: str) -> None:
    ssp = bench(text)
    ssp.gone(left())
    for clock in (1, 2, 3, 4):
        for rank in (0, 1):
            step(ssp, rank, clock)
    assert answers(ssp.pull(0, 4)) == [1]
    assert ssp.machine.state.clock == 4


def test_one_that_left_by_a_seal_has_nothing_to_lose() -> None:
    bsp = bench()
    step(bsp, 2, 1)
    bsp.seal(2, 3, 2, skip=True, last=True)
    step(bsp, 0, 1)
    step(bsp, 1, 1)
    assert bsp.gone(left()) == []
    step(bsp, 0, 2)
    step(bsp, 1, 2)
    assert [(c, len(parts)) for c, parts in applied(bsp.effects)] == [(1, 3), (2, 2)]


def test_nor_is_anything_done_twice_for_it() -> None:
    asp = bench("asp:compensate=1")
    assert any(isinstance(e, Forget) for e in asp.seal(2, 1, 1, skip=True, last=True))
    assert asp.gone(left()) == []


def test_one_that_left_will_not_send_again_what_it_is_given_back() -> None:
    """Its last seal is in effect, and its gradient still waits for the others'."""
    bsp = bench()
    bsp.push(2, 1, 1)
    bsp.seal(2, 2, 1, last=True)
    assert bsp.gone(left()) == []
    found: list[Effect] = []
    bsp.machine.give_back(StepId(1, 2), found)
    assert outcomes(found) == {(2, 1): Outcome.WITHDRAWN, (2, 2): Outcome.WITHDRAWN}
    for clock in (1, 2):
        for rank in (0, 1):
            step(bsp, rank, clock)
    assert [(c, len(parts)) for c, parts in applied(bsp.effects)] == [(1, 2), (2, 2)]


def test_its_parked_pull_is_refused_though_its_last_step_waits() -> None:
    bsp = bench()
    bsp.push(2, 1, 1)
    bsp.seal(2, 2, 1, last=True)
    assert bsp.pull(2, 1) == []
    error = problem(bsp.gone(left()))
    assert isinstance(error, Fenced)
    for rank in (0, 1):
        step(bsp, rank, 1)
    assert [(c, len(parts)) for c, parts in applied(bsp.effects)] == [(1, 3)], "its step counts"


def test_what_it_never_sealed_is_dropped() -> None:
    bsp = bench()
    step(bsp, 2, 1)
    bsp.push(2, 3, 2)
    assert outcomes(bsp.gone(left())) == {(2, 3): Outcome.WITHDRAWN}
    assert bsp.gone(left()) == []
    for clock in (1, 2):
        for rank in (0, 1):
            step(bsp, rank, clock)
    assert [(c, len(parts)) for c, parts in applied(bsp.effects)] == [(1, 3), (2, 2)]


def test_a_table_that_was_to_start_from_its_values_says_that_it_gets_none() -> None:
    bsp = bench(from_rank_zero=True)
    bsp.pull(1, 0)
    words = "gets none: worker 0 has left the cluster, before it had assigned them"
    for effects in (bsp.gone(left(0)), bsp.pull(None, 0, waiter=2)):
        error = problem(effects)
        assert isinstance(error, InvalidConfig)
        assert words in str(error)


class Server:
    """A server machine that serves every range of its tables, and its view."""

    def __init__(self, *nodes: Node) -> None:
        ranges = tuple(
            RangeAssignment(RangeId(index), slots, AssignmentEpoch(1), NodeId(1))
            for index, slots in enumerate(key_ranges(1))
        )
        self.view = ClusterView(1, "c", WORKERS, 1, nodes, ranges, (make_table(),))
        self.machine = ServerMachine(NodeId(1), WORKERS)
        self.observe()

    def observe(self) -> list[Effect]:
        """As `ps_server.service.node` does."""
        self.machine.observe(self.view)
        return at_once(self.machine.ending(self.view.ended_workers, 100.0)) + at_once(
            self.machine.observing_changes(100.0)
        )

    def change(self, *nodes: Node, tables: tuple[Table, ...] = ()) -> list[Effect]:
        view = self.view
        self.view = replace(
            view,
            view_number=view.view_number + 1,
            nodes=(*view.nodes, *nodes),
            tables=(*view.tables, *tables),
        )
        return self.observe()

    def step(self, rank: int, table_id: int) -> list[Effect]:
        place = PLACE._replace(table_id=TableId(table_id))
        sender = Sender(Incarnation(1000 + rank), rank, rank)
        push = PushEvent(place, sender, 1, 1, 0, 256, (rank, 1))
        seal = SealEvent(place, sender, 2, SealTerms(1))
        return [e for event in (push, seal) for e in self.machine.entry(event, 100.0)]


def later() -> Table:
    made = make_table()
    spec = replace(made.spec, name="later")
    return Table(TableId(2), made.first_ordinal + made.block_count, spec)


@pytest.mark.parametrize("skip", [True, False])
def test_a_reader_does_not_wait_for_the_clock_of_a_final_seal(skip: bool) -> None:
    """Under SSP: the others may never take that step."""
    ssp = Bench(make_table(parsed("ssp:2")), workers=2)
    for rank in range(2):
        for clock in (1, 2):
            step(ssp, rank, clock)
    if skip:
        ssp.seal(1, 5, 3, skip=True, last=True)
    else:
        step(ssp, 1, 3)
        ssp.seal(1, 7, 4, skip=True, last=True)
    cut = Incarnation(5000), 1
    clock = ssp.machine.begin_cut(cut, 110.0)
    assert clock == (2 if skip else 3)
    read = PullEvent(PLACE, 1, None, clock, True, 110.0, cut)
    answered = answers(ssp.machine.pull(read, ssp.now_s))
    assert answered == ([1] if skip else [])  # a step of its own counts


@pytest.mark.parametrize("text", ["asp", "ssp:2", "bsp"])
def test_a_reader_is_told_no_clock_of_a_final_seal(text: str) -> None:
    """No worker took that step, so an evaluation of the last one has its number."""
    made = Bench(make_table(parsed(text)), workers=2)
    for clock in (1, 2):
        for rank in range(2):
            step(made, rank, clock)
    for rank in range(2):
        made.seal(rank, 5, 3, skip=True, last=True)
    effects = made.machine.pull(PullEvent(PLACE, 1, None, 0, False, 110.0), made.now_s)
    assert [each.range_clock for each in effects if isinstance(each, AnswerPull)] == [2]


def test_a_table_that_is_made_later_does_not_wait_for_it() -> None:
    server = Server()
    server.change(left())
    server.change(tables=(later(),))
    assert applied(server.step(0, 2) + server.step(1, 2)) == [(1, [(0, 1), (1, 1)])]


def test_nor_does_one_that_is_made_while_it_leaves() -> None:
    server = Server()
    server.change(tables=(later(),))
    waiting = server.step(0, 2) + server.step(1, 2)
    assert applied(waiting) == []
    assert applied(waiting + server.change(left())) == [(1, [(0, 1), (1, 1)])]


def test_one_that_has_left_when_its_join_is_committed_is_not_waited_for() -> None:
    server = Server()
    server.change(left(3))
    (table,) = server.view.tables
    joined = replace(table, joins=(Join(3, left(3).incarnation, 0),))
    server.view = replace(server.view, tables=(joined,))
    server.change()
    effects = [e for rank in (0, 1, 2) for e in server.step(rank, 1)]
    assert applied(effects) == [(1, [(0, 1), (1, 1), (2, 1)])]


def test_whatever_it_sends_after_that_is_refused() -> None:
    server = Server(left())
    assert kinds(server.step(2, 1)) == [ReplyKind.ERROR, ReplyKind.ERROR]
    event = PullEvent(PLACE, 1, left().incarnation, 0, False, 110.0)
    error = problem(server.machine.pull(event, 100.0))
    assert isinstance(error, Fenced)
    assert "node 12 has left the cluster" in str(error)
