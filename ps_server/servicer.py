"""ParameterService: parse, check, hand over, answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any

from ps_core import limits
from ps_core.cluster_view import Role, Session
from ps_core.errors import (
    InvalidConfig,
    NotPermitted,
    Overloaded,
    PushpullError,
    Recovering,
    WaitExpired,
)
from ps_core.keys import AssignmentEpoch, RangeId, TableId
from ps_runtime.errors import translated
from ps_server import intake
from ps_server.events import EntryEvent, Place, Sender
from ps_server.frames import (
    BlockFrame,
    Entry,
    kind_of,
    more_follow,
    pull_end,
    pull_part,
    range_error,
    reads_of,
    shared_answer,
    with_replies,
)
from ps_server.node import ParameterNode
from ps_server.reads import AnswerPart, Read
from ps_server.stats import range_stats
from ps_server.streams import EntryStream
from pushpull.v1 import parameters_pb2, parameters_pb2_grpc, types_pb2

FEATURES = ("bytes-lane", "inline-seal", "presence", "batch", "same-host-lane")

_TURN_BLOCK_COUNT = 16
"""Blocks that keep the loop from all else: the seal of a large table applies hundreds, each in a
tenth of a millisecond. Taken one by one they would cost more, since every block that is
applied drives the interpreter out of the processor's caches."""

_READ_RETRY_MS = 500
ViewAtLeast = Callable[[int, float], Awaitable[object]]
_Answer = asyncio.Future[list[AnswerPart]]


