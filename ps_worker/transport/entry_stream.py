"""One PushPull stream to a server: entries and small reads go out, answers come back.

Rules:
    - Entries leave in the order in which they were put.
    - A read has a number of its own and waits for nothing but its answer; if the stream breaks it
      fails with Recovering.

Everything belongs to the background loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import cast

import grpc

from ps_core.errors import PushpullError, Recovering, WaitExpired
from ps_runtime.http2.stream_port import ServerCall
from ps_worker.transport.lane import SharedLane
from ps_worker.transport.outbox import Frame, Outbox
from pushpull.v1 import parameters_pb2


class _Read:
    """A read that has been asked for."""

    def __init__(self, take: Callable[[parameters_pb2.PullResponse], None]) -> None:
        self._take = take
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def part(self, part: parameters_pb2.PushPullResponse) -> None:
        """A part of its answer came."""
        if self.answered.done():  # given up, or failed with a part before
            return
        try:
            if part.HasField("pull"):
                self._take(part.pull)
        except PushpullError as failure:
            self.answered.set_exception(failure)
        else:
            if part.is_last or part.HasField("end"):
                self.answered.set_result(None)

    def expire(self, timeout_s: float) -> None:
        """Time is up."""
        self.fail(WaitExpired(f"a server did not answer a read within {timeout_s:.1f} s"))

    def fail(self, failure: PushpullError) -> None:
        """There will be no more."""
        if not self.answered.done():
            self.answered.set_exception(failure)


class EntryStream:
    """A stream that is open, or about to be; `run` carries it.

    Args:
        call: the call, of serialized messages.
        lane: where payloads may lie; None sends them all.
    """

    def __init__(self, call: ServerCall, lane: SharedLane | None) -> None:
        self.lane = lane
        self._call = call
        self._outbox = Outbox()
        self._reads: dict[int, _Read] = {}
        self._numbers = itertools.count(1)
        self._end: PushpullError | None = None

    def put(self, frame: Frame) -> None:
        """Write a frame after those before it; lost if the stream breaks."""
        self._outbox.put(frame)

    async def run(
        self,
        header: parameters_pb2.StreamHeader,
        on_open: Callable[[], None],
        on_replies: Callable[[parameters_pb2.PushResponse], None],
    ) -> None:
        """Carry the stream until it ends.

        Raises:
            grpc.RpcError: it broke.
            Exception: what kept it from being written, a bug.
        """
        writer: asyncio.Task[None] | None = None
        try:
            first = parameters_pb2.PushPullRequest(header=header)
            await self._call.write((first.SerializeToString(),))
            on_open()
            writer = asyncio.create_task(self._write())
            async for raw in self._call:
                self._take(parameters_pb2.PushPullResponse.FromString(cast(bytes, raw)), on_replies)
        except asyncio.CancelledError:
            has_failed = writer is not None and writer.done() and not writer.cancelled()
            bug = writer.exception() if writer is not None and has_failed else None
            if bug is not None:
                raise bug from None
            raise
        finally:
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            self._call.cancel()
            self._end = Recovering("the push stream to the server ended")
            for read in self._reads.values():
                read.fail(self._end)

    async def read(
        self,
        request: parameters_pb2.PullRequest,
        timeout_s: float,
        take: Callable[[parameters_pb2.PullResponse], None],
    ) -> None:
        """Read, until the answer is there in full.

        Args:
            request: what to read.
            timeout_s: how long it may take.
            take: called with each part when it comes; what it raises ends the read.

        Raises:
            Recovering: the stream ended first.
            WaitExpired: the server did not answer in time.
        """
        if self._end is not None:
            raise self._end
        number = request.read_number = next(self._numbers)
        read = self._reads[number] = _Read(take)
        self._outbox.put((request, None))
        timer = asyncio.get_running_loop().call_later(timeout_s, read.expire, timeout_s)
        try:
            await read.answered
        finally:
            timer.cancel()
            del self._reads[number]

    def _take(
        self,
        response: parameters_pb2.PushPullResponse,
        on_replies: Callable[[parameters_pb2.PushResponse], None],
    ) -> None:
        kind = response.WhichOneof("part")
        if kind == "replies":
            self._answered(response.replies, on_replies)
            return
        if response.HasField("with_replies"):
            self._answered(response.with_replies, on_replies)
        read = self._reads.get(response.read_number)
        if read is not None:  # else nobody waits for it any more
            read.part(response)

    def _answered(
        self,
        replies: parameters_pb2.PushResponse,
        on_replies: Callable[[parameters_pb2.PushResponse], None],
    ) -> None:
        if self.lane is not None:
            self.lane.answered(replies.replies)
        on_replies(replies)

    async def _write(self) -> None:
        """Write what comes, as fast as the stream takes it. If it breaks, the reader says why."""
        try:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                while True:
                    await self._call.write(await self._outbox.next_message(self.lane))
        except Exception:
            self._call.cancel()  # else nobody would notice that nothing is written any more
            raise
