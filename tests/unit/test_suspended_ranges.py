"""A primary that was deposed and is primary again goes on with all that it has (SEMANTICS S8)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from ps_core.cluster_view import (
    BackupRequest,
    ClusterView,
    Node,
    NodeState,
    RangeAssignment,
    Role,
    Session,
)
from ps_core.errors import NotOwner, PushpullError
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.tables.elements import Codec, DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.observe.metrics import ServerMetrics
from ps_server.lane.lane_socket import SharedLanes
from ps_server.peers.node_replication import ReplicationSetting
from ps_server.ranges.events import (
    Place,
    PullEvent,
    PushEvent,
    RefusePull,
    SealEvent,
    SealTerms,
    Sender,
)
from ps_server.ranges.schedule import copies_cut
from ps_server.ranges.server_machine import ServerMachine
from ps_server.replication.messages import Beat
from ps_server.replication.range_roles import Replication
from ps_server.service.node import ParameterNode
from ps_server.service.push_stream import PushStream
from ps_server.stores import Shards

ME, HEIR = NodeId(1), NodeId(7)
SERVER = Session("cluster", b"t" * 16, ME, Incarnation(10), Role.SERVER)
WORKERS = [
    Session("cluster", b"t" * 16, NodeId(2 + rank), Incarnation(100 + rank), Role.WORKER, rank)
    for rank in range(2)
]
MODEL, RANGE, BLOCK = TableId(1), RangeId(0), 64
SPEC = TableSpec(
    "model", DType.FLOAT32, BLOCK, OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0),)), BLOCK
).validated()
LEASE_S = 3.0


class Server:
    """A server with the only range, and two workers; its backup acknowledges nothing."""

    def __init__(self) -> None:
        shards = Shards(SharedLanes(), {})
        metrics = ServerMetrics(CollectorRegistry())
        self.node = ParameterNode(SERVER, b"k" * 16, 2, metrics, lambda: 5.0, shards)
        self.node.lanes.open()
        self.replicas = self.node.replicate(ReplicationSetting(LEASE_S))
        self.number = 0
        self.see(2, ME, HEIR)
        self.streams = [self.node.open_stream(worker) for worker in WORKERS]

    @property
    def replication(self) -> Replication:
        return self.replicas.replication

    @property
    def value(self) -> float:
        payload, _ = self.node.shards.stores[MODEL, RANGE].read(0, None, None)
        return float(np.frombuffer(payload, np.float32)[0])

    def see(self, epoch: int, primary: NodeId, *backups: NodeId, ended: bool = False) -> None:
        """The scheduler says who has the range, since that epoch; or that worker 1 has left."""
        self.number += 1
        (slots,) = key_ranges(1)
        states = NodeState.ALIVE, NodeState.LEFT if ended else NodeState.ALIVE
        nodes = [
            Node(each.node_id, each.incarnation, Role.WORKER, each.rank, "", state)
            for each, state in zip(WORKERS, states, strict=True)
        ]
        nodes.append(Node(HEIR, Incarnation(20), Role.SERVER, 0, "h:1", NodeState.ALIVE))
        before = self.replicas.replication.primaries.get(RANGE)
        is_same = primary == ME and before is not None
        assignment = RangeAssignment(
            RANGE, slots, AssignmentEpoch(epoch), primary, backups, (),
            (ME, *backups) if epoch == 2 else (),
            term=before.log.term if is_same and before else AssignmentEpoch(epoch),
        )  # fmt: skip
        table = Table(MODEL, 0, SPEC)
        view = ClusterView(self.number, "cluster", 2, 2, tuple(nodes), (assignment,), (table,))
        self.node.observe(view)
        self.node.works.finish()
        self.node.works.finish()

    def push(self, rank: int, epoch: int) -> None:
        """A worker's first step."""
        place = Place(MODEL, RANGE, AssignmentEpoch(epoch))
        stream = self.streams[rank]
        sender = Sender(WORKERS[rank].incarnation, rank, stream.origin)
        payload = memoryview(np.full(BLOCK, 2.0, np.float32).tobytes())
        part = self.node.shards.decode(place, 0, Codec.FP32, payload, b"")
        push = PushEvent(place, sender, 1, 1, 0, part.byte_count, part)
        self.node.entries(stream, [push, SealEvent(place, sender, 2, SealTerms(1))])

    def asks(self) -> list[BackupRequest]:
        return self.replication.backup_requests(5.0)


def run(scenario: Callable[[Server], Awaitable[None]]) -> None:
    async def with_server() -> None:
        server = Server()
        try:
            await scenario(server)
        finally:
            await server.replicas.close()
            server.node.lanes.close()

    asyncio.run(with_server())


def refused(stream: PushStream) -> list[PushpullError]:
    """What the worker is told of its entries that wait."""
    return [reply.error for reply in stream._replies.values() if reply.error is not None]


def test_what_it_had_decided_is_committed_when_it_is_primary_again() -> None:
    """The one in its place died before it was let go on alone: nobody else has the update."""

    async def scenario(server: Server) -> None:
        server.push(0, 2)
        server.push(1, 2)
        assert server.value == 0.0
        server.see(3, HEIR, ME)
        assert all(isinstance(e, NotOwner) for s in server.streams for e in refused(s))
        assert all(refused(stream) for stream in server.streams)
        server.see(4, ME, HEIR)
        server.node.tick()
        assert server.value == 0.0  # its heir may have it yet
        assert server.asks() == [BackupRequest(RANGE, AssignmentEpoch(4), frozenset())]
        server.see(5, ME)
        server.node.tick()
        assert server.value == -2.0

    run(scenario)


