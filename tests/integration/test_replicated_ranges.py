"""One server's part in replication: what a backup makes of what comes, what a primary sends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import cast

import grpc
import grpc.aio
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
from ps_core.errors import NotOwner
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.sliced_work import Work, at_once
from ps_core.tables.table import Table
from ps_runtime.cluster import wire
from ps_runtime.grpc.channels import aio_channel
from ps_runtime.grpc.errors import from_rpc_error
from ps_runtime.http2.protocol.streams import MessagePiece
from ps_runtime.observe.metrics import ServerMetrics
from ps_server.lane.lane_socket import SharedLanes
from ps_server.peers.node_replication import ReplicatedRanges, ReplicationSetting
from ps_server.peers.peer_links import REPLICATE, PeerLink
from ps_server.ranges.events import Contributor, Record
from ps_server.ranges.range_copy import RangeDelta, WorkerFacts, fresh_copy
from ps_server.ranges.server_machine import ServerMachine
from ps_server.replication.lease import MAX_DRIFT
from ps_server.replication.messages import Ack, Beat, Grant, LogRecord, RangeCopy, Snapshot
from ps_server.replication.peer_queues import PeerQueue
from ps_server.replication.range_roles import PLACED_EPOCH
from ps_server.service.node import ParameterNode
from ps_server.service.replication_service import ReplicationServicer, add_to_server
from ps_server.stores import Shards
from ps_server.values.mutations import Elements, Mutation, Put, SentAccumulator
from ps_server.wire.replication_reader import ReplicationReader
from ps_server.wire.replication_wire import (
    SERVICE,
    answers_from,
    answers_message,
    beat_message,
    greeting_from,
    log_record_messages,
)
from pushpull.v1 import replication_pb2
from tests.property.shard_twin import table

LEASE_S = 3.0
ONE, TWO = NodeId(1), NodeId(2)
RANGE = RangeId(0)
WORKER = Incarnation(11)
MODEL: Table = table([128])
BLOCKS = (0, 1)
SUM = SentAccumulator((Elements(0, b"", np.ones(64, np.float32).tobytes()),))


@dataclass
class Backup:
    """A server that backs up the only range of a cluster, and lends its values."""

    ranges: ReplicatedRanges
    shards: Shards

    @property
    def value(self) -> float:
        payload, _ = self.shards.stores[TableId(1), RANGE].read(0, None, None)
        return float(np.frombuffer(payload, np.float32)[0])


def run(scenario: Callable[[Backup], Awaitable[None]]) -> None:
    async def with_backup() -> None:
        lanes = SharedLanes()
        lanes.open()
        shards = Shards(lanes, {})
        session = Session("cluster", b"t" * 16, TWO, Incarnation(2), Role.SERVER)
        setting = ReplicationSetting(LEASE_S)
        ranges = ReplicatedRanges(session, ServerMachine(TWO, 1), shards, setting, lambda: 0.0)
        try:
            await scenario(Backup(ranges, shards))
        finally:
            await ranges.close()
            lanes.close()

    asyncio.run(with_backup())


class Peer:
    """A server that hears what a primary says, and answers nothing by itself."""

    def __init__(self) -> None:
        self._beats: asyncio.Queue[Beat] = asyncio.Queue()
        self._records: asyncio.Queue[LogRecord] = asyncio.Queue()
        self._server = grpc.aio.server()
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._replicate
        )
        handlers = {"Replicate": handler}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )

    async def start(self) -> str:
        """Its address."""
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(None)

    async def next_record(self) -> LogRecord:
        async with asyncio.timeout(10):
            return await self._records.get()

    async def next_beat(self, within_s: float = 10.0) -> Beat:
        async with asyncio.timeout(within_s):
            return await self._beats.get()

    async def _replicate(
        self, messages: AsyncIterator[bytes], context: object
    ) -> AsyncIterator[bytes]:
        del context
        reader = ReplicationReader()
        async for raw in messages:
            came = reader.read(raw)
            if isinstance(came, replication_pb2.ReplicateHeader):
                yield replication_pb2.ReplicateResponse(
                    node_id=TWO, incarnation=2
                ).SerializeToString()
            elif isinstance(came, Beat):
                self._beats.put_nowait(came)
            elif isinstance(came, LogRecord):
                self._records.put_nowait(came)


def view(number: int, epoch: int, *, joins: bool = False) -> ClusterView:
    """Server 2 backs up the range, or joins it."""
    (slots,) = key_ranges(1)
    primary = Node(ONE, Incarnation(1), Role.SERVER, 0, "127.0.0.1:1", NodeState.ALIVE)
    two = (TWO,)
    assignment = RangeAssignment(
        RANGE,
        slots,
        AssignmentEpoch(epoch),
        ONE,
        () if joins else two,
        two if joins else (),
        (ONE, *two) if epoch == PLACED_EPOCH else (),
    )
    return ClusterView(number, "cluster", 1, 1, (primary,), (assignment,), (MODEL,))


def record(number: int, *changes: Mutation) -> LogRecord:
    facts = fresh_copy(MODEL, BLOCKS).facts
    delta = RangeDelta(facts, (WorkerFacts(WORKER, 0, 0, 0, None, 0, 0),), (), ())
    return LogRecord(RANGE, PLACED_EPOCH, PLACED_EPOCH, number, TableId(1), delta, changes)


def put(total: object = SUM, *, numbers: tuple[tuple[str, float], ...] = ()) -> Put:
    workers = (Contributor(0, WORKER, (1,), skip=False),)
    return Put(Record(TableId(1), RANGE, 1, 1, False, workers, numbers, (0,)), total)


def beat(epoch: int) -> Beat:
    return Beat(0.0, ((RANGE, AssignmentEpoch(epoch)),))


def test_what_it_could_not_make_it_does_not_acknowledge() -> None:
    """Not when it comes, nor when it comes again; nor does it grant the lease, which would keep its
    primary waiting for ever.
    """

    async def scenario(backup: Backup) -> None:
        at_once(backup.ranges.observing(view(1, PLACED_EPOCH)))
        assert at_once(backup.ranges.taking(record(1, put()))) == Ack(RANGE, 1, PLACED_EPOCH)
        broken = record(2, put(total="not a sum"))  # a bug, and not one of the catalogue's errors
        assert at_once(backup.ranges.taking(broken)) is None
        at_once(backup.ranges.observing(view(2, PLACED_EPOCH)))
        assert at_once(backup.ranges.taking(broken)) is None
        assert backup.ranges.grant(beat(PLACED_EPOCH)).range_ids == ()

    run(scenario)


def test_a_backup_that_is_left_out_says_so_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """So it is after each hand-over."""

    async def scenario(backup: Backup) -> None:
        at_once(backup.ranges.observing(view(1, PLACED_EPOCH)))
        other = replace(view(2, 3).ranges[0], backups=())
        with caplog.at_level(logging.INFO, "pushpull"):
            at_once(backup.ranges.observing(replace(view(2, 3), ranges=(other,))))

    run(scenario)
    assert "event=backups_given_up view=2 ranges=1" in caplog.text
    assert "ranges_given_up" not in caplog.text


def test_one_that_broke_joins_anew() -> None:
    """What broke in the midst of a change left the blocks marked as changing."""

    async def scenario(backup: Backup) -> None:
        at_once(backup.ranges.observing(view(1, PLACED_EPOCH)))
        assert at_once(backup.ranges.taking(record(1, put(numbers=(("unheard_of", 1.0),))))) is None
        at_once(backup.ranges.observing(view(2, 3, joins=True)))
        store = backup.shards.stores[TableId(1), RANGE].snapshot()
        copy = Snapshot(
            RANGE, AssignmentEpoch(3), PLACED_EPOCH, 1, {TableId(1): fresh_copy(MODEL, BLOCKS)}
        )
        assert at_once(backup.ranges.joining(RangeCopy(copy, {TableId(1): store}))) == Ack(
            RANGE, 1, AssignmentEpoch(3)
        )
        again = record(2, put())._replace(assignment_epoch=AssignmentEpoch(3))
        assert at_once(backup.ranges.taking(again)) == Ack(RANGE, 2, AssignmentEpoch(3))
        assert backup.value == -1.0

    run(scenario)


def test_a_server_that_just_started_takes_a_snapshot_when_its_first_view_has_come() -> None:
    """It listens before it has a view; what it dropped came again five leases later."""

    async def scenario(backup: Backup) -> None:
        copy = Snapshot(
            RANGE, AssignmentEpoch(3), PLACED_EPOCH, 1, {TableId(1): fresh_copy(MODEL, BLOCKS)}
        )
        waiting = asyncio.create_task(backup.ranges.view_of(copy))
        await asyncio.wait({waiting}, timeout=0.2 * LEASE_S)
        assert not waiting.done(), "the snapshot would be dropped"
        at_once(backup.ranges.observing(view(2, 3, joins=True)))
        async with asyncio.timeout(LEASE_S):
            await waiting
        store = backup.shards.stores[TableId(1), RANGE].snapshot()
        assert at_once(backup.ranges.joining(RangeCopy(copy, {TableId(1): store}))) == Ack(
            RANGE, 1, AssignmentEpoch(3)
        )

    run(scenario)


# --- a primary


@dataclass
class Primary:
    """A server with two ranges and a backup, which hears it."""

    ranges: ReplicatedRanges
    peer: Peer
    address: str
    now_s: float = 0.0

    def observe(self, number: int, epoch: int) -> None:
        slots = key_ranges(2)
        two = Node(TWO, Incarnation(2), Role.SERVER, 0, self.address, NodeState.ALIVE)
        assignments = tuple(
            RangeAssignment(
                RangeId(i),
                slots[i],
                AssignmentEpoch(epoch),
                ONE,
                (TWO,),
                (),
                (ONE, TWO) if epoch == PLACED_EPOCH else (),
            )
            for i in range(2)
        )
        seen = ClusterView(number, "cluster", 1, 2, (two,), assignments, ())
        at_once(self.ranges.observing(seen))
        self.ranges.serve()

    def decide(self, range_id: RangeId) -> None:
        """Something is decided, and lost on its way."""
        facts = fresh_copy(MODEL, BLOCKS).facts
        delta = RangeDelta(facts, (), (), ())
        self.ranges.replication.primaries[range_id].log.decide(TableId(1), delta, (), [])

    def tick(self) -> None:
        """Time has passed."""
        self.ranges.keep_up()
        at_once(self.ranges.going_on())

    def hear(self, range_id: RangeId, number: int) -> None:
        self.ranges.peer_said(TWO, answers_message([Ack(range_id, number, PLACED_EPOCH)]))


async def _opened(primary: Primary) -> None:
    """Until there is a stream: what is sent before is lost."""
    for _ in range(500):
        primary.now_s += LEASE_S / 9
        primary.tick()
        with contextlib.suppress(TimeoutError):
            await primary.peer.next_beat(within_s=0.02)
            return
    raise TimeoutError("no stream was opened")


def lead(scenario: Callable[[Primary], Awaitable[None]]) -> None:
    async def with_primary() -> None:
        peer = Peer()
        address = await peer.start()
        session = Session("cluster", b"t" * 16, ONE, Incarnation(1), Role.SERVER)
        setting = ReplicationSetting(LEASE_S)
        shards = Shards(SharedLanes(), {})
        ranges = ReplicatedRanges(
            session, ServerMachine(ONE, 1), shards, setting, lambda: primary.now_s
        )
        primary = Primary(ranges, peer, address)
        try:
            primary.observe(1, PLACED_EPOCH)
            await _opened(primary)
            await scenario(primary)
        finally:
            await ranges.close()
            await peer.stop()

    asyncio.run(with_primary())


def test_what_a_backup_lacks_of_one_range_is_sent_again_whatever_it_says_of_others() -> None:
    async def scenario(primary: Primary) -> None:
        primary.decide(RANGE)
        for number in range(1, 12):
            primary.decide(RangeId(1))
            primary.hear(RangeId(1), number)
            primary.now_s += LEASE_S / 9
            primary.tick()
            await primary.peer.next_beat()
        again = await primary.peer.next_record()
        assert (again.range_id, again.number) == (RANGE, 1)

    lead(scenario)


def test_what_was_refused_for_its_epoch_is_sent_again_with_the_new_one() -> None:
    """A backup may see a view before its primary does."""

    async def scenario(primary: Primary) -> None:
        primary.decide(RANGE)
        primary.observe(2, PLACED_EPOCH + 1)
        again = await primary.peer.next_record()
        assert (again.number, again.assignment_epoch) == (1, PLACED_EPOCH + 1)

    lead(scenario)


def test_who_takes_a_range_over_asks_at_once_to_be_without_the_dead() -> None:
    """Nobody sees what it does before the scheduler has left them out."""
    now_s, asked = 0.0, list[Sequence[BackupRequest]]()
    session = Session("cluster", b"t" * 16, TWO, Incarnation(2), Role.SERVER)
    placed = RangeAssignment(
        RANGE, key_ranges(1)[0], PLACED_EPOCH, ONE, (TWO,), (), initial_holders=(ONE, TWO)
    )
    epoch = AssignmentEpoch(PLACED_EPOCH + 1)
    taken = replace(placed, assignment_epoch=epoch, primary=TWO, backups=(ONE,), term=epoch)

    def observe(number: int, assignment: RangeAssignment) -> None:
        at_once(ranges.observing(ClusterView(number, "cluster", 1, 2, (), (assignment,), ())))
        ranges.serve()

    ranges = ReplicatedRanges(
        session,
        ServerMachine(TWO, 1),
        Shards(SharedLanes(), {}),
        ReplicationSetting(LEASE_S),
        lambda: now_s,
    )
    ranges.ask = asked.append
    observe(1, placed)
    assert ranges.serves_within_s == math.inf
    now_s = 1.0
    ranges.replication.beat(Beat(1.0, ((RANGE, PLACED_EPOCH),)), now_s)
    now_s = 2.0
    observe(2, taken)
    assert ranges.serves_within_s == pytest.approx(LEASE_S * (1 + MAX_DRIFT) - 1.0)
    now_s += ranges.serves_within_s - 0.01
    ranges.keep_up()
    ranges.serve()
    assert asked == []
    now_s += 0.02
    ranges.keep_up()  # beats were said just now
    ranges.serve()
    assert asked == [[BackupRequest(RANGE, epoch, frozenset())]]
    assert ranges.serves_within_s == math.inf


# --- the service


def test_a_stream_that_means_another_server_is_refused() -> None:
    """A server that is started again has the address of the one before, and would count for two."""

    async def scenario() -> None:
        key = b"k" * 16
        one, two = (
            Session("cluster", b"t" * 16, node_id, Incarnation(node_id), Role.SERVER)
            for node_id in (ONE, TWO)
        )
        metrics = ServerMetrics(CollectorRegistry())
        node = ParameterNode(two, key, 1, metrics, lambda: 0.0)
        node.replicate(ReplicationSetting(LEASE_S))
        servicer = ReplicationServicer()
        servicer.attach(node)
        server = grpc.aio.server()
        add_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        caller = wire.session_to_proto(replace(one, token=one.signed(key)))
        async with aio_channel(f"127.0.0.1:{port}") as channel:
            for meant in (NodeId(3), TWO):
                call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(REPLICATE)()
                header = replication_pb2.ReplicateHeader(session=caller, receiver_node_id=meant)
                request = replication_pb2.ReplicateRequest(header=header)
                await call.write(request.SerializeToString())
                if meant == TWO:
                    assert greeting_from(cast(bytes, await call.read())) == (TWO, 2, 0)
                    continue
                with pytest.raises(grpc.aio.AioRpcError, match="this is server 2") as refused:
                    await call.read()
                assert isinstance(from_rpc_error(refused.value), NotOwner)
        await server.stop(None)

    asyncio.run(scenario())


class _Heard:
    """A primary's end of its streams."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.answers: asyncio.Queue[Ack | Grant] = asyncio.Queue()

    def peer_opened(self, peer: NodeId) -> None:
        del peer
        self.opened.set()

    def peer_said(self, peer: NodeId, response: MessagePiece) -> None:
        del peer
        for answer in answers_from(response):
            self.answers.put_nowait(answer)


