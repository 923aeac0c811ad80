"""A pull from its request to its answer: the Pull RPC, or one that came on a PushPull stream.

    request --checked--> a `RangeRead` of each range --the gate lets it--> pieces --> messages

Rules:
    - A consistent pull, and one of shared values, begins in all ranges at once, and ranges that
      have refused it answer before the next one; other pulls go range after range, since a table
      has many bytes.
    - A short answer that is available is given at once, without a task; a long one piece by piece.
    - On a stream, a pull with a number is answered as soon as possible: one that waits for other
      workers holds up nothing behind it. If too many wait, the next is refused.
    - Pulls without a number are answered one after the other, in order of arrival.
    - Entries never wait for pulls: a pull may wait for an entry behind it on the same stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from ps_core import limits
from ps_core.cluster_view import Session
from ps_core.errors import InvalidKeys, Overloaded, PushpullError
from ps_core.keys import AssignmentEpoch, RangeId, TableId
from ps_core.tables.elements import Codec
from ps_runtime.cluster import wire
from ps_runtime.system.waiting import arrival
from ps_server.ranges.events import Place
from ps_server.service.node import ParameterNode
from ps_server.service.push_stream import PushStream
from ps_server.service.range_read import AnswerPart, PullTerms, RangeRead, Serialized
from ps_server.wire.parameter_wire import (
    deadline_s_of,
    pull_end,
    pull_part,
    range_error,
    shared_answer,
)
from pushpull.v1 import parameters_pb2

_RETRY_MS = 500

_AT_ONCE_COUNT = 4 * limits.SLICE_BLOCK_COUNT
"""Blocks of an answer that is made at once."""


class Pull:
    """An open pull.

    Args:
        call: is cut if the answer is not read and others wait; None: the task that gives it.
    """

    def __init__(
        self,
        node: ParameterNode,
        request: parameters_pb2.PullRequest,
        session: Session,
        call: asyncio.Task[object] | None = None,
    ) -> None:
        self._node = node
        self._call = call
        self._table_id = TableId(request.table_id)
        self._began_s = node.now()
        range_count = node.machine.total_range_count or limits.MAX_RANGE_COUNT
        codec, self._problem = _checked(request, range_count)
        is_good = self._problem is None
        self._left = deque(request.ranges if is_good else ())  # ranges not begun
        deadline_s = request.deadline_ms / 1000 or limits.DEFAULT_PULL_DEADLINE_S
        self._terms = PullTerms(
            session,
            request.clock,
            deadline_s=self._began_s + min(deadline_s, limits.MAX_DEADLINE_S),
            consistent=request.consistent,
            codec=codec,
            shared=request.shared,
            cut=request.cut,
            array=request.array,
        )
        self._has_ids = self._lists_rows = self._is_shared = False
        for part in self._left:
            self._has_ids = self._has_ids or bool(part.ids)
            self._lists_rows = self._lists_rows or bool(part.skipped_row_counts)
        if request.shared and not request.array and is_good and not self._lists_rows:
            if self._has_ids:
                self._is_shared = node.lanes.answers(session.incarnation) is not None
            else:
                segments = node.shards.segments
                self._is_shared = segments.shares(session, self._table_id, codec)
        self._is_one = request.consistent or self._is_shared
        self._reads: deque[RangeRead] = deque()

    def at_once(self) -> list[Serialized] | None:
        """The answer as serialized PullResponses, if available and short; else `parts` goes on."""
        if self._problem is not None:
            return [range_error(*self._problem)]
        if not self._is_short:
            return None
        while self._left:
            self._begin_next()
        for read in self._reads:
            if not read.is_answered:
                return None
        if self._has_ids and any(read.coming() for read in self._reads):
            return None
        parts: list[AnswerPart] = []
        for read in self._reads:
            while not read.is_done:
                parts += read.next()
        self.close()
        self._observe()
        return list(_messages(parts))

    @property
    def _is_short(self) -> bool:
        if len(self._left) > (_AT_ONCE_COUNT if self._is_one else 1) or self._lists_rows:
            return False
        if self._has_ids:
            return self._has_few_rows
        count = byte_count = 0
        for part in self._left:
            range_id = RangeId(part.range_id)
            found = len(part.blocks) or self._node.block_count_at(self._table_id, range_id)
            count += found
            if not self._is_shared:
                byte_count += found * self._node.block_bytes_at(self._table_id, range_id)
        return count <= _AT_ONCE_COUNT and byte_count <= limits.SLICE_BYTES

    @property
    def _has_few_rows(self) -> bool:
        """True if the rows of all partitions together are no more than one may have."""
        count = byte_count = 0
        for part in self._left:
            found = sum(map(len, part.ids)) // limits.ROW_ID_BYTES
            count += found
            range_id = RangeId(part.range_id)
            byte_count += found * self._node.block_bytes_at(self._table_id, range_id)
        return count <= limits.MAX_ROW_COUNT and byte_count <= limits.MAX_PULLED_ROW_BYTES

    async def parts(self) -> AsyncIterator[Serialized]:
        """The answer as serialized PullResponses, in order; available ones come together."""
        if self._problem is not None:
            yield range_error(*self._problem)
        turns, reader = self._node.turns, self._node.unread.reader(self._call)
        there: list[AnswerPart] = []
        try:
            while self._reads or self._left:
                while self._left and (self._is_one or not self._reads):
                    if self._node.works.jobs:
                        await self._node.works.in_turn(self._begin_next)
                    else:
                        self._begin_next()
                    await turns.breathe()
                read = self._next()
                if not read.is_answered:
                    for message in _messages(there):
                        yield message
                    there = []
                    await read.arrival()
                for waiting in read.coming() if self._has_ids else ():
                    await arrival(waiting)
                while not read.is_done:
                    byte_count = read.next_bytes
                    await reader.put(byte_count)
                    if self._lists_rows:
                        await self._node.works.done(read.listing())
                    there += read.next()
                    is_full = byte_count > 0 or len(there) >= limits.SLICE_BLOCK_COUNT
                    if is_full or not self._is_one:
                        for message in _messages(there):
                            yield message
                            reader.took(len(message))
                        there = []
                        reader.end()
                    await turns.breathe()
                self._reads.popleft()
            for message in _messages(there):
                yield message
        finally:
            reader.end()
            self.close()
        self._observe()

    def _begin_next(self) -> None:
        part = self._left.popleft()
        range_id = RangeId(part.range_id)
        place = Place(self._table_id, range_id, AssignmentEpoch(part.assignment_epoch))
        read = RangeRead(self._terms, place, part)
        self._reads.append(read)
        try:
            if part.blocks or part.ids or part.skipped_row_counts or part.held_versions:
                _check_blocks(part, self._node.block_count_at(self._table_id, range_id))
        except InvalidKeys as problem:
            read.refuse(problem)
        else:
            read.wanted(self._node.shards.stores.get((self._table_id, range_id)))
            self._node.begin_read(read)

    def _next(self) -> RangeRead:
        """The read to answer next: one that was refused, since its caller may not want the rest."""
        at = next((at for at, read in enumerate(self._reads) if read.is_refused), 0)
        if at:
            read = self._reads[at]
            del self._reads[at]
            self._reads.appendleft(read)
        return self._reads[0]

    def close(self) -> None:
        """Forget the open pulls of ranges. Idempotent."""
        for read in self._reads:
            if not read.is_answered:
                self._node.end_read(read.number)
        self._reads.clear()

    def _observe(self) -> None:
        node = self._node
        node.metrics.pull_duration_seconds.observe(node.now() - self._began_s)


class StreamPulls:
    """The pulls of one PushPull stream, each a task while it waits."""

    def __init__(self, node: ParameterNode, stream: PushStream) -> None:
        self._node = node
        self._stream = stream
        self._tasks: set[asyncio.Task[None]] = set()
        self._last: asyncio.Task[None] | None = None

    async def begin(self, request: parameters_pb2.PullRequest) -> None:
        """Answer a pull now, or in a task. One without a number waits while too many are open."""
        node, stream, number = self._node, self._stream, request.read_number
        if number and self._is_full:
            await self._put_all(_framed(_overloaded(request), number))
            return
        pull = Pull(node, request, stream.session, stream.call)
        may_be_at_once = (
            number
            and not node.works.jobs
            and stream.has_part_space
            and node.unread.has_space(limits.STREAM_READ_BYTES)
        )
        answer = pull.at_once() if may_be_at_once else None
        if answer is None:
            task = await self._start(number, partial(self._put, pull, number))
            task.add_done_callback(lambda _: pull.close())
        elif sum(map(len, answer)) <= limits.STREAM_READ_BYTES:
            stream.put_parts(_framed(answer, number))
        else:
            await self._start(number, partial(self._put_all, _framed(answer, number)))

    @property
    def _is_full(self) -> bool:
        return len(self._tasks) >= limits.MAX_STREAM_READ_COUNT

    async def _start(
        self, number: int, answer: Callable[[], Coroutine[Any, Any, None]]
    ) -> asyncio.Task[None]:
        """Begin a task; `answer` may never be called, if the stream ends before its turn."""
        while self._is_full and not number:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        if number:
            task = asyncio.create_task(answer())
        else:
            task = self._last = asyncio.create_task(_after(self._last, answer))
        self._tasks.add(task)
        self._stream.pull_begins()
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._stream.pull_ends(None if task.cancelled() else task.exception())

    async def _put(self, pull: Pull, number: int) -> None:
        held: list[Serialized] = []
        async for response in pull.parts():
            for before in held:
                await self._stream.put_part(pull_part(before, number))
            held = [response]
        await self._put_all(_framed(held, number))

    async def _put_all(self, parts: Iterable[bytes]) -> None:
        for part in parts:
            await self._stream.put_part(part)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _after(
    before: asyncio.Task[None] | None, answer: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    if before is not None:
        await asyncio.wait([before])
    await answer()


# --- checks of a request


def _checked(
    request: parameters_pb2.PullRequest, range_count: int
) -> tuple[Codec | None, tuple[int, PushpullError] | None]:
    """The codec that a pull asks for (None: the table's own), and the first range whose error
    refuses the whole pull, if any. A range or block named often would make an answer of any size.
    """
    first_id = request.ranges[0].range_id if request.ranges else 0
    try:
        deadline_s_of(request.deadline_ms, limits.DEFAULT_PULL_DEADLINE_S)
        codec = wire.codec_from_proto(request.codec) if request.codec else None
    except PushpullError as error:
        return None, (first_id, error)
    if len(request.ranges) > range_count:
        problem = f"a pull names {len(request.ranges)} ranges; there are {range_count}"
        return codec, (first_id, InvalidKeys(problem))
    named: set[int] = set()
    for part in request.ranges:
        range_id = part.range_id
        if range_id >= range_count:
            problem = f"there is no range {range_id}; expected one below {range_count}"
            return codec, (range_id, InvalidKeys(problem))
        if range_id in named:
            problem = f"range {range_id} comes twice; expected each once"
            return codec, (range_id, InvalidKeys(problem))
        named.add(range_id)
    return codec, None


def _check_blocks(part: parameters_pb2.RangePull, block_count: int) -> None:
    """Check that a pull names each block of a range once. A `block_count` of 0: the range is not
    here, and why not is for it to answer.
    """
    blocks, skips = part.blocks, part.skipped_row_counts
    if skips and (part.ids or len(skips) != len(blocks)):
        raise InvalidKeys(
            f"the pull of range {part.range_id} lists the rows of {len(skips)} blocks, and has "
            f"{len(part.ids)} lists of ids; expected one of both, for each of its {len(blocks)} "
            "blocks"
        )
    if part.ids and len(part.ids) != len(blocks):
        raise InvalidKeys(
            f"the pull of range {part.range_id} has {len(part.ids)} lists of ids; expected one for "
            f"each of its {len(blocks)} blocks"
        )
    held_count, expected = len(part.held_versions), len(blocks) or block_count
    if expected and held_count not in (0, expected):
        raise InvalidKeys(
            f"the pull of range {part.range_id} has {held_count} versions of values that its "
            f"caller holds; expected one for each of its {expected} blocks, or none"
        )
    if (0 < block_count < len(blocks)) or len(set(blocks)) != len(blocks):
        raise InvalidKeys(
            f"the pull of range {part.range_id} names {len(blocks)} blocks; expected each of its "
            f"{block_count or 'blocks'} at most once"
        )


def _overloaded(request: parameters_pb2.PullRequest) -> list[bytes]:
    error = Overloaded(
        f"{limits.MAX_STREAM_READ_COUNT} pulls wait on this stream already",
        retry_after_ms=_RETRY_MS,
    )
    return [range_error(part.range_id, error) for part in request.ranges[: limits.MAX_RANGE_COUNT]]


# --- answers as messages


def _messages(parts: Iterable[AnswerPart]) -> Iterator[Serialized]:
    """Shared values leave in one message, others in their own."""
    values: list[parameters_pb2.SharedValue] = []
    for part in parts:
        is_full = len(values) == limits.MAX_BATCH_COUNT
        if values and (is_full or isinstance(part, Serialized)):
            yield shared_answer(values)  # answers come in the order of the ranges
            values = []
        if isinstance(part, Serialized):
            yield part
        else:
            values.append(part)
    if values:
        yield shared_answer(values)


def _framed(answer: Sequence[Serialized], number: int) -> Iterator[bytes]:
    for index, response in enumerate(answer, 1):
        yield pull_part(response, number, is_last=number > 0 and index == len(answer))
    if not answer or not number:
        yield pull_end(number)
