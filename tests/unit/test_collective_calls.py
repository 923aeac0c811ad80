"""Rounds of collective calls as values: where they meet, who is new, who is in them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.change import Join
from ps_core.cluster_view import ClusterView, Node, NodeState, RangeAssignment, Role
from ps_core.collective_calls import (
    Host,
    Round,
    Share,
    host_of,
    is_late_joiner,
    joined_after,
    workers_here,
)
from ps_core.keys import AssignmentEpoch, Incarnation, KeyRange, NodeId, RangeId, Slot, TableId
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec

ALIVE, SILENT, LEFT, GONE = NodeState
SPEC = TableSpec("w", DType.FLOAT32, 64, OptimizerSpec(OptimizerKind.SGD), 64)


def node(number: int, role: Role, rank: int = 0, state: NodeState = ALIVE) -> Node:
    return Node(NodeId(number), Incarnation(10 + number), role, rank, f"host:{number}", state)


def assigned(primary: int | None, assignment_epoch: int) -> RangeAssignment:
    slots = KeyRange(Slot(0), Slot(65536))
    server = None if primary is None else NodeId(primary)
    return RangeAssignment(RangeId(0), slots, AssignmentEpoch(assignment_epoch), server)


def view_of(
    *nodes: Node, ranges: tuple[RangeAssignment, ...] = (), tables: tuple[Table, ...] = ()
) -> ClusterView:
    return ClusterView(1, "demo", 2, 1, nodes, ranges, tables)


def table(number: int, *joins: Join) -> Table:
    return Table(TableId(number), 0, SPEC, joins=joins)


def test_calls_meet_at_the_primary_of_range_0() -> None:
    view = view_of(node(1, Role.SERVER), node(2, Role.SERVER), ranges=(assigned(2, 5),))
    assert host_of(view) == Host(NodeId(2), AssignmentEpoch(5))


@pytest.mark.parametrize("ranges", [(), (assigned(None, 0),)])
def test_without_a_primary_calls_meet_at_the_server_that_came_first(
    ranges: tuple[RangeAssignment, ...],
) -> None:
    servers = node(3, Role.SERVER, state=SILENT), node(4, Role.SERVER)
    view = view_of(node(1, Role.WORKER), node(2, Role.SERVER, state=GONE), *servers, ranges=ranges)
    assert host_of(view) == Host(NodeId(3), AssignmentEpoch(0))


def test_a_range_that_lost_its_primary_keeps_its_epoch() -> None:
    view = view_of(node(2, Role.SERVER), ranges=(assigned(None, 7),))
    assert host_of(view) == Host(NodeId(2), AssignmentEpoch(7))


def test_without_a_server_calls_meet_nowhere() -> None:
    assert host_of(view_of(node(1, Role.WORKER), node(2, Role.SERVER, state=LEFT))) is None


def test_the_workers_that_are_here_are_those_whose_membership_has_not_ended() -> None:
    here = node(1, Role.WORKER, 0), node(2, Role.WORKER, 1, SILENT)
    ended = node(3, Role.WORKER, 2, GONE), node(4, Role.WORKER, 3, LEFT)
    view = view_of(*here, *ended, node(5, Role.READER), node(6, Role.SERVER))
    assert workers_here(view) == {0: here[0], 1: here[1]}


def test_who_has_a_rank_beyond_the_first_is_a_newcomer() -> None:
    view = view_of(node(1, Role.WORKER, 1), node(2, Role.WORKER, 2))
    assert [is_late_joiner(view, worker) for worker in view.nodes] == [False, True]


def test_who_has_the_rank_of_one_that_has_ended_is_a_newcomer() -> None:
    first, second, other = (
        node(1, Role.WORKER, 0, GONE),
        node(2, Role.WORKER, 0),
        node(3, Role.WORKER, 1),
    )
    view = view_of(first, second, other)
    assert [is_late_joiner(view, worker) for worker in (first, second, other)] == [
        False,
        True,
        False,
    ]


def test_a_newcomer_is_as_far_as_the_table_where_it_joined_last() -> None:
    own = Incarnation(12)
    tables = table(1, Join(1, own, 4), Join(0, Incarnation(13), 9)), table(2, Join(1, own, 6))
    assert joined_after(view_of(tables=tables), own) == 6


def test_a_restored_table_that_nobody_had_trained_takes_no_newcomer_back() -> None:
    """It may be created later, and go on at a higher clock than all that has been trained."""
    own = Incarnation(12)
    trained = replace(table(1, Join(1, own, 4)), restored_clock=3)
    later = replace(table(2, Join(1, own, 30)), restored_clock=30)
    assert joined_after(view_of(tables=(trained, later)), own) == 4
    assert joined_after(view_of(tables=(later,)), own) == 0, "its own first step is beyond that"


@pytest.mark.parametrize("tables", [(), (table(1, Join(1, Incarnation(12), 4)), table(2))])
def test_who_has_not_joined_all_tables_is_nowhere_yet(tables: tuple[Table, ...]) -> None:
    assert joined_after(view_of(tables=tables), Incarnation(12)) is None


def test_a_share_counts_what_it_says_and_what_it_gives() -> None:
    assert Share(0, Incarnation(1), "é", 3, b"abc").byte_count == 5 + 32


def test_a_round_knows_who_was_in_it() -> None:
    share = Share(0, Incarnation(1), "barrier")
    ended = Round(1, (share, replace(share, rank=1, incarnation=Incarnation(2))))
    assert ended.has(Incarnation(2))
    assert not ended.has(Incarnation(3))
    assert not ended.problem
    assert (share.clock, share.payload) == (0, b"")
