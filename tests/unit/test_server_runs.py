"""Runs of one cluster, at a server's machines (SEMANTICS S19): none hears of another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.cluster_view import Node, NodeState, Role
from ps_core.errors import TableNotFound
from ps_core.keys import Incarnation, NodeId, TableId
from ps_core.ledger import ReplyKind
from ps_core.runs import Run
from ps_core.sliced_work import at_once
from ps_core.tables.table import Table
from ps_server.ranges.collective_rounds import CollectiveRounds
from ps_server.ranges.events import (
    Effect,
    Place,
    PullEvent,
    PushEvent,
    RefusePull,
    ReplyTo,
    SealEvent,
    SealTerms,
    Sender,
)
from tests.unit.machine_harness import PLACE, applied, kinds, make_table, problem
from tests.unit.test_worker_left import Server

BLOCKS = 4
"""Of table 3, which has the smallest gate."""


def table_of(run: str, table_id: int = 2) -> Table:
    made = make_table()
    first = made.first_ordinal + made.block_count * (table_id - 1)
    return replace(made, table_id=TableId(table_id), first_ordinal=first, run=run)


def worker_of(run: str, rank: int, state: NodeState = NodeState.ALIVE) -> Node:
    number = 50 + rank if run else 10 + rank
    return Node(NodeId(number), Incarnation(1000 + number), Role.WORKER, rank, "", state, run=run)


class Runs(Server):
    """A server whose table 1 is of the run without a name, of three workers, and whose table 2 is
    of run 'a', of two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.view = replace(self.view, runs=(Run("a", 2),))
        self.change(tables=(table_of("a"),))

    def push(self, run: str, rank: int, table_id: int) -> list[Effect]:
        place, sender = self._at(run, rank, table_id)
        blocks = range(BLOCKS if table_id == 3 else 1)
        events = [PushEvent(place, sender, 1 + n, 1, n, 256, (rank, 1 + n)) for n in blocks]
        return [e for event in events for e in self.machine.entry(event, 100.0)]

    def seal(self, run: str, rank: int, table_id: int) -> list[Effect]:
        place, sender = self._at(run, rank, table_id)
        sequence = 1 + (BLOCKS if table_id == 3 else 1)
        return self.machine.entry(SealEvent(place, sender, sequence, SealTerms(1)), 100.0)

    def step_of(self, run: str, rank: int, table_id: int) -> list[Effect]:
        return self.push(run, rank, table_id) + self.seal(run, rank, table_id)

    @staticmethod
    def _at(run: str, rank: int, table_id: int) -> tuple[Place, Sender]:
        sender = Sender(worker_of(run, rank).incarnation, rank, rank, run)
        return PLACE._replace(table_id=TableId(table_id)), sender


def formed(effects: list[Effect]) -> list[int]:
    """The clocks of the updates that were applied."""
    return [clock for clock, _ in applied(effects)]


def test_an_update_forms_of_as_many_as_the_run_has() -> None:
    server = Runs()
    assert formed(server.step_of("a", 0, 2)) == []
    assert formed(server.step_of("a", 1, 2)) == [1]
    assert formed(server.step_of("", 0, 1) + server.step_of("", 1, 1)) == []
    assert formed(server.step_of("", 2, 1)) == [1]


def test_nobody_goes_on_without_one_of_another_run() -> None:
    server = Runs()
    server.step_of("", 0, 1)
    server.step_of("", 1, 1)
    assert formed(server.change(worker_of("a", 2, NodeState.LEFT))) == []
    assert formed(server.change(worker_of("", 2, NodeState.LEFT))) == [1]


def test_a_table_that_is_made_later_hears_of_its_own_run_alone() -> None:
    server = Runs()
    server.change(worker_of("", 1, NodeState.LEFT))
    server.change(tables=(table_of("a", 4),))
    assert formed(server.step_of("a", 0, 4)) == []
    assert formed(server.step_of("a", 1, 4)) == [1]


