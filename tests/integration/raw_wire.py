"""The plainest of clients, for many roles at once: stubs, sessions, messages made by hand."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from ps_core.keys import range_of_slot, slot_of_ordinal
from ps_core.limits import RANGE_COUNT
from ps_runtime.grpc.errors import ERROR_METADATA_KEY, STATUS
from pushpull.v1 import parameters_pb2, parameters_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from pushpull.v1 import types_pb2 as types
from tests.joining import proven

DEADLINE_S = 20.0
BLOCK = 64
"""Elements of a block; each block of a table here lies in a range of its own."""

LR = 0.5
ANY_SIZE = (("grpc.max_send_message_length", -1),)


def payload(value: float, count: int = BLOCK) -> bytes:
    """A block of one value, in FP32."""
    return struct.pack("<f", value) * count


def spec(name: str, *, blocks: int = 4, **changes: Any) -> types.TableSpec:
    """A BSP table of whole blocks under SGD, all zeros."""
    made = types.TableSpec(
        name=name,
        dtype=types.DTYPE_FLOAT32,
        element_count=BLOCK * blocks,
        block_elements=BLOCK,
        optimizer=types.OptimizerSpec(
            kind=types.OPTIMIZER_KIND_SGD,
            hyperparameters=[types.Hyperparameter(name="lr", value=LR)],
        ),
        consistency=types.Consistency(bsp=types.BulkSynchronous()),
        initializer=types.Initializer(zeros=types.ZerosInitializer()),
    )
    changed = types.TableSpec(**changes)
    for descriptor, _ in changed.ListFields():
        made.ClearField(descriptor.name)
    made.MergeFrom(changed)
    return made


def refused(call: Callable[[], object], code: str, *words: str) -> types.Error:
    """The call must end with this error of the catalogue, its status, and these words."""
    with pytest.raises(grpc.RpcError) as failure:
        call()
    ended: Any = failure.value
    assert ended.code() is STATUS[code], (ended.code(), ended.details())
    carried = dict(ended.trailing_metadata()).get(ERROR_METADATA_KEY)
    assert carried is not None, ended.details()
    error = types.Error.FromString(carried)
    check_error(error, code, *words)
    return error


def check_error(error: types.Error, code: str, *words: str) -> None:
    """The error has this code and these words."""
    assert types.ErrorCode.Name(error.code) == f"ERROR_CODE_{code}", error.message
    for word in words:
        assert word in error.message, error.message


def to_range(entry: Any, range_id: int, epoch: int, block: int | None = None) -> None:
    """The entry, or read, is of another range; or a read is of one block of it."""
    entry.range_id, entry.assignment_epoch = range_id, epoch
    if block is not None:
        entry.blocks.append(block)


@dataclass
class RawTable:
    """A table, with where its blocks live: block -> (range, epoch, server's node id)."""

    table_id: int
    places: dict[int, tuple[int, int, int]]

    @property
    def servers(self) -> list[int]:
        """The servers that hold a block, by node id."""
        return sorted({node_id for _, _, node_id in self.places.values()})

    @property
    def elsewhere(self) -> tuple[int, int]:
        """A range of the table, with its epoch, that another server than block 0's serves."""
        return next(p[:2] for p in self.places.values() if p[2] != self.places[0][2])

    def blocks_at(self, node_id: int) -> list[int]:
        """The blocks of one server."""
        return [block for block, place in self.places.items() if place[2] == node_id]


@dataclass
class RawWorker:
    """One session and the next sequence of each (table, range)."""

    session: types.SessionIdentity
    sequences: dict[tuple[int, int], int] = field(default_factory=dict)
    clocks: dict[int, int] = field(default_factory=dict)
    replaces: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def header(self) -> parameters_pb2.PushRequest:
        """The first message of a stream."""
        return parameters_pb2.PushRequest(header=parameters_pb2.StreamHeader(session=self.session))

    def next_sequence(self, table: RawTable, block: int = 0) -> int:
        """The number of the next entry, without taking it."""
        return self.sequences.get((table.table_id, table.places[block][0]), 0) + 1

    def take_sequence(self, table: RawTable, block: int = 0) -> int:
        """The number of the next entry, taken."""
        number = self.next_sequence(table, block)
        self.sequences[table.table_id, table.places[block][0]] = number
        return number

    def block(self, table: RawTable, block: int = 0, value: float = 1.0) -> Any:
        """A valid push of the coming step, whose number is not taken yet."""
        range_id, epoch, _ = table.places[block]
        return parameters_pb2.BlockPush(
            range_id=range_id,
            assignment_epoch=epoch,
            table_id=table.table_id,
            block=block,
            clock=self.clocks.get(table.table_id, 0) + 1,
            sequence=self.next_sequence(table, block),
            codec=types.CODEC_FP32,
            kind=parameters_pb2.PUSH_KIND_GRADIENT,
            replaces=self.replaces.get((table.table_id, range_id), 0),
            payload=payload(value),
        )

    def seal(self, table: RawTable, blocks: Iterable[int] = (0,)) -> Any:
        """A valid seal of the coming step for some blocks' ranges; numbers are not taken yet."""
        return parameters_pb2.Seal(
            table_id=table.table_id,
            clock=self.clocks.get(table.table_id, 0) + 1,
            ranges=[
                parameters_pb2.RangeSeal(
                    range_id=table.places[block][0],
                    assignment_epoch=table.places[block][1],
                    sequence=self.next_sequence(table, block),
                )
                for block in blocks
            ],
        )

    def messages(
        self, table: RawTable, node_id: int, value: float
    ) -> list[parameters_pb2.PushRequest]:
        """The whole coming step for one server; its numbers are taken."""
        blocks = table.blocks_at(node_id)
        made = [self.header]
        for block in blocks:
            made.append(parameters_pb2.PushRequest(block=self.block(table, block, value)))
            self.take_sequence(table, block)
        made.append(parameters_pb2.PushRequest(seal=self.seal(table, blocks)))
        for block in blocks:
            self.take_sequence(table, block)
        return made


class Heartbeats:
    """Says of each session, as often as the scheduler asks for it, that its node lives."""

    def __init__(self, scheduler: scheduler_pb2_grpc.SchedulerServiceStub) -> None:
        self._scheduler = scheduler
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, answer: scheduler_pb2.RegisterNodeResponse) -> None:
        """Go on for this session until `end`."""
        thread = threading.Thread(target=self._beat, args=(answer,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def end(self) -> None:
        """Return when the last one has been answered."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _beat(self, answer: scheduler_pb2.RegisterNodeResponse) -> None:
        request = scheduler_pb2.HeartbeatRequest(session=answer.session)
        while not self._over.wait(answer.heartbeat_interval_ms / 1000):
            # One that is lost or refused is the test's to notice, by the next call of its session.
            with contextlib.suppress(grpc.RpcError):
                self._scheduler.Heartbeat(request, timeout=answer.lease_ms / 1000)


class Wire:
    """One cluster, seen raw: the scheduler's stub and each server's."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=ANY_SIZE)
        self.scheduler = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)
        self.heartbeats = Heartbeats(self.scheduler)
        self.registrations: dict[int, scheduler_pb2.RegisterNodeRequest] = {}
        self.workers = [self.join(types.NODE_ROLE_WORKER, requested_rank=r) for r in (0, 1)]
        self.reader = self.join(types.NODE_ROLE_READER)
        self.server_channels: dict[int, grpc.Channel] = {}
        self.servers: dict[int, parameters_pb2_grpc.ParameterServiceStub] = {}
        for node in self.view().nodes:
            if node.address:
                opened = grpc.insecure_channel(node.address, options=ANY_SIZE)
                self.server_channels[node.node_id] = opened
                self.servers[node.node_id] = parameters_pb2_grpc.ParameterServiceStub(opened)

    def close(self) -> None:
        """End the heartbeats and close every channel."""
        self.heartbeats.end()
        for channel in (self.channel, *self.server_channels.values()):
            channel.close()

    def registration(self, role: Any, **fields: Any) -> scheduler_pb2.RegisterNodeRequest:
        """A valid registration, but for `fields`."""
        defaults: dict[str, Any] = {
            "registration_id": secrets.token_bytes(16),
            "protocol_version": 1,
        }
        return scheduler_pb2.RegisterNodeRequest(role=role, **(defaults | fields))

    def join(self, role: Any, **fields: Any) -> RawWorker:
        """A node that has registered, and lives as long as the wire is open."""
        request = proven(self.scheduler, self.registration(role, **fields))
        answer = self.scheduler.RegisterNode(request, timeout=DEADLINE_S)
        self.heartbeats.begin(answer)
        self.registrations[answer.session.node_id] = request
        return RawWorker(answer.session)

    def view(self) -> types.ClusterView:
        """The newest view."""
        request = scheduler_pb2.WatchClusterRequest(session=self.workers[0].session)
        watch = self.scheduler.WatchCluster(request, timeout=DEADLINE_S)
        view: types.ClusterView = next(watch).view
        watch.cancel()
        return view

    def create(self, name: str, **changes: Any) -> RawTable:
        """A table that every server knows, and that lies on several if it has several blocks."""
        table = self._create(name, **changes)
        if len(table.places) > 1 < len(self.servers) and len(table.servers) == 1:
            # Where blocks lie depends on how many there were before: one more, and they lie apart.
            self._create(f"{name} (in between)", blocks=1)
            table = self._create(f"{name} (again)", **changes)
        return table

    def _create(self, name: str, **changes: Any) -> RawTable:
        session = self.workers[0].session
        request = scheduler_pb2.CreateTableRequest(session=session, spec=spec(name, **changes))
        created = self.scheduler.CreateTable(request, timeout=DEADLINE_S)
        for server in self.servers.values():
            opening = parameters_pb2.OpenSessionRequest(
                session=session, view_number=created.view_number
            )
            server.OpenSession(opening, timeout=DEADLINE_S)
        ranges = self.view().ranges
        places = {}
        table = created.table
        for block in range(-(-table.spec.element_count // table.spec.block_elements)):
            slot = slot_of_ordinal(table.first_ordinal + block)
            assignment = ranges[range_of_slot(slot, RANGE_COUNT)]
            places[block] = (
                assignment.range_id,
                assignment.assignment_epoch,
                assignment.primary_node_id,
            )
        return RawTable(table.table_id, places)

    def send(
        self,
        worker: RawWorker,
        node_id: int,
        *messages: parameters_pb2.PushRequest,
        timeout_s: float = DEADLINE_S,
    ) -> list[parameters_pb2.EntryReply]:
        """Write, half-close, read to the end."""
        answers = self.servers[node_id].Push(iter([worker.header, *messages]), timeout=timeout_s)
        return [reply for answer in answers for reply in answer.replies]

    def train(self, table: RawTable, workers: Iterable[RawWorker] | None = None) -> None:
        """A step of every worker: rank r pushes (r + 1) * clock; all of it must be applied."""
        calls = []
        for worker in self.workers if workers is None else workers:
            clock = worker.clocks.get(table.table_id, 0) + 1
            value = float((worker.session.rank + 1) * clock)
            for node_id in table.servers:
                made = worker.messages(table, node_id, value)
                calls.append(self.servers[node_id].Push(iter(made), timeout=DEADLINE_S))
            worker.clocks[table.table_id] = clock
            for place in [key for key in worker.replaces if key[0] == table.table_id]:
                del worker.replaces[place]
        for call in calls:
            for reply in (reply for answer in call for reply in answer.replies):
                if reply.kind == parameters_pb2.REPLY_KIND_COMMITTED:
                    assert reply.outcome in (
                        parameters_pb2.OUTCOME_APPLIED,
                        parameters_pb2.OUTCOME_REPLACED,
                    ), reply
                else:
                    assert reply.kind == parameters_pb2.REPLY_KIND_RECEIVED, reply

    def pull_request(self, table: RawTable, blocks: Iterable[int], **fields: Any) -> Any:
        """A read of some blocks by a reader, but for `fields`."""
        request = parameters_pb2.PullRequest(
            session=self.reader.session, table_id=table.table_id, deadline_ms=5_000
        )
        request.MergeFrom(parameters_pb2.PullRequest(**fields))
        for block in blocks:
            range_id, epoch, _ = table.places[block]
            request.ranges.add(range_id=range_id, assignment_epoch=epoch)
        return request

    def pull(self, node_id: int, request: Any) -> list[parameters_pb2.PullResponse]:
        """All parts of the answer."""
        return list(self.servers[node_id].Pull(request, timeout=DEADLINE_S))

    def values(self, table: RawTable) -> dict[int, tuple[int, int, bytes]]:
        """block -> (version, clock, payload), from every server."""
        found = {}
        for node_id in table.servers:
            for part in self.pull(node_id, self.pull_request(table, table.blocks_at(node_id))):
                assert part.HasField("block"), part
                found[part.block.block] = (
                    part.block.version,
                    part.block.clock,
                    part.block.payload,
                )
        assert sorted(found) == sorted(table.places)
        return found


class Silent:
    """A push stream on which nobody ever says anything; how it ended, once it has."""

    def __init__(self, stub: Any) -> None:
        self._never = threading.Event()
        self.call = stub.Push(self._nothing(), timeout=60.0)

    def _nothing(self) -> Iterator[parameters_pb2.PushRequest]:
        self._never.wait()
        yield from ()

    def release(self) -> None:
        """Let the thread that feeds it end."""
        self._never.set()


@dataclass(frozen=True)
class Scene:
    """A cluster, and a stream and a lane that were opened without a word when it began."""

    wire: Wire
    silent: Silent
    stranger: socket.socket
    process_ids: dict[str, int]
