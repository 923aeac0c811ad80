"""What waits to be written to a push stream, and the messages that it leaves in.

Rules:
    - Entries leave in the order in which they came.
    - Blocks whose payloads are in shared memory, or small, leave several to a message: a message
      costs about as much as a hundred kilobytes of payload. A large payload that travels as bytes
      has a message of its own, written around it with one copy.
    - Where the ring is full, everything waits for the server's answers, which do not wait for us.
"""

from __future__ import annotations

import asyncio
from collections import deque

from ps_core import limits
from ps_core.envelope import join, wrap
from ps_worker.lane import EntryName, SharedLane
from pushpull.v1 import parameters_pb2

Frame = tuple[parameters_pb2.PushRequest | parameters_pb2.BlockPush, memoryview | None]
"""A message of a push stream, or a block that leaves out its payload, and the payload."""

_BLOCK_FIELD = parameters_pb2.PushRequest.BLOCK_FIELD_NUMBER
_BATCH_FIELD = parameters_pb2.PushRequest.BATCH_FIELD_NUMBER
_BLOCKS_FIELD = parameters_pb2.BlockBatch.BLOCKS_FIELD_NUMBER
_PAYLOAD_FIELD = parameters_pb2.BlockPush.PAYLOAD_FIELD_NUMBER
_PADDING_FIELD = parameters_pb2.BlockPush.PADDING_FIELD_NUMBER


class Outbox:
    """The entries of one link that wait for its push stream."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self._has_frames = asyncio.Event()

    def put(self, frame: Frame) -> None:
        """Behind all that waits."""
        self._frames.append(frame)
        self._has_frames.set()

    def clear(self) -> None:
        """Forget all that waits."""
        self._frames.clear()

    async def next_message(self, lane: SharedLane | None, *, batches: bool) -> bytes:
        """The next message for the stream, serialized; waits for one.

        Args:
            lane: where payloads may lie instead of in the message.
            batches: whether the server takes several blocks in a message.
        """
        while True:
            while not self._frames:
                self._has_frames.clear()
                await self._has_frames.wait()
            message = self._batch(lane) if batches else self._single()
            if message is not None:
                return message
            if lane is not None:
                await lane.has_room.wait()

    def _single(self) -> bytes:
        message, payload = self._frames.popleft()
        serialized = message.SerializeToString()
        if payload is None:
            return serialized
        return join(_BLOCK_FIELD, serialized, _PAYLOAD_FIELD, payload, _PADDING_FIELD)

    def _batch(self, lane: SharedLane | None) -> bytes | None:
        """As many blocks as go together, or one entry; None if the ring is full."""
        blocks: list[bytes] = []
        byte_count = 0
        while self._frames and len(blocks) < limits.MAX_BATCH_COUNT:
            message, payload = self._frames[0]
            if payload is None or not isinstance(message, parameters_pb2.BlockPush):
                break
            if byte_count + payload.nbytes > limits.LANE_BATCH_BYTES and blocks:
                break
            name = EntryName(message.table_id, message.range_id, message.sequence)
            if lane is not None and lane.can_place(name, payload.nbytes):
                shared = lane.place(name, payload)
                if shared is None and not blocks:
                    return None
                if shared is None:
                    break
                message.shared_payload.CopyFrom(shared)
            elif payload.nbytes < limits.LANE_MIN_PAYLOAD_BYTES:
                message.payload = bytes(payload)
            else:
                break
            blocks.append(message.SerializeToString())
            byte_count += payload.nbytes
            self._frames.popleft()
        if not blocks:
            return self._single()
        if len(blocks) == 1:
            return wrap(_BLOCK_FIELD, blocks[0])
        return wrap(_BATCH_FIELD, b"".join(wrap(_BLOCKS_FIELD, block) for block in blocks))