def test_what_was_staged_is_there_still_and_who_has_left_meanwhile_is_not_waited_for() -> None:
    """A worker that saw none of the views in between does not send it again."""

    async def scenario(server: Server) -> None:
        server.push(0, 2)
        server.see(3, HEIR, ME)
        server.see(3, HEIR, ME, ended=True)
        assert server.node.machine.shards == {}
        server.see(4, ME, HEIR, ended=True)
        server.see(5, ME, ended=True)
        server.node.tick()
        assert server.value == -2.0

    run(scenario)


def test_it_takes_and_answers_nothing_meanwhile() -> None:
    """SM-5."""

    async def scenario(server: Server) -> None:
        server.push(0, 2)
        machine, place = server.node.machine, Place(MODEL, RANGE, AssignmentEpoch(2))
        parked = PullEvent(place, 9, WORKERS[0].incarnation, 1, False, 99.0, None, 0)
        server.node.carry_out(machine.pull(parked, 5.0))
        server.see(3, HEIR, ME)
        assert machine.wait_cause(9) is None
        (again,) = machine.pull(parked._replace(waiter=10), 5.0)
        assert isinstance(again, RefusePull)
        assert isinstance(again.error, NotOwner)
        server.push(1, 2)
        assert isinstance(refused(server.streams[1])[-1], NotOwner)
        assert server.replication.beats(5.0) == {}
        assert server.asks() == []
        assert machine.prepared_changes == ()
        server.see(4, ME, HEIR)
        assert not machine.shards[MODEL, RANGE].read_gate.waits_for(9)

    run(scenario)


def test_it_is_given_up_when_it_is_named_no_more() -> None:
    """The one in its place may have served."""

    async def scenario(server: Server) -> None:
        server.push(0, 2)
        server.push(1, 2)
        server.see(3, HEIR, ME)
        assert server.node.shards.stores
        server.see(4, HEIR)
        assert not server.node.shards.stores
        assert server.replication.suspended == {}
        assert server.node.machine.suspended == {}
        assert server.node.machine.gate_bytes == 0
        server.see(5, ME)
        assert server.replication.missing == (RANGE,)

    run(scenario)


def test_one_that_never_heard_that_it_was_deposed_waits_for_its_heirs_too() -> None:
    async def scenario(server: Server) -> None:
        server.push(0, 2)
        server.push(1, 2)
        assignment = server.replication._view.ranges[0]  # type: ignore[union-attr]
        fourth = AssignmentEpoch(4)
        again = replace(assignment, assignment_epoch=fourth, term=fourth, initial_holders=())
        primary = server.replication.primaries[RANGE]
        assert primary.observe(again)
        log = primary.log
        assert (log.term, log.candidates) == (fourth, frozenset({HEIR}))
        assert {record.term for record in log.after(0)} == {AssignmentEpoch(4)}
        log.acked(HEIR, log.number)
        log.granted(HEIR, 5.0)
        assert log.release(5.0) == []

    run(scenario)


def test_what_was_held_for_copies_goes_on_with_the_range() -> None:
    """A checkpoint of before is over; its cut would hold the range for a minute."""

    async def scenario(server: Server) -> None:
        machine = server.node.machine
        machine.hold_copies((MODEL, RANGE), 3, 0, 65.0)
        server.see(3, HEIR, ME)
        assert machine.copied((MODEL, RANGE), 3, 5.0) == []
        server.see(4, ME, HEIR)
        schedule = machine.shards[MODEL, RANGE].state.schedule
        assert copies_cut(3) not in schedule._cuts

    run(scenario)


@pytest.mark.parametrize("served", [False, True])
def test_a_backup_that_is_deposed_at_once_has_what_it_had(served: bool) -> None:
    """It waits for no lease, and follows nobody; made primary again it begins where it was."""
    two = Replication(HEIR, ServerMachine(HEIR, 1), LEASE_S)
    (slots,) = key_ranges(1)

    def see(epoch: int, primary: NodeId, *backups: NodeId) -> list[RangeId]:
        holders = (ME, HEIR) if epoch == 2 else ()
        given = RangeAssignment(
            RANGE, slots, AssignmentEpoch(epoch), primary, backups, (), holders, False,
            AssignmentEpoch(epoch),
        )  # fmt: skip
        view = ClusterView(epoch, "c", 1, 2, (), (given,), ())
        lost, _ = two.observe(view, 0.0)
        two.serve(100.0 if served else 0.0)
        return lost

    see(2, ME, HEIR)
    assert two.beat(Beat(0.0, ((RANGE, AssignmentEpoch(2)),)), 0.0).range_ids == (RANGE,)
    see(3, HEIR, ME)
    assert (RANGE in two.primaries) == served
    assert see(4, ME, HEIR) == []
    assert not two.waits
    assert two.primaries == {}
    assert see(5, HEIR, ME) == []
    two.serve(200.0)
    assert two.primaries[RANGE].log.candidates == {ME}
    assert two.primaries[RANGE].log.term == 5
    assert see(6, ME) == [RANGE]
