"""ParameterService: parse, check, hand over, answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import grpc
import grpc.aio

from ps_core import limits
from ps_core.errors import InvalidConfig, NotOwner, PushpullError, Recovering, WaitExpired
from ps_core.keys import TableId
from ps_core.tables.elements import Codec
from ps_runtime.cluster.wire import change_outcome_to_proto
from ps_runtime.grpc.errors import translated
from ps_runtime.grpc.requests import RequestReader
from ps_server.ranges.events import EntryEvent, PushEvent, Sender
from ps_server.rows.row_heat import RowHeat
from ps_server.service.node import ParameterNode
from ps_server.service.pull import Pull, StreamPulls
from ps_server.service.push_stream import PushStream
from ps_server.service.range_read import Serialized
from ps_server.values.row_store import RowStore
from ps_server.wire.parameter_wire import (
    BlockFrame,
    Entry,
    deadline_s_of,
    entry_events,
    entry_reader,
    kind_of,
    more_follow,
    pulls_of,
    serialized,
    with_replies,
)
from pushpull.v1 import parameters_pb2, parameters_pb2_grpc

SERVICE = "pushpull.v1.ParameterService"

FEATURES = (
    *("bytes-lane", "inline-seal", "presence", "batch", "same-host-lane"),
    *(codec.feature for codec in Codec if codec.feature),
)

_TURN_BLOCK_COUNT = 32
"""Most blocks done in one stretch, each in a tenth of a millisecond. One by one they would cost
more: other work between them empties the processor's caches, and every turn answers its worker.
"""

_TURN_BYTES = 32 * 2**20
"""Most payload bytes done in one stretch; larger payloads take longer."""

ViewAtLeast = Callable[[int, float], Awaitable[object]]


class ParameterServicer(parameters_pb2_grpc.ParameterServiceServicer):
    """The service, over one `ParameterNode`."""

    def __init__(self) -> None:
        self._attached: ParameterNode | None = None
        self._view_at_least: ViewAtLeast
        self.stream_port = 0

    def attach(self, node: ParameterNode, view_at_least: ViewAtLeast) -> None:
        """Serve `node`. `view_at_least` awaits a view number within seconds, or WaitExpired."""
        self._attached, self._view_at_least = node, view_at_least

    def drain(self) -> None:
        """End streams and refuse parked pulls with Draining: the server is going away."""
        if self._attached is not None:
            self._attached.drain()

    def detach(self) -> None:
        """As `drain`, and let go of the node, whose timeline has ended."""
        self.drain()
        if self._attached is not None:
            self._attached.forget()
            self._attached = None

    @property
    def is_attached(self) -> bool:
        """True between `attach` and `detach`."""
        return self._attached is not None

    @property
    def _node(self) -> ParameterNode:
        if self._attached is None:
            raise Recovering("the server has not registered yet", retry_after_ms=100)
        return self._attached

    @translated
    async def OpenSession(
        self, request: parameters_pb2.OpenSessionRequest, context: Any
    ) -> parameters_pb2.OpenSessionResponse:
        session = self._node.sessions.admit(request.session, "OpenSession")
        deadline_s = deadline_s_of(request.deadline_ms, limits.DEFAULT_SESSION_DEADLINE_S)
        await self._view_at_least(request.view_number, deadline_s)
        if self._node.machine.view_number < request.view_number:
            raise WaitExpired(
                f"server {self._node.session.node_id} is at view {self._node.machine.view_number}; "
                f"asked for {request.view_number}"
            )
        return parameters_pb2.OpenSessionResponse(
            node_id=self._node.session.node_id,
            incarnation=self._node.session.incarnation,
            max_message_bytes=limits.MAX_MESSAGE_BYTES,
            features=FEATURES,
            same_host=self._node.lanes.offer(session),
            stream_port=self.stream_port,
            cluster_id=self._node.session.cluster_id,
        )

    @translated
    async def Push(
        self, request_iterator: AsyncIterator[Entry], context: Any
    ) -> AsyncIterator[parameters_pb2.PushResponse]:
        async with self._stream(request_iterator, "Push") as stream:
            async for replies, _ in stream.batches():
                if replies is not None:
                    yield replies

    @translated
    async def Pull(
        self, request: parameters_pb2.PullRequest, context: Any
    ) -> AsyncIterator[Serialized]:
        session = self._node.sessions.admit(request.session, "Pull")
        async for response in Pull(self._node, request, session).parts():
            yield response

    @translated
    async def PushPull(
        self, request_iterator: AsyncIterator[Entry], context: Any
    ) -> AsyncIterator[parameters_pb2.PushPullResponse | bytes]:
        async with self._stream(request_iterator, "PushPull") as stream:
            async for replies, part in stream.batches():
                if part is None:
                    yield parameters_pb2.PushPullResponse(replies=replies)
                else:
                    yield part if replies is None else with_replies(part, replies)

    @translated
    async def BeginCut(
        self, request: parameters_pb2.BeginCutRequest, context: Any
    ) -> parameters_pb2.BeginCutResponse:
        session = self._node.sessions.admit(request.session, "BeginCut")
        if not request.cut:
            raise InvalidConfig("cut is 0; expected a number of the caller's, from 1")
        lasts_s = min(request.deadline_ms / 1000 or limits.DEFAULT_CUT_S, limits.MAX_CUT_S)
        place = session, TableId(request.table_id), request.cut
        clock = await self._node.works.in_turn(partial(self._node.begin_cut, *place, lasts_s))
        return parameters_pb2.BeginCutResponse(clock=clock)

    @translated
    async def EndCut(
        self, request: parameters_pb2.EndCutRequest, context: Any
    ) -> parameters_pb2.EndCutResponse:
        session = self._node.sessions.admit(request.session, "EndCut")
        place = session, TableId(request.table_id), request.cut
        await self._node.works.in_turn(partial(self._node.end_cut, *place))
        return parameters_pb2.EndCutResponse()

    @translated
    async def SettleChange(
        self, request: parameters_pb2.SettleChangeRequest, context: Any
    ) -> parameters_pb2.SettleChangeResponse:
        self._node.sessions.admit(request.session, "SettleChange")
        change = TableId(request.table_id), request.number
        settled = await self._node.works.in_turn(partial(self._node.change_outcome, *change))
        return parameters_pb2.SettleChangeResponse(
            outcome=change_outcome_to_proto(None if settled is None else settled.outcome),
            after_clock=0 if settled is None else settled.after_clock,
        )

    @translated
    async def GetRangeStats(
        self, request: parameters_pb2.GetRangeStatsRequest, context: Any
    ) -> parameters_pb2.GetRangeStatsResponse:
        self._node.sessions.admit(request.session, "GetRangeStats")
        return await _range_stats(self._node, request.table_id)

    @translated
    async def EnterCollective(
        self, request: parameters_pb2.EnterCollectiveRequest, context: Any
    ) -> parameters_pb2.EnterCollectiveResponse:
        session = self._node.sessions.admit(request.session, "EnterCollective")
        given_s = request.deadline_ms / 1000 or limits.DEFAULT_PULL_DEADLINE_S
        end_s = self._node.now() + min(given_s, limits.MAX_DEADLINE_S)
        for_view_s = min(given_s, limits.DEFAULT_SESSION_DEADLINE_S)
        await self._view_at_least(request.view_number, for_view_s)
        return await self._node.collectives.enter(session, request, end_s - self._node.now())

    # --- push streams

    @contextlib.asynccontextmanager
    async def _stream(
        self, messages: AsyncIterator[Entry], method: str
    ) -> AsyncIterator[PushStream]:
        """Read the header, check who calls, open the stream, and take in what comes on it."""
        try:
            async with asyncio.timeout(limits.STREAM_HEADER_DEADLINE_S):
                first = await anext(aiter(messages), None)
        except TimeoutError:
            raise WaitExpired(
                f"a push stream waited for its header for {limits.STREAM_HEADER_DEADLINE_S:g} s"
            ) from None
        if first is None or isinstance(first, BlockFrame) or kind_of(first) != "header":
            came = "nothing" if first is None else kind_of(first) or "no entry"
            raise InvalidConfig(
                f"the first message of a push stream holds {came}; expected its header"
            )
        node = self._node  # to the stream's end, when the cluster may have begun anew
        own, meant = node.session.node_id, first.header.receiver_node_id
        if meant not in (0, own):
            raise NotOwner(f"this is server {own}; server {meant} is meant")
        session = node.sessions.admit(first.header.session, method)
        stream = node.open_stream(session)
        pulls = StreamPulls(node, stream)
        reader = asyncio.create_task(_take_in(node, messages, stream, pulls))
        try:
            yield stream
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, PushpullError):
                await reader
            await pulls.close()
            node.close_stream(stream)
            stream.close()


async def _take_in(
    node: ParameterNode, messages: AsyncIterator[Entry], stream: PushStream, pulls: StreamPulls
) -> None:
    session = stream.session
    sender = Sender(session.incarnation, session.rank, stream.origin, session.run)
    try:
        async for message in messages:
            await node.turns.breathe()
            await stream.has_space()
            kind = kind_of(message)
            stream.hold(more_follow(message, kind))
            if kind != "pull":
                await _take_entries(node, stream, message, sender)
            for request in pulls_of(message, kind):
                await pulls.begin(request)
    except asyncio.CancelledError:
        raise
    except Exception as failure:  # noqa: BLE001 - the stream's owner raises it again
        stream.end_input(failure)
    else:
        stream.end_input()


async def _take_entries(
    node: ParameterNode, stream: PushStream, message: Entry, sender: Sender
) -> None:
    events = entry_events(message, sender, node.shards)
    turn, block_count = _turn(node, events)
    while turn:
        if block_count > _TURN_BLOCK_COUNT:
            await node.take(stream, turn)
        elif node.works.jobs:
            await node.works.in_turn(partial(node.entries, stream, turn))
        else:
            node.entries(stream, turn)
        turn, block_count = _turn(node, events)
        if turn:
            await asyncio.sleep(0)  # let others in, and replies out


def _turn(node: ParameterNode, events: Iterator[EntryEvent]) -> tuple[list[EntryEvent], int]:
    """The next entries to do in one stretch, and their count: of so many blocks, or one."""
    turn: list[EntryEvent] = []
    block_count = byte_count = 0
    while block_count < _TURN_BLOCK_COUNT and byte_count < _TURN_BYTES:
        event = next(events, None)
        if event is None:
            break
        turn.append(event)
        if type(event) is PushEvent:
            block_count += 1
            byte_count += event.byte_count
        else:
            place = event.place
            block_count += max(node.block_count_at(place.table_id, place.range_id), 1)
            if not node.is_quick_at(place.table_id, place.range_id):
                block_count += _TURN_BLOCK_COUNT
    return turn, block_count


async def _range_stats(node: ParameterNode, table_id: int) -> parameters_pb2.GetRangeStatsResponse:
    """Statistics of each shard of the table (0: of all tables), each when its turn comes."""
    now_s = node.now()
    response = parameters_pb2.GetRangeStatsResponse(gate_bytes=node.machine.gate_bytes)
    for place in sorted(place for place in node.machine.shards if table_id in (0, place[0])):
        await node.turns.breathe()
        part = node.machine.shards.get(place)
        if part is None or place not in node.shards.stores:
            continue
        stats = response.ranges.add(
            range_id=place[1],
            table_id=place[0],
            assignment_epoch=node.machine.assignment_epoch(place[1]),
            clock=part.state.clock,
            block_count=len(part.state.blocks),
            state_bytes=node.shards.stores[place].state_bytes,
            update_count=part.state.update_count,
            waits=(*part.read_gate.waits(now_s), *part.state.gaps()),
            initialized=part.state.initialized,
            failure=part.state.failure.message if part.state.failure is not None else "",
        )
        store = node.shards.stores[place]
        if isinstance(store, RowStore):
            stats.rows.CopyFrom(_row_stats(store))
        for worker in part.state.by_rank.values():
            stats.workers.add(
                rank=worker.rank,
                incarnation=worker.incarnation,
                clock=max(worker.sealed_clock, 0),
                low_water_sequence=worker.ledger.low_water,
                last_heard_ms=max(0, int((now_s - worker.last_heard_s) * 1000)),
                left=worker.left_clock is not None,
            )
    return response


def _row_stats(store: RowStore) -> parameters_pb2.RowStats:
    def hottest(heat: RowHeat) -> list[parameters_pb2.HotRow]:
        found = heat.hottest(limits.MAX_HOT_ROW_COUNT)
        return [parameters_pb2.HotRow(id=each.row_id, share=each.share) for each in found]

    return parameters_pb2.RowStats(
        row_count=store.row_count,
        candidate_count=store.candidate_count,
        pulled_count=store.pulled.count,
        found_count=store.found_count,
        pushed_count=store.pushed.count,
        pulled=hottest(store.pulled),
        pushed=hottest(store.pushed),
        disk_row_count=store.memory_use.disk_row_count,
    )


def handlers_of(
    servicer: parameters_pb2_grpc.ParameterServiceServicer,
) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """The service's methods by their short names, with the readers and writers of its messages."""
    unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
    simple = {
        name: unary(
            getattr(servicer, name),
            RequestReader(getattr(parameters_pb2, f"{name}Request")),
            serialized,
        )
        for name in ("OpenSession", "BeginCut", "EndCut", "SettleChange", "GetRangeStats")
    }
    return simple | {
        "Push": stream(servicer.Push, entry_reader(parameters_pb2.PushRequest), serialized),
        "Pull": grpc.unary_stream_rpc_method_handler(
            servicer.Pull, RequestReader(parameters_pb2.PullRequest), serialized
        ),
        "PushPull": stream(
            servicer.PushPull, entry_reader(parameters_pb2.PushPullRequest), serialized
        ),
        "EnterCollective": unary(
            servicer.EnterCollective,
            RequestReader(parameters_pb2.EnterCollectiveRequest, limits.MAX_MESSAGE_BYTES),
            serialized,
        ),
    }


def add_to_server(
    servicer: parameters_pb2_grpc.ParameterServiceServicer, server: grpc.aio.Server
) -> None:
    """As the generated function of that name."""
    handlers = handlers_of(servicer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