def test_the_lease_is_granted_while_a_backup_takes_something_in() -> None:
    """A copy of gigabytes takes longer than a lease, and the record behind it waits."""

    def taking_in(copy: Future[None]) -> Work[None]:
        yield copy

    async def scenario() -> None:
        key, copy, heard = b"k" * 16, Future[None](), _Heard()
        one, two = (
            Session("cluster", b"t" * 16, node_id, Incarnation(node_id), Role.SERVER)
            for node_id in (ONE, TWO)
        )
        metrics = ServerMetrics(CollectorRegistry())
        node = ParameterNode(two, key, 1, metrics, lambda: 0.0)
        at_once(node.replicate(ReplicationSetting(LEASE_S)).observing(view(1, PLACED_EPOCH)))
        servicer = ReplicationServicer()
        servicer.attach(node)
        server = grpc.aio.server()
        add_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        backup = Node(TWO, Incarnation(2), Role.SERVER, 0, f"127.0.0.1:{port}", NodeState.ALIVE)
        caller = wire.session_to_proto(replace(one, token=one.signed(key)))
        link = PeerLink(backup, caller, heard, PeerQueue(), 2.0)
        async with asyncio.timeout(10):
            link.begin()
            await heard.opened.wait()
            node.works.begin(taking_in(copy))
            link.send_beat(beat_message(beat(PLACED_EPOCH)))
            link.send(log_record_messages(record(1, put())))
            assert await heard.answers.get() == Grant(0.0, (RANGE,))
            link.send_beat(beat_message(beat(PLACED_EPOCH)._replace(sent_s=1.0)))
            assert await heard.answers.get() == Grant(1.0, (RANGE,))
            copy.set_result(None)
            assert await heard.answers.get() == Ack(RANGE, 1, PLACED_EPOCH)
        await link.close()
        await server.stop(None)

    asyncio.run(scenario())
