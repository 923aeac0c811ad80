"""The answers to reads: begun range after range, given as messages.

Rules:
    - A consistent read, and one of values that are lent, is begun in all ranges at once; another
      range after range, since a table's bytes are many.
    - What is there at once is answered at once, without a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from ps_core import limits
from ps_core.cluster_view import Session
from ps_core.errors import Overloaded
from ps_core.keys import AssignmentEpoch, RangeId, TableId
from ps_server import intake
from ps_server.events import Place
from ps_server.frames import pull_end, pull_part, range_error, shared_answer
from ps_server.node import ParameterNode
from ps_server.reads import AnswerPart, Read
from pushpull.v1 import parameters_pb2

_RETRY_MS = 500

_Answer = asyncio.Future[list[AnswerPart]]


class Reading:
    """One read on its way."""

    def __init__(
        self, node: ParameterNode, request: parameters_pb2.PullRequest, session: Session
    ) -> None:
        self._node = node
        self._request = request
        self._session = session
        self._began_s = node.now()
        deadline_s = request.deadline_ms / 1000 or limits.DEFAULT_PULL_DEADLINE_S
        self._until_s = self._began_s + min(deadline_s, limits.MAX_DEADLINE_S)
        self._ranges = list(request.ranges)
        self._codec, self._problems = intake.read_terms(request)
        is_lent = (
            request.shared
            and not self._problems
            and node.shards.homes.lends(session, TableId(request.table_id), self._codec)
        )
        is_one = request.consistent or is_lent
        self._batch_count = len(self._ranges) if is_one else 1
        self._begun_count = 0
        self._answers: list[_Answer] = []
        self._waiters: list[int] = []

    def at_once(self) -> list[bytes] | None:
        """The answer as serialized PullResponses, if all of it is there; else `parts` goes on."""
        if self._batch_count < len(self._ranges):
            return None
        self._begin_batch()
        if not all(answer.done() for answer in self._answers):
            return None
        parts = [part for answer in self._answers for part in answer.result()]
        self.close()
        self._observe()
        return list(_messages(parts))

    async def parts(self) -> AsyncIterator[bytes]:
        """The answer as serialized PullResponses; in order, and what is there together."""
        while self._answers or self._begun_count < len(self._ranges):
            if not self._answers:
                self._begin_batch()
            try:
                there: list[AnswerPart] = []
                for answer in self._answers:
                    if not answer.done():
                        for message in _messages(there):
                            yield message
                        there = []
                    there += await answer
                for message in _messages(there):
                    yield message
            finally:
                self.close()
        self._observe()

    def close(self) -> None:
        """Nobody waits for what has been begun. Idempotent."""
        for waiter in self._waiters:
            self._node.end_read(waiter)
        self._answers, self._waiters = [], []

    def _begin_batch(self) -> None:
        count = min(self._batch_count, len(self._ranges) - self._begun_count)
        for number in range(self._begun_count, self._begun_count + count):
            self._begin(number)
        self._begun_count += count

    def _begin(self, number: int) -> None:
        answer: _Answer = asyncio.get_running_loop().create_future()
        self._answers.append(answer)

        def on_answer(responses: list[AnswerPart]) -> None:
            if not answer.done():
                answer.set_result(responses)

        request, part = self._request, self._ranges[number]
        problem = self._problems.get(number)
        if problem is not None:
            on_answer([range_error(part.range_id, problem)])
            return
        place = Place(
            TableId(request.table_id),
            RangeId(part.range_id),
            AssignmentEpoch(part.assignment_epoch),
        )
        read = Read(
            place, part.blocks, self._codec, self._session, request.shared, on_answer, request.cut
        )
        waiter = self._node.begin_read(
            read, request.clock, consistent=request.consistent, deadline_s=self._until_s
        )
        self._waiters.append(waiter)

    def _observe(self) -> None:
        node = self._node
        node.metrics.pull_duration_seconds.observe(node.now() - self._began_s)


def refused(request: parameters_pb2.PullRequest) -> list[bytes]:
    """The answer to a read that is one too many on its stream."""
    error = Overloaded(
        f"{limits.MAX_STREAM_READ_COUNT} reads wait on this stream already",
        retry_after_ms=_RETRY_MS,
    )
    return [range_error(part.range_id, error) for part in request.ranges]


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
