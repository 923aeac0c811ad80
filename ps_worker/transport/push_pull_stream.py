"""One PushPull stream to a server: entries and small pulls go out, answers come back.

Rules:
    - Entries and pulls leave in the order of `put`.
    - Blocks whose payloads are small or in shared memory share a message, because a message costs
      about as much as a hundred kilobytes of payload. A large payload that travels as bytes has a
      message of its own, written around it.
    - A pull that follows an entry at once travels in its message, unless both are too long for one.
    - While the ring is full, all entries wait for the server's answers, which never wait for them.
    - A pull has a number of its own; if the stream breaks, it fails with Recovering.

Only the background loop calls this.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable
from typing import cast

import grpc

from ps_core import limits
from ps_core.envelope import pieces, wrap
from ps_core.errors import PushpullError, Recovering, WaitExpired
from ps_runtime.http2.stream_port import ServerCall
from ps_worker.transport.lane import EntryName, SharedLane
from pushpull.v1 import parameters_pb2

StreamEntry = (
    parameters_pb2.BlockPush
    | parameters_pb2.Seal
    | parameters_pb2.UpdateScale
    | parameters_pb2.Withdrawal
    | parameters_pb2.PullRequest
)
Frame = tuple[StreamEntry, memoryview | None]
"""An entry, and the payload of a block, which the entry leaves out."""

Message = tuple[bytes | memoryview, ...]
"""A serialized message in pieces; a large payload is one of them, in its caller's memory."""

_REQUEST = parameters_pb2.PushPullRequest
_FIELD: dict[type[StreamEntry], int] = {
    parameters_pb2.BlockPush: _REQUEST.BLOCK_FIELD_NUMBER,
    parameters_pb2.Seal: _REQUEST.SEAL_FIELD_NUMBER,
    parameters_pb2.UpdateScale: _REQUEST.UPDATE_SCALE_FIELD_NUMBER,
    parameters_pb2.Withdrawal: _REQUEST.WITHDRAWAL_FIELD_NUMBER,
    parameters_pb2.PullRequest: _REQUEST.PULL_FIELD_NUMBER,
}
_BLOCKS_FIELD = parameters_pb2.BlockBatch.BLOCKS_FIELD_NUMBER
_PAYLOAD_FIELD = parameters_pb2.BlockPush.PAYLOAD_FIELD_NUMBER
_PADDING_FIELD = parameters_pb2.BlockPush.PADDING_FIELD_NUMBER