class ParameterServicer(parameters_pb2_grpc.ParameterServiceServicer):
    """The service, over one `ParameterNode`."""

    def __init__(self) -> None:
        self._attached: tuple[ParameterNode, ViewAtLeast] | None = None
        self.stream_port = 0

    def attach(self, node: ParameterNode, view_at_least: ViewAtLeast) -> None:
        """The server has registered: serve `node`.

        `view_at_least` awaits a view number within seconds, or raises WaitExpired.
        """
        self._attached = (node, view_at_least)

    def drain(self) -> None:
        """The server is going away: streams end and parked reads are refused, with Draining."""
        if self._attached is not None:
            self._attached[0].drain()

    @property
    def _node(self) -> ParameterNode:
        return self._registered[0]

    @property
    def _view_at_least(self) -> ViewAtLeast:
        return self._registered[1]

    @property
    def _registered(self) -> tuple[ParameterNode, ViewAtLeast]:
        if self._attached is None:
            raise Recovering("the server has not registered yet", retry_after_ms=100)
        return self._attached

    @translated
    async def OpenSession(
        self, request: parameters_pb2.OpenSessionRequest, context: Any
    ) -> parameters_pb2.OpenSessionResponse:
        """See parameters.proto."""
        session = self._node.sessions.admit(request.session)
        deadline_s = request.deadline_ms / 1000 or limits.DEFAULT_SESSION_DEADLINE_S
        await self._view_at_least(request.view_number, min(deadline_s, limits.MAX_DEADLINE_S))
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
        )

    @translated
    async def Push(
        self, request_iterator: AsyncIterator[Entry], context: Any
    ) -> AsyncIterator[parameters_pb2.PushResponse]:
        """See parameters.proto."""
        async with self._stream(request_iterator) as stream:
            reader = asyncio.create_task(self._read_entries(stream, request_iterator))
            try:
                async for replies, _ in stream.batches():
                    if replies is not None:
                        yield replies
            finally:
                await _cancelled(reader)

    @translated
    async def Pull(self, request: parameters_pb2.PullRequest, context: Any) -> AsyncIterator[bytes]:
        """See parameters.proto; the responses come serialized (`frames`)."""
        session = self._node.sessions.admit(request.session)
        async for response in self._read(request, session):
            yield response

    @translated
    async def PushPull(
        self, request_iterator: AsyncIterator[Entry], context: Any
    ) -> AsyncIterator[parameters_pb2.PushPullResponse | bytes]:
        """See parameters.proto."""
        async with self._stream(request_iterator) as stream:
            reader = asyncio.create_task(self._read_entries(stream, request_iterator))
            try:
                async for replies, part in stream.batches():
                    if part is None:
                        yield parameters_pb2.PushPullResponse(replies=replies)
                    else:
                        yield part if replies is None else with_replies(part, replies)
            finally:
                await _cancelled(reader)
                await stream.reads.close()

    @translated
    async def BeginCut(
        self, request: parameters_pb2.BeginCutRequest, context: Any
    ) -> parameters_pb2.BeginCutResponse:
        """See parameters.proto."""
        session = self._reader(request.session)
        if not request.cut:
            raise InvalidConfig("cut is 0; expected a number of the caller's, from 1")
        lasts_s = min(request.deadline_ms / 1000 or limits.DEFAULT_CUT_S, limits.MAX_CUT_S)
        clock = self._node.begin_cut(session, TableId(request.table_id), request.cut, lasts_s)
        return parameters_pb2.BeginCutResponse(clock=clock)

    @translated
    async def EndCut(
        self, request: parameters_pb2.EndCutRequest, context: Any
    ) -> parameters_pb2.EndCutResponse:
        """See parameters.proto."""
        session = self._reader(request.session)
        self._node.end_cut(session, TableId(request.table_id), request.cut)
        return parameters_pb2.EndCutResponse()

    def _reader(self, message: types_pb2.SessionIdentity) -> Session:
        session = self._node.sessions.admit(message)
        if session.role is not Role.READER:
            raise NotPermitted(
                f"a {session.role.value} asks for a cut, which would hold up its own steps; only "
                "readers do"
            )
        return session

    @translated
    async def GetRangeStats(
        self, request: parameters_pb2.GetRangeStatsRequest, context: Any
    ) -> parameters_pb2.GetRangeStatsResponse:
        """See parameters.proto."""
        return range_stats(self._node, request.table_id)

    # --- push streams

    @contextlib.asynccontextmanager
    async def _stream(self, messages: AsyncIterator[Entry]) -> AsyncIterator[EntryStream]:
        """Read the header, check who calls, and open the stream."""
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
        session = self._node.sessions.admit(first.header.session)
        intake.check_may_push(session.role is Role.WORKER)
        stream = self._node.open_stream(session)
        try:
            yield stream
        finally:
            self._node.close_stream(stream)

    async def _read_entries(self, stream: EntryStream, messages: AsyncIterator[Entry]) -> None:
        session = stream.session
        sender = Sender(session.incarnation, session.rank, stream.origin)
        try:
            async for message in messages:
                await stream.has_room()
                stream.hold(more_follow(message))
                if kind_of(message) != "pull":
                    await self._take_entries(stream, message, sender)
                for request in reads_of(message):
                    number = request.read_number
                    if number and stream.reads.is_full:
                        await self._put(stream, number, _refused(request))
                    else:
                        answer = self._read(request, session)
                        await stream.reads.start(number, self._put(stream, number, answer))
        except asyncio.CancelledError:
            raise
        except Exception as failure:  # noqa: BLE001 - the stream's owner raises it again
            stream.end_input(failure)
        else:
            stream.end_input()

    async def _take_entries(self, stream: EntryStream, message: Entry, sender: Sender) -> None:
        events = intake.entry_events(message, sender, self._node.shards)
        turn = self._turn(events)
        while turn:
            self._node.entries(stream, turn)
            turn = self._turn(events)
            if turn:
                await asyncio.sleep(0)  # let others in, and what is answered out

    def _turn(self, events: Iterator[EntryEvent]) -> list[EntryEvent]:
        """The next that are done in one stretch: entries of so many blocks, or one."""
        turn: list[EntryEvent] = []
        block_count = 0
        while block_count < _TURN_BLOCK_COUNT and (event := next(events, None)) is not None:
            turn.append(event)
            block_count += self._node.block_count(event)
        return turn

    @staticmethod
    async def _put(stream: EntryStream, number: int, answer: AsyncIterator[bytes]) -> None:
        """Send the parts of a read's answer on the stream that it came by."""
        held: bytes | None = None
        async for response in answer:
            if held is not None:
                await stream.put_part(pull_part(held, number))
            held = response
        if held is not None:
            await stream.put_part(pull_part(held, number, is_last=number > 0))
        if held is None or not number:
            await stream.put_part(pull_end(number))

    # --- reads

    async def _read(
        self, request: parameters_pb2.PullRequest, session: Session
    ) -> AsyncIterator[bytes]:
        """Answer range after range; a consistent read is registered in all of them first."""
        node = self._node
        deadline_s = request.deadline_ms / 1000 or limits.DEFAULT_PULL_DEADLINE_S
        until_s = node.now() + min(deadline_s, limits.MAX_DEADLINE_S)
        pulls = list(request.ranges)
        problems = intake.read_problems(request)
        # An answer in bytes is made when its turn comes, since a table's bytes are many; what is
        # lent costs nothing to keep.
        is_lent = (
            request.shared
            and not problems
            and node.shards.homes.lends(
                session, TableId(request.table_id), intake.codec_of(request)
            )
        )
        batch_count = len(pulls) if request.consistent or is_lent else 1
        for start in range(0, len(pulls), max(batch_count, 1)):
            answers = [
                self._begin(request, number, session, until_s, problems.get(number))
                for number in range(start, min(start + batch_count, len(pulls)))
            ]
            try:
                async for response in _grouped([answer for answer, _ in answers]):
                    yield response
            finally:
                for _, number in answers:
                    node.end_read(number)

    def _begin(
        self,
        request: parameters_pb2.PullRequest,
        number: int,
        session: Session,
        until_s: float,
        problem: PushpullError | None,
    ) -> tuple[_Answer, int]:
        answer: _Answer = asyncio.get_running_loop().create_future()

        def on_answer(responses: list[AnswerPart]) -> None:
            if not answer.done():
                answer.set_result(responses)

        part = request.ranges[number]
        if problem is not None:
            on_answer([range_error(part.range_id, problem)])
            return answer, 0
        place = Place(
            TableId(request.table_id),
            RangeId(part.range_id),
            AssignmentEpoch(part.assignment_epoch),
        )
        codec, is_shared = intake.codec_of(request), request.shared
        read = Read(place, part.blocks, codec, session, is_shared, on_answer, request.cut)
        waiter = self._node.begin_read(
            read, request.clock, consistent=request.consistent, deadline_s=until_s
        )
        return answer, waiter


async def _refused(request: parameters_pb2.PullRequest) -> AsyncIterator[bytes]:
    """The answer to a read that is one too many on its stream."""
    error = Overloaded(
        f"{limits.MAX_STREAM_READ_COUNT} reads wait on this stream already",
        retry_after_ms=_READ_RETRY_MS,
    )
    for part in request.ranges:
        yield range_error(part.range_id, error)


async def _grouped(answers: Iterable[_Answer]) -> AsyncIterator[bytes]:
    """The answers in order; values that are lent leave together, as many as are there."""
    values: list[parameters_pb2.SharedValue] = []
    for answer in answers:
        if values and not answer.done():
            yield shared_answer(values)
            values = []
        for part in await answer:
            if isinstance(part, bytes):
                yield part
                continue
            values.append(part)
            if len(values) == limits.MAX_BATCH_COUNT:
                yield shared_answer(values)
                values = []
    if values:
        yield shared_answer(values)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, PushpullError):
        await task
