"""A server whose effects fail does nothing more, whatever path the event came by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from ps_core.cluster_view import ClusterView, Node, NodeState, RangeAssignment, Role, Session
from ps_core.errors import Draining, InvalidConfig, InvariantViolation, NotOwner
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.sliced_work import Work
from ps_core.tables.elements import Codec, DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.observe.metrics import ServerMetrics
from ps_server.fail_stop import FailStop, carries_out, decides
from ps_server.lane.lane_socket import SharedLanes
from ps_server.peers.node_replication import ReplicationSetting
from ps_server.ranges.events import Place, PushEvent, SealEvent, SealTerms, Sender
from ps_server.replication.messages import Ack
from ps_server.service.node import ParameterNode
from ps_server.stores import Shards
from ps_server.wire.replication_wire import answers_message

SERVER = Session("cluster", b"t" * 16, NodeId(1), Incarnation(10), Role.SERVER)
WORKER = Session("cluster", b"t" * 16, NodeId(2), Incarnation(100), Role.WORKER)
EPOCH = AssignmentEpoch(2)
MODEL, RANGE, BLOCK = TableId(1), RangeId(0), 64
SPEC = TableSpec(
    "model", DType.FLOAT32, BLOCK, OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0),)), BLOCK
).validated()


class Mortal:
    """Something with machines in it."""

    def __init__(self) -> None:
        self.health = FailStop()
        self.told: list[Exception] = []
        self.health.on_failure = self.told.append

    @decides
    def decide(self, event: Callable[[], None]) -> None:
        event()

    @carries_out
    def carry_out(self, effect: Callable[[], None]) -> None:
        effect()


def _raising(failure: Exception) -> Callable[[], None]:
    def raises() -> None:
        raise failure

    return raises


@pytest.mark.parametrize(
    ("failure", "is_fatal"),
    [(NotOwner("refused"), False), (InvariantViolation("X-1", "?"), True), (KeyError("?"), True)],
)
def test_a_refusal_is_an_answer_and_anything_else_is_the_end(
    failure: Exception, is_fatal: bool
) -> None:
    mortal = Mortal()
    with pytest.raises(type(failure)):
        mortal.decide(_raising(failure))
    assert mortal.told == ([failure] if is_fatal else [])


def test_whatever_an_effect_raises_is_the_end_and_nothing_is_begun_after_it() -> None:
    """FS-1."""
    mortal, failure = Mortal(), InvalidConfig("found too late")
    with pytest.raises(InvalidConfig):
        mortal.decide(lambda: mortal.carry_out(_raising(failure)))
    done: list[str] = []
    with pytest.raises(Draining, match="InvalidConfig"):
        mortal.decide(lambda: done.append("event"))
    with pytest.raises(Draining):
        mortal.carry_out(lambda: done.append("effect"))
    assert done == []
    assert mortal.told == [failure]


class FrailShards(Shards):
    """Values that cannot be changed."""

    def applying(self, record: Any, total: Any = None) -> Any:
        """Nothing."""
        del record, total
        raise ZeroDivisionError

    def apply_brief(self, record: Any) -> None:
        """Nothing, either."""
        del record
        raise ZeroDivisionError


def _node(shards: Shards, *, backups: Sequence[NodeId] = ()) -> ParameterNode:
    node = ParameterNode(
        SERVER, b"k" * 16, 1, ServerMetrics(CollectorRegistry()), lambda: 5.0, shards
    )
    node.lanes.open()
    if backups:
        node.replicate(ReplicationSetting(3.0))
    servers = [
        Node(node_id, Incarnation(20 + node_id), Role.SERVER, 0, "h:1", NodeState.ALIVE)
        for node_id in backups
    ]
    worker = Node(WORKER.node_id, WORKER.incarnation, Role.WORKER, 0, "", NodeState.ALIVE)
    (slots,) = key_ranges(1)
    holders = (SERVER.node_id, *backups)
    assignment = RangeAssignment(RANGE, slots, EPOCH, SERVER.node_id, tuple(backups), (), holders)
    table = Table(MODEL, 0, SPEC)
    node.observe(ClusterView(1, "cluster", 1, 1, (worker, *servers), (assignment,), (table,)))
    return node


def _step(node: ParameterNode, origin: int, clock: int = 1) -> list[PushEvent | SealEvent]:
    place, sender = Place(MODEL, RANGE, EPOCH), Sender(WORKER.incarnation, 0, origin)
    payload = memoryview(np.ones(BLOCK, np.float32).tobytes())
    part = node.shards.decode(place, 0, Codec.FP32, payload, b"")
    first = 2 * clock - 1
    return [
        PushEvent(place, sender, first, clock, 0, part.byte_count, part),
        SealEvent(place, sender, first + 1, SealTerms(clock)),
    ]


def test_an_update_that_fails_ends_the_server() -> None:
    """ND-2."""

    async def scenario() -> None:
        node = _node(FrailShards(SharedLanes(), {}))
        told: list[Exception] = []
        node.health.on_failure = told.append
        stream = node.open_stream(WORKER)
        with pytest.raises(ZeroDivisionError):
            node.entries(stream, _step(node, stream.origin))
        assert [type(failure) for failure in told] == [ZeroDivisionError]
        with pytest.raises(Draining):
            node.entries(stream, _step(node, stream.origin, clock=2))
        with pytest.raises(Draining):
            node.tick()
        node.lanes.close()

    asyncio.run(scenario())


def test_an_update_that_fails_when_a_backup_has_it_ends_the_server_too() -> None:
    """Its link swallows what is raised while it hears the backup."""

    async def scenario() -> None:
        backup = NodeId(7)
        node = _node(FrailShards(SharedLanes(), {}), backups=[backup])
        assert node.replicas is not None
        stream = node.open_stream(WORKER)
        node.entries(stream, _step(node, stream.origin))
        log = node.replicas.replication.primaries[RANGE].log
        log.granted(backup, 5.0)
        said = answers_message([Ack(RANGE, log.number, EPOCH)])
        with pytest.raises(ZeroDivisionError):
            node.replicas.peer_said(backup, said)
        assert isinstance(node.health.failure, ZeroDivisionError)
        with pytest.raises(Draining):
            node.replicas.peer_said(backup, said)
        await node.replicas.close()
        node.lanes.close()

    asyncio.run(scenario())


def test_what_a_backup_has_is_released_between_two_works() -> None:
    """Else what is under way would do what was decided later before it (OC-1)."""

    async def scenario() -> None:
        backup, is_over = NodeId(7), list[bool]()
        node = _node(Shards(SharedLanes(), {}), backups=[backup])
        assert node.replicas is not None
        stream = node.open_stream(WORKER)
        node.entries(stream, _step(node, stream.origin))
        log = node.replicas.replication.primaries[RANGE].log
        log.granted(backup, 5.0)
        held_count = log.held_count

        def long() -> Work[None]:
            while not is_over:
                yield

        node.works.begin(long())
        node.replicas.peer_said(backup, answers_message([Ack(RANGE, log.number, EPOCH)]))
        assert log.held_count == held_count > 0
        is_over.append(True)
        await node.works.in_turn(lambda: None)
        assert log.held_count == 0
        assert node.applied_count == 1
        await node.replicas.close()
        node.lanes.close()

    asyncio.run(scenario())
