"""The answers to reads: begun range after range, given as messages.

Rules:
    - A consistent read, and one of values that are lent, is begun in all ranges at once; another
      range after range, since a table's bytes are many.
    - What is there at once is answered at once, without a task, unless it is long.
    - A long answer is made piece by piece, and gives others their turn between two pieces.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from ps_core import limits
from ps_core.cluster_view import Session
from ps_core.errors import InvalidKeys, Overloaded
from ps_core.keys import AssignmentEpoch, RangeId, TableId
from ps_server.ranges.events import Place
from ps_server.service.node import ParameterNode
from ps_server.service.reads import AnswerPart, RangeAnswer, Read, refused
from ps_server.wire import events_from_proto as intake
from ps_server.wire.frames import pull_end, pull_part, range_error, shared_answer
from pushpull.v1 import parameters_pb2

_RETRY_MS = 500

_AT_ONCE_COUNT = 4 * limits.SLICE_BLOCK_COUNT
"""Blocks of an answer that is made at once."""

_Answer = asyncio.Future[RangeAnswer]


class Reading:
    """One read on its way."""

    def __init__(
        self,
        node: ParameterNode,
        request: parameters_pb2.PullRequest,
        session: Session,
        call: asyncio.Task[object] | None = None,
    ) -> None:
        """Args:
        node: the server.
        request: the read.
        session: whose it is.
        call: what is cut if the answer is not read and others wait; None: the task that gives it.
        """
        self._node = node
        self._call = call
        self._request = request
        self._session = session
        self._began_s = node.now()
        deadline_s = request.deadline_ms / 1000 or limits.DEFAULT_PULL_DEADLINE_S
        self._until_s = self._began_s + min(deadline_s, limits.MAX_DEADLINE_S)
        range_count = node.machine.total_range_count or limits.MAX_RANGE_COUNT
        self._codec, self._problem = intake.read_terms(request, range_count)
        self._ranges = [] if self._problem is not None else list(request.ranges)
        is_lent = (
            request.shared
            and not request.array
            and self._problem is None
            and node.shards.homes.lends(session, TableId(request.table_id), self._codec)
        )
        self._is_lent = is_lent
        self._is_one = request.consistent or is_lent
        self._begun_count = 0
        self._answers: deque[_Answer] = deque()
        self._waiters: list[int] = []

    def at_once(self) -> list[bytes] | None:
        """The answer as serialized PullResponses, if all of it is there, and it is not long; else
        `parts` goes on.
        """
        if self._problem is not None:
            return [range_error(*self._problem)]
        if not self._is_short:
            return None
        while self._begun_count < len(self._ranges):
            self._begin_next()
        if not all(answer.done() for answer in self._answers):
            return None
        parts: list[AnswerPart] = []
        for answer in self._answers:
            found = answer.result()
            while not found.is_done:
                parts += found.next()
        self.close()
        self._observe()
        return list(_messages(parts))

    @property
    def _is_short(self) -> bool:
        if len(self._ranges) > (_AT_ONCE_COUNT if self._is_one else 1):
            return False
        node, table_id = self._node, TableId(self._request.table_id)
        count = byte_count = 0
        for part in self._ranges:
            range_id = RangeId(part.range_id)
            found = len(part.blocks) or node.block_count_at(table_id, range_id)
            count += found
            if not self._is_lent:
                byte_count += found * node.block_bytes_at(table_id, range_id)
        return count <= _AT_ONCE_COUNT and byte_count <= limits.SLICE_BYTES

    async def parts(self) -> AsyncIterator[bytes]:
        """The answer as serialized PullResponses; in order, and what is there together."""
        if self._problem is not None:
            yield range_error(*self._problem)
        turns, reader = self._node.turns, self._node.unread.reader(self._call)
        there: list[AnswerPart] = []
        try:
            while self._answers or self._begun_count < len(self._ranges):
                await self._begin_some()
                answer = self._answers[0]
                if not answer.done():
                    for message in _messages(there):
                        yield message
                    there = []
                found = await answer
                self._answers.popleft()
                while not found.is_done:
                    byte_count = found.next_bytes
                    await reader.put(byte_count)
                    there += found.next()
                    if len(there) >= limits.SLICE_BLOCK_COUNT or not self._is_one:
                        for message in _messages(there):
                            yield message
                        there = []
                    reader.took(byte_count)
                    await turns.breathe()
            for message in _messages(there):
                yield message
        finally:
            reader.end()
            self.close()
        self._observe()

    async def _begin_some(self) -> None:
        """Begin all ranges, or the next if none is on its way."""
        while self._begun_count < len(self._ranges) and (self._is_one or not self._answers):
            await self._node.works.in_turn(self._begin_next)
            await self._node.turns.breathe()

    def close(self) -> None:
        """Nobody waits for what has been begun. Idempotent."""
        for waiter in self._waiters:
            self._node.end_read(waiter)
        self._answers.clear()
        self._waiters.clear()

    def _place(self, part: parameters_pb2.RangePull) -> Place:
        return Place(
            TableId(self._request.table_id),
            RangeId(part.range_id),
            AssignmentEpoch(part.assignment_epoch),
        )

    def _begin_next(self) -> None:
        answer: _Answer = asyncio.get_running_loop().create_future()
        self._answers.append(answer)

        def on_answer(found: RangeAnswer) -> None:
            if not answer.done():
                answer.set_result(found)

        request, part = self._request, self._ranges[self._begun_count]
        self._begun_count += 1
        place = self._place(part)
        try:
            if part.blocks:
                count = self._node.block_count_at(place.table_id, place.range_id)
                intake.check_named_blocks(part.range_id, part.blocks, count)
        except InvalidKeys as problem:
            on_answer(refused(part.range_id, problem))
            return
        read = Read(
            place,
            part.blocks,
            self._codec,
            self._session,
            request.shared,
            on_answer,
            request.cut,
            request.array,
        )
        waiter = self._node.begin_read(
            read, request.clock, consistent=request.consistent, deadline_s=self._until_s
        )
        if not answer.done():
            self._waiters.append(waiter)

    def _observe(self) -> None:
        node = self._node
        node.metrics.pull_duration_seconds.observe(node.now() - self._began_s)


def overloaded(request: parameters_pb2.PullRequest) -> list[bytes]:
    """The answer to a read that is one too many on its stream."""
    error = Overloaded(
        f"{limits.MAX_STREAM_READ_COUNT} reads wait on this stream already",
        retry_after_ms=_RETRY_MS,
    )
    return [range_error(part.range_id, error) for part in request.ranges[: limits.MAX_RANGE_COUNT]]


def framed(answer: Sequence[bytes], number: int) -> Iterator[bytes]:
    """The whole answer to a read as parts of a PushPull stream: serialized PushPullResponses."""
    for index, response in enumerate(answer, 1):
        yield pull_part(response, number, is_last=number > 0 and index == len(answer))
    if not answer or not number:
        yield pull_end(number)


async def framed_as_it_comes(answer: AsyncIterator[bytes], number: int) -> AsyncIterator[bytes]:
    """As `framed`, of an answer that is not all there."""
    held: list[bytes] = []
    async for response in answer:
        for before in held:
            yield pull_part(before, number)
        held = [response]
    for part in framed(held, number):
        yield part


def _messages(parts: Iterable[AnswerPart]) -> Iterator[bytes]:
    """Values that are lent leave together, all else as it is."""
    values: list[parameters_pb2.SharedValue] = []
    for part in parts:
        if isinstance(part, bytes):
            if values:  # answers come in the order of the ranges
                yield shared_answer(values)
                values = []
            yield part
            continue
        values.append(part)
        if len(values) == limits.MAX_BATCH_COUNT:
            yield shared_answer(values)
            values = []
    if values:
        yield shared_answer(values)