class Outbox:
    """The unwritten entries of one stream."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self._has_frames = asyncio.Event()
        self._being_written_count = 0

    @property
    def unwritten_count(self) -> int:
        """Entries and pulls that the stream has not taken: it may be inside of one."""
        return len(self._frames) + self._being_written_count

    def put(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._has_frames.set()

    async def next_message(self, lane: SharedLane | None) -> Message:
        """The next message; the one before it has been written."""
        self._being_written_count = 0
        while True:
            while not self._frames:
                self._has_frames.clear()
                await self._has_frames.wait()
            before_count = len(self._frames)
            message = self._next(lane)
            if message is not None:
                self._being_written_count = before_count - len(self._frames)
                return message
            if lane is not None:
                await lane.has_space.wait()

    def _next(self, lane: SharedLane | None) -> Message | None:
        """Blocks that share a message, or one entry, and a pull behind; None: the ring is full."""
        entry, payload = self._frames[0]
        if payload is None or not isinstance(entry, parameters_pb2.BlockPush):
            self._frames.popleft()
            message = wrap(_FIELD[type(entry)], entry.SerializeToString())
        else:
            blocks = self._small_blocks(lane)
            if blocks is None:
                return None
            if not blocks:
                self._frames.popleft()
                # On a lane the next may have to wait for the ring, and so for the answers to these.
                entry.more_follow = lane is None and self._more_follow
                rest = entry.SerializeToString()
                return pieces(
                    _REQUEST.BLOCK_FIELD_NUMBER, rest, _PAYLOAD_FIELD, payload, _PADDING_FIELD
                )
            if len(blocks) == 1:
                message = wrap(_REQUEST.BLOCK_FIELD_NUMBER, blocks[0])
            else:
                batch = b"".join(wrap(_BLOCKS_FIELD, block) for block in blocks)
                message = wrap(_REQUEST.BATCH_FIELD_NUMBER, batch)
        if self._frames and isinstance(self._frames[0][0], parameters_pb2.PullRequest):
            pull = self._frames[0][0].SerializeToString()
            behind = wrap(_REQUEST.THEN_PULL_FIELD_NUMBER, pull)
            # Of blocks there are few, and their payloads do not count.
            beside = len(message) if payload is None else limits.MESSAGE_OVERHEAD_BYTES
            if beside + len(behind) <= limits.MAX_ENTRY_BYTES:
                self._frames.popleft()
                message += behind
        return (message,)

    @property
    def _more_follow(self) -> bool:
        if not self._frames:
            return False
        travels_along = isinstance(self._frames[0][0], parameters_pb2.PullRequest)
        return len(self._frames) > 1 or not travels_along

    def _small_blocks(self, lane: SharedLane | None) -> list[bytes] | None:
        """Blocks that share a message; empty if the first cannot; None: the ring is full."""
        blocks: list[bytes] = []
        byte_count = 0
        while self._frames and len(blocks) < limits.MAX_BATCH_COUNT:
            entry, payload = self._frames[0]
            if payload is None or not isinstance(entry, parameters_pb2.BlockPush):
                break
            name = EntryName(entry.table_id, entry.range_id, entry.sequence)
            is_large = payload.nbytes >= limits.LANE_MIN_PAYLOAD_BYTES
            shared = lane.where(payload) if lane is not None and is_large else None
            bound = limits.LANE_BATCH_BYTES if shared is None else limits.LANE_BUFFER_BATCH_BYTES
            if byte_count + payload.nbytes > bound and blocks:
                break
            if shared is None and lane is not None and lane.can_place(name, payload.nbytes):
                shared = lane.place(name, payload)
                if shared is None:
                    return blocks or None
            if shared is not None:
                entry.shared_payload.CopyFrom(shared)
            elif not is_large:
                entry.payload = bytes(payload)
            else:
                break
            self._frames.popleft()
            blocks.append(entry.SerializeToString())
            byte_count += payload.nbytes
        return blocks


class _StreamPull:
    """A pull that waits for its answer."""

    def __init__(self, take: Callable[[parameters_pb2.PullResponse], None]) -> None:
        self._take = take
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, response: parameters_pb2.PushPullResponse) -> None:
        if self.answered.done():  # given up, or failed at an earlier message
            return
        try:
            if response.HasField("pull"):
                self._take(response.pull)
        except PushpullError as failure:
            self.answered.set_exception(failure)
        else:
            if response.is_last or response.HasField("end"):
                self.answered.set_result(None)

    def fail(self, failure: PushpullError) -> None:
        if not self.answered.done():
            self.answered.set_exception(failure)

    def expire(self, timeout_s: float) -> None:
        self.fail(WaitExpired(f"a server did not answer a pull within {timeout_s:.1f} s"))


class PushPullStream:
    """A stream that is open, or about to be; without a lane it sends all payloads as bytes."""

    def __init__(self, call: ServerCall, lane: SharedLane | None) -> None:
        self.lane = lane
        self._call = call
        self._outbox = Outbox()
        self.put = self._outbox.put
        self.free_pulls = asyncio.Semaphore(limits.MAX_STREAM_READ_COUNT)
        """Pulls that the server takes beside the open ones. For the callers of `pull`."""
        self._pulls: dict[int, _StreamPull] = {}
        self._numbers = itertools.count(1)
        self._end: PushpullError | None = None

    @property
    def unwritten_count(self) -> int:
        return self._outbox.unwritten_count

    async def run(
        self,
        header: parameters_pb2.StreamHeader,
        on_open: Callable[[], None],
        on_replies: Callable[[parameters_pb2.PushResponse], None],
    ) -> None:
        """Carry the stream until it ends; raises grpc.RpcError if it broke."""
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
            for pull in self._pulls.values():
                pull.fail(self._end)

    async def pull(
        self,
        request: parameters_pb2.PullRequest,
        timeout_s: float,
        take: Callable[[parameters_pb2.PullResponse], None],
    ) -> None:
        """Pull, until the answer is complete; an error that `take` raises ends the pull."""
        if self._end is not None:
            raise self._end
        number = request.read_number = next(self._numbers)
        pull = self._pulls[number] = _StreamPull(take)
        self._outbox.put((request, None))
        timer = asyncio.get_running_loop().call_later(timeout_s, pull.expire, timeout_s)
        try:
            await pull.answered
        finally:
            timer.cancel()
            del self._pulls[number]

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
        pull = self._pulls.get(response.read_number)
        if pull is not None:  # else it has expired
            pull.take(response)

    def _answered(
        self,
        replies: parameters_pb2.PushResponse,
        on_replies: Callable[[parameters_pb2.PushResponse], None],
    ) -> None:
        if self.lane is not None:
            self.lane.answered(replies.replies)
        on_replies(replies)

    async def _write(self) -> None:
        try:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                while True:
                    await self._call.write(await self._outbox.next_message(self.lane))
        except Exception:
            self._call.cancel()  # ends the reading side, which would wait for ever
            raise
