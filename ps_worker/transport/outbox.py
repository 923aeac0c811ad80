"""What waits to be written to a PushPull stream, and the messages that it leaves in.

Rules:
    - Entries and reads leave in the order in which they came.
    - Blocks whose payloads are in shared memory, or small, leave several to a message: a message
      costs about as much as a hundred kilobytes of payload. A large payload that travels as bytes
      has a message of its own, written around it.
    - A read that follows an entry at once travels in its message.
    - Where the ring is full, everything waits for the server's answers, which do not wait for us.
"""

from __future__ import annotations

import asyncio
from collections import deque

from ps_core import limits
from ps_core.envelope import pieces, wrap
from ps_worker.transport.lane import EntryName, SharedLane
from pushpull.v1 import parameters_pb2

Entry = (
    parameters_pb2.BlockPush
    | parameters_pb2.Seal
    | parameters_pb2.UpdateScale
    | parameters_pb2.Withdrawal
    | parameters_pb2.PullRequest
)
Frame = tuple[Entry, memoryview | None]
"""What leaves; a block leaves out its payload, which comes beside it."""

Message = tuple[bytes | memoryview, ...]
"""A serialized message in pieces; a large payload is one, and lies where its caller has it."""

_REQUEST = parameters_pb2.PushPullRequest
_FIELD: dict[type[Entry], int] = {
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
    """What one stream has still to write."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self._has_frames = asyncio.Event()

    def put(self, frame: Frame) -> None:
        """Behind all that waits."""
        self._frames.append(frame)
        self._has_frames.set()

    async def next_message(self, lane: SharedLane | None) -> Message:
        """The next message for the stream, serialized, in pieces; waits for one.

        Args:
            lane: where payloads may lie instead of in the message.
        """
        while True:
            while not self._frames:
                self._has_frames.clear()
                await self._has_frames.wait()
            message = self._next(lane)
            if message is not None:
                return message
            if lane is not None:
                await lane.has_room.wait()

    def _next(self, lane: SharedLane | None) -> Message | None:
        """Blocks that go together, or one entry, and a read behind; None: the ring is full."""
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
                # On a lane the next may have to wait for the ring, and so for these answers.
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
            pull, _ = self._frames.popleft()
            message += wrap(_REQUEST.THEN_PULL_FIELD_NUMBER, pull.SerializeToString())
        return (message,)

    @property
    def _more_follow(self) -> bool:
        """Whether another message comes behind the one that is being made."""
        if not self._frames:
            return False
        travels_along = isinstance(self._frames[0][0], parameters_pb2.PullRequest)
        return len(self._frames) > 1 or not travels_along

    def _small_blocks(self, lane: SharedLane | None) -> list[bytes] | None:
        """Blocks that can share a message, serialized; none if the first cannot; None: it could,
        but the ring is full.
        """
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