def test_who_waits_for_memory_keeps_its_turn_when_one_of_another_run_ends() -> None:
    """A table's room knows who waits by rank."""
    server = Runs()
    small = replace(make_table(blocks=BLOCKS).spec, name="small", gate_bytes=1)
    server.change(tables=(Table(TableId(3), 100, small),))
    server.step_of("", 0, 3)
    server.push("", 1, 3)
    assert set(kinds(server.push("", 2, 3))) == {ReplyKind.REFUSED}
    server.change(worker_of("a", 2, NodeState.LEFT))
    replies = [each for each in server.seal("", 1, 3) if isinstance(each, ReplyTo)]
    assert [each.sender.rank for each in replies if each.kind is ReplyKind.CREDIT] == [2]


def test_a_table_of_another_run_is_not_there() -> None:
    server = Runs()
    for run, table_id in (("", 2), ("a", 1), ("b", 2)):
        effects = server.step_of(run, 0, table_id)
        assert kinds(effects) == [ReplyKind.ERROR] * 2
        assert isinstance(problem(effects[:1]), TableNotFound)
        place = PLACE._replace(table_id=TableId(table_id))
        read = PullEvent(place, 1, None, 0, False, 110.0, run=run)
        assert isinstance(problem(server.machine.pull(read, 100.0)), TableNotFound)
        with pytest.raises(TableNotFound):
            server.machine.check_run(TableId(table_id), run)


def test_a_round_is_of_one_run() -> None:
    server = Runs()
    server.change(
        *(worker_of("", rank) for rank in range(3)), *(worker_of("a", rank) for rank in range(2))
    )
    for run, count in (("", 3), ("a", 2)):
        rounds = CollectiveRounds(NodeId(1))
        rounds.observe(server.view.of_run(run))
        assert len(rounds.missing().split(", which has not made the call")) == count + 1


# --- a table that is removed


class Without(Runs):
    """The same, and a view that has table 2 no more."""

    def remove(self) -> list[Effect]:
        tables = tuple(table for table in self.view.tables if table.table_id != 2)
        number = self.view.view_number + 1
        self.view = replace(self.view, view_number=number, tables=tables, next_table_id=4)
        gone = self.machine.removed_by(self.view)
        effects = at_once(self.machine.removing(gone))
        return effects + self.change()


def test_nothing_is_left_of_a_table_that_is_removed() -> None:
    """SM-7."""
    server = Without()
    server.step_of("a", 0, 2)
    server.push("a", 1, 2)
    server.push("", 0, 1)
    held_bytes = server.machine.gate_bytes
    place, reader = PLACE._replace(table_id=TableId(2)), worker_of("a", 0).incarnation
    assert server.machine.pull(PullEvent(place, 7, reader, 1, False, 110.0, run="a"), 100.0) == []
    (refused,) = [each for each in server.remove() if isinstance(each, RefusePull)]
    assert (refused.waiter, type(refused.error)) == (7, TableNotFound)
    assert {table_id for table_id, _ in server.machine.shards} == {1}
    assert 0 < server.machine.gate_bytes < held_bytes
    assert isinstance(problem(server.seal("a", 1, 2)), TableNotFound)
    assert server.machine.tick(200.0) == []


def test_a_worker_that_is_forgotten_reaches_nothing() -> None:
    """RU-3: the view has neither it nor its tables, and those of others are not there for it."""
    server = Without()
    server.step_of("", 0, 1)
    server.step_of("", 1, 1)
    server.remove()
    late = Server()  # one that has come since, and never heard of it
    late.view = replace(server.view, view_number=server.view.view_number + 1)
    late.change()
    for machine in (server.machine, late.machine):
        server.machine = machine
        for table_id in (1, 2):
            effects = server.step_of("a", 0, table_id)
            assert [type(problem([each])) for each in effects] == [TableNotFound] * 2
            place = PLACE._replace(table_id=TableId(table_id))
            read = PullEvent(place, 1, worker_of("a", 0).incarnation, 0, False, 110.0, run="a")
            assert isinstance(problem(machine.pull(read, 100.0)), TableNotFound)
        assert machine.tick(200.0) == []


def test_the_end_of_its_workers_is_heard_when_its_tables_are_gone() -> None:
    server = Without()
    server.step_of("a", 0, 2)
    server.remove()
    assert server.change(worker_of("a", 0, NodeState.LEFT), worker_of("a", 1, NodeState.LEFT)) == []
    server.change(tables=(table_of("a", 5),))
    assert {table_id for table_id, _ in server.machine.shards} == {1, 5}
