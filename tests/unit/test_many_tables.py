"""Thousands of tables: a server takes them up, goes on and gives them up in short turns."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from ps_core.change import TableChange
from ps_core.cluster_view import ClusterView, Node, NodeState, RangeAssignment, Role, Session
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.sliced_work import at_once
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.observe.metrics import ServerMetrics
from ps_server.peers.node_replication import ReplicationSetting
from ps_server.service.node import ParameterNode
from tests.unit.measured_loop import most_turn_s, shortest, turns_of_server

pytestmark = pytest.mark.slow

TABLES, RANGES = 3000, 256
"""Each table has one block. With every range beside every table a turn took a third of a second."""

SERVER, OTHER = NodeId(1), NodeId(2)
SGD = OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0),))


def table(number: int) -> Table:
    spec = TableSpec(f"table-{number}", DType.FLOAT32, 64, SGD, block_elements=64)
    return Table(TableId(number), number, spec.validated())


MANY = tuple(map(table, range(1, TABLES + 1)))


def view(number: int, primary: NodeId, epoch: int, *backups: NodeId) -> ClusterView:
    """All ranges are one server's."""
    ranges = tuple(
        RangeAssignment(
            RangeId(range_id), slots, AssignmentEpoch(epoch), primary, backups,
            initial_holders=(SERVER, OTHER),
        )
        for range_id, slots in enumerate(key_ranges(RANGES))
    )  # fmt: skip
    nodes = tuple(
        Node(node_id, Incarnation(10 + node_id), Role.SERVER, 0, "127.0.0.1:1", NodeState.ALIVE)
        for node_id in (SERVER, OTHER)
    )
    return ClusterView(number, "c", 1, 2, nodes, ranges, MANY)


class Server:
    """A node, alone or with backups."""

    def __init__(self) -> None:
        self.now_s = 0.0
        session = Session("c", b"t" * 16, SERVER, Incarnation(10), Role.SERVER)
        metrics = ServerMetrics(CollectorRegistry())
        self.node = ParameterNode(session, b"k" * 16, 1, metrics, lambda: self.now_s)

    async def see(self, seen: ClusterView) -> None:
        await self.node.prepare(seen)
        self.node.observe(seen)
        await self.node.works.in_turn(lambda: None)


@pytest.mark.thorough
def test_tables_are_taken_up_and_gone_on_with_in_short_turns() -> None:
    """Measured: 10 ms, for 9,000 tables too."""

    async def scene() -> None:
        server = Server()
        for number in (1, 2):
            await server.see(view(number, SERVER, 1))
        assert len(server.node.machine.shards) == len(server.node.shards.stores) == TABLES

    assert shortest(scene, turns_of_server) < most_turn_s()


@pytest.mark.thorough
def test_ranges_of_many_tables_are_backed_up_served_and_lost_in_short_turns() -> None:
    """Measured: 12 ms; with 9,000 tables 18 ms, and a second where each range was given up for
    itself.
    """

    async def scene() -> None:
        server = Server()
        node = server.node
        node.replicate(ReplicationSetting(3.0))
        await server.see(view(1, OTHER, 1, SERVER))
        assert (len(node.machine.shards), len(node.shards.stores)) == (0, TABLES)
        await server.see(view(2, SERVER, 2))
        server.now_s = 10.0
        node.tick()
        await node.works.in_turn(lambda: None)
        assert len(node.machine.shards) == TABLES
        await server.see(view(3, OTHER, 3))
        assert not node.machine.shards
        assert not node.shards.stores
        node.close()

    assert shortest(scene, turns_of_server) < most_turn_s()


@pytest.mark.thorough
def test_a_server_that_holds_for_nothing_looks_at_no_part_for_its_promises() -> None:
    """They are asked for ten times a second."""
    server = Server()
    machine = server.node.machine
    machine.observe(view(1, SERVER, 1))
    begun_s = time.thread_time()
    for _ in range(100):
        assert machine.prepared_changes == ()
    assert time.thread_time() - begun_s < most_turn_s()
    proposed = TableChange(1, 0, MANY[0].consistency, checkpoint=1)
    tables = (replace(MANY[0], proposed=proposed), *MANY[1:])
    machine.observe(replace(view(2, SERVER, 1), tables=tables))
    at_once(machine.observing_changes(0.0))
    assert [promise.number for promise in machine.prepared_changes] == [1]


def test_a_view_has_the_tables_of_the_one_before_where_they_are_the_same() -> None:
    """What is known of them, as which blocks are in which range, is known then."""
    before = view(1, SERVER, 1)
    change = TableChange(1, 5, MANY[0].consistency)
    others = tuple(map(table, range(2, TABLES + 2)))
    changed = replace(MANY[0], change=change)
    found = replace(before, view_number=2, tables=(changed, *others)).reusing(before)
    assert found.view_number == 2
    assert found.tables == (changed, *others)
    assert found.tables[0] is changed
    assert all(ours is theirs for ours, theirs in zip(found.tables[1:], MANY[1:], strict=False))
    assert found.tables[-1] is others[-1]
    assert MANY[1].blocks_by_range(RANGES) == others[0].blocks_by_range(RANGES)
    assert found.tables[1].knows_ranges(RANGES)
