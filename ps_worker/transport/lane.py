"""The client's end of the same-host lane: a Unix socket to one server, and the memory behind it.

Pushes copy payloads into a ring that the server has mapped, or leave them in an array of
`empty_shared`, where the server reads them; pulls copy values out of the server's memory, which is
mapped here for reading. A client without a stream has a lane for pulls alone.

Rules:
    - The server uses a piece of the ring from the moment that its descriptor is written until the
      first answer to that entry on the same stream. A stream's ring ends with the stream: pieces
      that a broken stream may still use are never written again.
    - An entry that is sent again while the server uses its piece carries its bytes, then and ever
      after on this stream, because two answers would come and either could free a new piece.
    - A copy of a value counts only if its sequence lock is unchanged afterwards.

Invariants:
    RING-1  Pieces in use never overlap.
    RING-2  When no piece is in use, a piece of the whole ring can be taken.

`empty_shared` and what it needs are thread-safe; all else is called by the background loop alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from ps_core import limits, sequence_locks
from ps_core.errors import Internal, PushpullError, Recovering, WaitExpired, check
from ps_core.sequence_locks import Shared
from ps_runtime.grpc.errors import error_from_proto
from ps_runtime.system.capacity import usable_core_count
from ps_runtime.system.executors import submitted
from ps_runtime.system.shared_memory import Bytes, SharedSegment, allocate, map_segment, receive
from pushpull.v1 import parameters_pb2

CORES_PER_COPIER = 4
MAX_COPIER_COUNT = 4

_MESSAGE_BYTES = 4096
_HANDSHAKE_DEADLINE_S = 5.0
_segment_ids = itertools.count(1)
"""Unique in the life of the process, and so in any session."""


Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, order=True)
class SharedBuffer:
    """The address of an array of `empty_shared`, and the file that it can be mapped from; `number`
    is unique in the process, where both may be used again.
    """

    begin: int
    byte_count: int
    fd: int
    number: int


_numbers = itertools.count(1)
_lock = threading.Lock()
_buffers: list[SharedBuffer] = []
"""By address."""

_gone: deque[SharedBuffer] = deque()
"""Collected buffers that are still among `_buffers`. The collector may call `_forget` at any
moment, even in a thread that holds the lock, so `_forget` takes none.
"""

_collected = [0]


def empty_shared(shape: int | tuple[int, ...], dtype: npt.DTypeLike = "float32") -> Array:
    """A new array of zeros that servers on this host can read.

    Shapes:
        result: C-contiguous, writable, aligned to a page.

    Raises:
        OSError: this system cannot share memory, or has none left: an ordinary array serves too.
    """
    element = np.dtype(dtype)
    byte_count = int(np.prod(shape, dtype=np.int64)) * element.itemsize
    if not 0 < byte_count <= limits.MAX_LANE_SEGMENT_BYTES:
        raise OSError(
            f"{byte_count} bytes are asked for; a server maps 1 to {limits.MAX_LANE_SEGMENT_BYTES}"
        )
    fd, memory = allocate("pushpull-buffer", byte_count)
    raw: Bytes = np.frombuffer(memory, np.uint8)
    buffer = SharedBuffer(raw.ctypes.data, byte_count, fd, next(_numbers))
    with _lock:
        _sweep()
        insort(_buffers, buffer)
    weakref.finalize(memory, _forget, buffer)
    return raw.view(element).reshape(shape)


def find(payload: memoryview) -> tuple[SharedBuffer, int] | None:
    """The buffer of a payload, and its offset there; None for ordinary memory."""
    if not _buffers:
        return None
    begin = np.frombuffer(payload, np.uint8).__array_interface__["data"][0]
    with _lock:
        _sweep()
        at = bisect_right(_buffers, begin, key=lambda buffer: buffer.begin) - 1
        buffer = _buffers[at] if at >= 0 else None
    if buffer is None or begin + payload.nbytes > buffer.begin + buffer.byte_count:
        return None
    return buffer, begin - buffer.begin


def collected_count() -> int:
    """The number of buffers collected so far; when it changes, check `is_live` again."""
    return _collected[0]


def is_live(buffer: SharedBuffer) -> bool:
    with _lock:
        _sweep()
        return buffer in _buffers


def _forget(buffer: SharedBuffer) -> None:
    _gone.append(buffer)
    _collected[0] += 1
    os.close(buffer.fd)


def _sweep() -> None:
    while _gone:
        _buffers.remove(_gone.popleft())


ALIGNMENT_BYTES = 64


class Ring:
    """The pieces of a ring, contiguous, each beginning at a multiple of ALIGNMENT_BYTES. A piece
    that is freed out of order can be used again once all older pieces are free.
    """

    def __init__(self, byte_count: int) -> None:
        check(byte_count % ALIGNMENT_BYTES == 0, "RING-1", f"a ring of {byte_count} bytes")
        self._byte_count = byte_count
        self._begin = 0
        self._taken: deque[list[int]] = deque()  # [offset, size, 1 while in use], oldest first
        self._by_offset: dict[int, list[int]] = {}

    def take(self, byte_count: int) -> int | None:
        """The offset of a free piece of `byte_count` bytes (1 or more); None if there is none."""
        size = -(-byte_count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        begin = self._begin
        if not self._taken:
            if size > self._byte_count:
                return None
            begin = 0
        else:
            oldest = self._taken[0][0]
            # Used: [oldest, begin) or, once wrapped around, [oldest, end) and [0, begin).
            limit = oldest if begin <= oldest else self._byte_count
            if begin + size > limit:
                if begin <= oldest or size > oldest:
                    return None
                begin = 0
        piece = [begin, size, 1]
        self._taken.append(piece)
        self._by_offset[begin] = piece
        self._begin = begin + size
        return begin

    def give_back(self, offset: int) -> None:
        self._by_offset.pop(offset)[2] = 0
        while self._taken and not self._taken[0][2]:
            self._taken.popleft()


class EntryName(NamedTuple):
    """The name of an entry in a server's reply."""

    table_id: int
    range_id: int
    sequence: int


class SharedLane:
    """Memory shared with one server, for the life of one push stream or reader's link."""

    def __init__(self, connection: socket.socket, on_lost: Callable[[], None]) -> None:
        self._socket = connection
        self._on_lost = on_lost
        self._ring: Ring | None = None
        self._memory: SharedSegment | None = None
        self._segment_id = 0
        self._offset_of: dict[EntryName, int] = {}  # of pieces of the ring that the server uses
        self._sent_twice: set[EntryName] = set()
        self._offered: dict[int, SharedBuffer] = {}
        self._mapped: dict[SharedBuffer, int] = {}
        self._collected_count = 0
        self._segments: dict[int, Bytes] = {}
        self._last_segment_id = 0  # a server numbers its segments upwards, as it makes them
        self.row_bytes = 0  # of pulls that the server may be answering in its memory for rows
        self.is_open = True
        self.has_space = asyncio.Event()

    @classmethod
    async def open(
        cls, offer: parameters_pb2.SameHostOffer, on_lost: Callable[[], None], *, pushes: bool
    ) -> SharedLane:
        """Connect to the server's socket, and share a ring with it if this client pushes; `on_lost`
        is called once if the connection ends by itself. OSError: the server is on another host.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        lane = cls(connection, on_lost)
        try:
            async with asyncio.timeout(_HANDSHAKE_DEADLINE_S):
                connection.connect(f"\0{offer.socket_name}")
                hello = parameters_pb2.LaneHello(nonce=offer.nonce)
                connection.send(parameters_pb2.LaneRequest(hello=hello).SerializeToString())
                if not (await lane._response()).HasField("welcome"):
                    raise Internal("the server's Unix socket answered a hello without a welcome")
                if pushes:
                    await lane._share_ring()
        except TimeoutError:
            lane.close()
            raise WaitExpired("the server's Unix socket did not answer") from None
        except BaseException:
            lane.close()
            raise
        asyncio.get_running_loop().add_reader(connection.fileno(), lane._receive_all)
        return lane

    def close(self) -> None:
        """End the connection; the server unmaps the ring. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        if self._memory is not None:
            self._memory.close()
        self._ring = None
        self._segments.clear()
        self.has_space.set()

    # --- pushes

    def where(self, payload: memoryview) -> parameters_pb2.SharedPayload | None:
        """The place of a payload in a buffer that the server has mapped, if it is in one. It needs
        no piece of the ring: it does not change before the entry has ended.
        """
        if self._ring is None:
            return None
        if self._collected_count != collected_count():
            self._drop_collected()
        found = find(payload)
        if found is None:
            return None
        buffer, offset = found
        segment_id = self._mapped.get(buffer, 0)
        if not segment_id:
            self._offer_buffer(buffer)
            return None
        if offset % limits.LANE_ALIGNMENT_BYTES:
            return None
        return parameters_pb2.SharedPayload(
            segment_id=segment_id, offset_bytes=offset, byte_count=payload.nbytes
        )

    def _offer_buffer(self, buffer: SharedBuffer) -> None:
        """Share a buffer with the server; payloads go through the ring until it has mapped it."""
        is_offered = buffer in self._offered.values()
        # The ring is one more; the server would close the connection over one too many.
        segment_count = len(self._offered) + len(self._mapped) + 1
        if is_offered or segment_count >= limits.MAX_LANE_SEGMENT_COUNT:
            return
        segment_id = next(_segment_ids)
        with contextlib.suppress(OSError):  # the socket is full: another time
            self._share(segment_id, buffer.byte_count, buffer.fd)
            self._offered[segment_id] = buffer

    def _drop_collected(self) -> None:
        """Tell the server about buffers that are gone here, whose memory it would keep."""
        self._collected_count = collected_count()
        for buffer, segment_id in list(self._mapped.items()):
            if not is_live(buffer):
                dropped = parameters_pb2.SegmentDropped(segment_id=segment_id)
                request = parameters_pb2.LaneRequest(dropped=dropped)
                with contextlib.suppress(OSError):  # the socket is full: with the next that goes
                    self._socket.send(request.SerializeToString())
                    del self._mapped[buffer]

    def place(self, name: EntryName, payload: memoryview) -> parameters_pb2.SharedPayload | None:
        """Copy a payload into the ring; None if it is full now (see `can_place`)."""
        if self._ring is None or self._memory is None:
            return None
        offset = self._ring.take(payload.nbytes)
        if offset is None:
            self.has_space.clear()
            return None
        target = self._memory.array[offset : offset + payload.nbytes]
        np.copyto(target, np.frombuffer(payload, np.uint8))
        self._offset_of[name] = offset
        return parameters_pb2.SharedPayload(
            segment_id=self._segment_id, offset_bytes=offset, byte_count=payload.nbytes
        )

    def can_place(self, name: EntryName, byte_count: int) -> bool:
        """True if a payload goes into the ring, now or when pieces are free; else it is sent as
        bytes. An entry that is sent again while the server uses its piece stays out from now on.
        """
        if self._ring is None or not (
            limits.LANE_MIN_PAYLOAD_BYTES <= byte_count <= limits.LANE_RING_BYTES
        ):
            return False
        if name in self._offset_of:
            self._sent_twice.add(name)
        return name not in self._sent_twice

    def answered(self, replies: Iterable[parameters_pb2.EntryReply]) -> None:
        if self._ring is None or not self._offset_of:
            return
        for reply in replies:
            name = EntryName(reply.table_id, reply.range_id, reply.sequence)
            offset = self._offset_of.pop(name, None)
            if offset is not None:
                self._ring.give_back(offset)
                self.has_space.set()

    # --- pulls

    def has_row_space(self, byte_count: int) -> bool:
        """True if so many more bytes of rows find space in the server's memory for answers, where
        none of those under way can overwrite another.
        """
        return 2 * (self.row_bytes + byte_count) <= limits.LANE_ANSWER_BYTES

    def shared(
        self, value: parameters_pb2.SharedValue, target: Bytes, skip_bytes: int
    ) -> Shared | None:
        """A value in the server's memory, from its byte `skip_bytes` on, which belongs into
        `target`; None if the server has withdrawn it since.
        """
        memory = self._memory_of(value)
        if memory is None:
            return None
        begin = value.offset_bytes + skip_bytes
        # A server shares values only on processors that keep the order of loads.
        return Shared(
            memory[begin : begin + target.nbytes],
            target,
            memory.view(np.uint64),
            value.stamp_offset_bytes // sequence_locks.LOCK_BYTES,
            value.stamp,
        )

    def _memory_of(self, value: parameters_pb2.SharedValue) -> Bytes | None:
        """The segment of a value; None if the server has withdrawn it since."""
        if value.segment_id not in self._segments:
            self._receive_all()  # its descriptor came before the answer that names it
        memory = self._segments.get(value.segment_id)
        if memory is None and 0 < value.segment_id <= self._last_segment_id:
            return None
        if memory is None and not self.is_open:
            raise Recovering("the server's Unix socket was closed before it had shared its values")
        end = max(
            value.offset_bytes + value.byte_count,
            value.stamp_offset_bytes + sequence_locks.LOCK_BYTES,
        )
        if memory is None or end > memory.nbytes:
            raise Internal(
                f"the server named bytes up to {end} of segment {value.segment_id}, of which "
                f"{0 if memory is None else memory.nbytes} are shared"
            )
        return memory

    # --- the socket

    async def _share_ring(self) -> None:
        memory = SharedSegment("pushpull-ring", limits.LANE_RING_BYTES)
        self._memory = memory
        self._segment_id = next(_segment_ids)
        self._share(self._segment_id, memory.byte_count, memory.fd)
        while not (await self._response()).HasField("mapped"):
            pass  # the server's own segments may come between
        self._ring = Ring(memory.byte_count)
        self.has_space.set()

    def _share(self, segment_id: int, byte_count: int, fd: int) -> None:
        shared = parameters_pb2.SharedSegment(segment_id=segment_id, byte_count=byte_count)
        request = parameters_pb2.LaneRequest(segment=shared)
        socket.send_fds(self._socket, [request.SerializeToString()], [fd])

    async def _response(self) -> parameters_pb2.LaneResponse:
        loop = asyncio.get_running_loop()
        while True:
            readable: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self._socket.fileno(), _finish, readable)
            try:
                await readable
            finally:
                loop.remove_reader(self._socket.fileno())
            response = self._receive()
            if response is not None:
                return response

    def _receive_all(self) -> None:
        try:
            while self._receive() is not None:
                pass
        except (OSError, PushpullError):
            if self.is_open:
                self.close()
                self._on_lost()

    def _receive(self) -> parameters_pb2.LaneResponse | None:
        """The next message, its segment mapped; None if none is there."""
        descriptor = -1
        try:
            message, descriptor = receive(self._socket, _MESSAGE_BYTES, takes_file=True)
            if not message:
                raise ConnectionResetError("the server closed its Unix socket")
            response = parameters_pb2.LaneResponse.FromString(message)
            if response.HasField("error"):
                raise error_from_proto(response.error)
            if response.HasField("segment"):
                if descriptor < 0:
                    raise ConnectionResetError("no file descriptor is left for the server's memory")
                shared = response.segment
                if shared.byte_count % sequence_locks.LOCK_BYTES:
                    raise Internal(f"the server shares a segment of {shared.byte_count} bytes")
                self._segments[shared.segment_id] = map_segment(descriptor, shared.byte_count)
                self._last_segment_id = max(self._last_segment_id, shared.segment_id)
            if response.HasField("dropped"):
                self._segments.pop(response.dropped.segment_id, None)
            if response.HasField("mapped"):
                buffer = self._offered.pop(response.mapped.segment_id, None)
                if buffer is not None:
                    self._mapped[buffer] = response.mapped.segment_id
                    self._collected_count = -1  # it may be collected already
            return response
        except (BlockingIOError, InterruptedError):
            return None
        except DecodeError:
            raise Internal("the server's Unix socket sent no LaneResponse") from None
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def _finish(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


class Copiers:
    """Threads that copy values out of shared memory, where a machine has cores to spare: one core
    copies 4 to 10 GB/s. They are made when there is much to copy, and end with `close`.

    Args:
        count: the threads; 0: the caller copies; None: what the machine is good for.
        least_bytes: the caller copies fewer: a thread would have to wake up first.
    """

    def __init__(self, count: int | None = None, least_bytes: int = 2 * 2**20) -> None:
        if count is None:
            count = min(MAX_COPIER_COUNT, usable_core_count() // CORES_PER_COPIER)
            count = count if count > 1 else 0
        self._count = count
        self._least_bytes = least_bytes
        self._threads: ThreadPoolExecutor | None = None

    def begin(self, shared: Sequence[Shared]) -> Future[list[bool]] | None:
        """Begin `sequence_locks.copied`; None: the caller copies, because a thread is not worth
        it, or none takes it.
        """
        if not self._count or sum(each.target.nbytes for each in shared) < self._least_bytes:
            return None
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._count, "pushpull-copier")
        return submitted(self._threads, partial(sequence_locks.copied, shared))

    def close(self) -> None:
        """End the threads, when they have copied what was begun; a later copy makes new ones."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
