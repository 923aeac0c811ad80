"""The server's end of the same-host lane: a Unix socket on which sessions and server share memory.

A session that can connect is on this host. It shows the nonce that OpenSession gave it, hands over
the segments that its pushes will name, and gets those that its pulls are answered from. Payloads
never travel here, only file descriptors.

Rules:
    - The socket has a name in the abstract namespace: no end of the server leaves it behind.
    - A session's segments are unmapped when its connection ends; the kernel ends a killed one's.
    - A connection with a wrong message gets the error and is closed; nobody else notices.

Everything belongs to the event loop; nothing here blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
from dataclasses import dataclass, field
from functools import partial

from google.protobuf.message import DecodeError

from ps_core import limits
from ps_core.cluster_view import Session
from ps_core.errors import (
    InvalidConfig,
    InvalidTensor,
    Overloaded,
    PushpullError,
    Recovering,
    Unauthenticated,
)
from ps_core.keys import Incarnation
from ps_runtime.grpc import errors
from ps_runtime.observe import logs
from ps_runtime.system.shared_memory import Bytes, SharedSegment, map_segment, receive
from ps_server.lane.answer_ring import CAN_SHARE, AnswerRing
from pushpull.v1 import parameters_pb2

_NONCE_BYTES = 16
_MESSAGE_BYTES = 4096
_BACKLOG_COUNT = 128
_ACCEPT_PAUSE_S = 1.0
"""The pause after a connection that could not be accepted; it stays in the queue."""


@dataclass(slots=True, eq=False)
class _Connection:
    """One connection; `incarnation` is None before its hello."""

    socket: socket.socket
    incarnation: Incarnation | None = None
    segments: dict[int, Bytes] = field(default_factory=dict)
    shared_ids: set[int] = field(default_factory=set)
    withdrawn: list[int] = field(default_factory=list)
    answers: AnswerRing | None = None
    is_reserving: bool = False

    @property
    def shared_words(self) -> str:
        return f"this session shares {', '.join(map(str, self.segments)) or 'none'}"


class SharedLanes:
    """The socket, and its sessions."""

    def __init__(self) -> None:
        self._name = f"pushpull-{secrets.token_hex(16)}"
        self._listener: socket.socket | None = None
        self._nonces: dict[Incarnation, bytes] = {}
        self._sessions: dict[bytes, Incarnation] = {}
        self._connections: dict[Incarnation, _Connection] = {}
        self.shared_ids: dict[Incarnation, set[int]] = {}
        """The segments that each session has, for who asks in each pull."""
        self._strangers: dict[_Connection, asyncio.TimerHandle] = {}
        self._last_ids: dict[Incarnation, int] = {}
        self._numbers = itertools.count(1)

    def open(self) -> None:
        """Listen; OSError if the system has no such sockets."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(f"\0{self._name}")
            listener.listen(_BACKLOG_COUNT)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._listen()

    def close(self) -> None:
        """End every connection. Idempotent."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for connection in [*self._connections.values(), *self._strangers]:
            self._end(connection)

    @property
    def is_open(self) -> bool:
        return self._listener is not None

    @property
    def session_count(self) -> int:
        """Sessions that share memory with this server."""
        return len(self._connections)

    def offer(self, session: Session) -> parameters_pb2.SameHostOffer | None:
        """The offer by which a session connects; None if the socket is closed."""
        if self._listener is None:
            return None
        nonce = self._nonces.setdefault(session.incarnation, secrets.token_bytes(_NONCE_BYTES))
        self._sessions[nonce] = session.incarnation
        return parameters_pb2.SameHostOffer(socket_name=self._name, nonce=nonce)

    def forget(self, incarnation: Incarnation) -> None:
        """Forget a session that left the cluster."""
        nonce = self._nonces.pop(incarnation, None)
        if nonce is not None:
            del self._sessions[nonce]
        self._last_ids.pop(incarnation, None)
        connection = self._connections.get(incarnation)
        if connection is not None:
            self._end(connection)

    # --- what sessions share

    def payload(self, incarnation: Incarnation, shared: parameters_pb2.SharedPayload) -> memoryview:
        """A pushed payload where its sender shares it. The sender can change it at any moment."""
        connection = self._connections.get(incarnation)
        if connection is None:
            raise Recovering(
                "a payload in shared memory came without a connection on the server's Unix socket: "
                "send the payload itself"
            )
        segment = connection.segments.get(shared.segment_id)
        if segment is None:
            if shared.segment_id <= self._last_ids.get(incarnation, 0):
                raise Recovering(  # of a connection before this one, on a stream that outlived it
                    f"a payload lies in segment {shared.segment_id}, which is shared no more: "
                    "send the payload itself"
                )
            raise InvalidTensor(
                f"a payload lies in segment {shared.segment_id}, which is not shared; "
                f"{connection.shared_words}"
            )
        begin, end = shared.offset_bytes, shared.offset_bytes + shared.byte_count
        if end > segment.nbytes or begin % limits.LANE_ALIGNMENT_BYTES:
            raise InvalidTensor(
                f"a payload lies at bytes [{begin}, {end}) of segment {shared.segment_id}; "
                f"expected a beginning at a multiple of {limits.LANE_ALIGNMENT_BYTES} and an end "
                f"of at most {segment.nbytes}"
            )
        return segment[begin:end].data

    def share(self, incarnation: Incarnation, segment_id: int, segment: SharedSegment) -> bool:
        """Share a segment with a session: True if it has the descriptor, or gets it now."""
        connection = self._connections.get(incarnation)
        if connection is None:
            return False
        if segment_id in connection.shared_ids:
            return True
        shared = parameters_pb2.SharedSegment(segment_id=segment_id, byte_count=segment.byte_count)
        if not self._send(connection, parameters_pb2.LaneResponse(segment=shared), segment.fd):
            return False
        connection.shared_ids.add(segment_id)
        return True

    def withdraw(self, segment_id: int) -> None:
        """Withdraw a segment that no answer will name any more: sessions may unmap it. A session
        that does not read its messages is told with the next one.
        """
        for connection in self._connections.values():
            if segment_id in connection.shared_ids:
                connection.shared_ids.discard(segment_id)
                connection.withdrawn.append(segment_id)
            while connection.withdrawn:
                dropped = parameters_pb2.SegmentDropped(segment_id=connection.withdrawn[0])
                if not self._send(connection, parameters_pb2.LaneResponse(dropped=dropped)):
                    break
                del connection.withdrawn[0]

    def next_segment_id(self) -> int:
        """A number for a segment of this server, above all before."""
        return next(self._numbers)

    def answers(self, incarnation: Incarnation) -> AnswerRing | None:
        """The memory for rows that a session pulls, which it has the descriptor of. None: it has no
        connection, or the memory is only being reserved.
        """
        connection = self._connections.get(incarnation)
        if connection is None or not CAN_SHARE:
            return None
        ring = connection.answers
        if ring is None:
            if not connection.is_reserving:
                connection.is_reserving = True
                number = self.next_segment_id()
                reserving = asyncio.get_running_loop().run_in_executor(None, AnswerRing, number)
                reserving.add_done_callback(partial(self._reserved, connection))
            return None
        return ring if self.share(incarnation, ring.segment_id, ring.segment) else None

    @staticmethod
    def _reserved(connection: _Connection, reserving: asyncio.Future[AnswerRing]) -> None:
        if reserving.cancelled():
            return
        problem = reserving.exception()
        if problem is not None:
            logs.warning("rows_not_shared", error=str(problem))
        elif connection.socket.fileno() < 0:
            reserving.result().close()
        else:
            connection.answers = reserving.result()

    # --- connections

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        if self._listener is None:
            return
        loop = asyncio.get_running_loop()
        try:
            stranger, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptors left: waiting sessions use the other lane
            logs.warning("lane_not_accepted", error=str(error))
            loop.remove_reader(self._listener.fileno())
            loop.call_later(_ACCEPT_PAUSE_S, self._listen)
            return
        stranger.setblocking(False)
        if len(self._strangers) >= limits.MAX_LANE_STRANGER_COUNT:
            stranger.close()
            return
        connection = _Connection(stranger)
        timer = loop.call_later(limits.STREAM_HEADER_DEADLINE_S, self._end, connection)
        self._strangers[connection] = timer
        loop.add_reader(stranger.fileno(), self._read, connection)

    def _end(self, connection: _Connection) -> None:
        if connection.socket.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(connection.socket.fileno())
        self._known(connection)
        connection.socket.close()
        connection.segments.clear()
        if connection.answers is not None:
            connection.answers.close()
            connection.answers = None
        incarnation = connection.incarnation
        if incarnation is not None and self._connections.get(incarnation) is connection:
            del self._connections[incarnation], self.shared_ids[incarnation]

    def _known(self, connection: _Connection) -> None:
        timer = self._strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def _read(self, connection: _Connection) -> None:
        descriptor = -1
        try:
            # A stranger's descriptor is not taken: closing some kinds of file blocks.
            message, descriptor = receive(
                connection.socket, _MESSAGE_BYTES, takes_file=connection.incarnation is not None
            )
            if not message:
                self._end(connection)
                return
            answer = self._answer(connection, message, descriptor)
        except (BlockingIOError, InterruptedError):
            return
        except PushpullError as error:
            logs.warning("lane_refused", error=error.message)
            self._send(connection, parameters_pb2.LaneResponse(error=errors.error_to_proto(error)))
            self._end(connection)
            return
        except OSError:
            self._end(connection)
            return
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if answer is not None and not self._send(connection, answer):
            self._end(connection)

    def _answer(
        self, connection: _Connection, message: bytes, descriptor: int
    ) -> parameters_pb2.LaneResponse | None:
        try:
            request = parameters_pb2.LaneRequest.FromString(message)
        except DecodeError:
            raise InvalidConfig("a message on the Unix socket is no LaneRequest") from None
        if connection.incarnation is None:
            return self._welcome(connection, request)
        if request.HasField("dropped"):
            segment_id = request.dropped.segment_id
            if connection.segments.pop(segment_id, None) is None:
                raise InvalidConfig(
                    f"segment {segment_id} is dropped, which is not shared; "
                    f"{connection.shared_words}"
                )
            return None
        if not request.HasField("segment"):
            raise InvalidConfig("a message on the Unix socket holds no segment; expected one")
        if descriptor < 0:
            raise InvalidConfig("a shared segment came without its file descriptor")
        self._map(connection, connection.incarnation, request.segment, descriptor)
        mapped = parameters_pb2.SegmentMapped(segment_id=request.segment.segment_id)
        return parameters_pb2.LaneResponse(mapped=mapped)

    def _welcome(
        self, connection: _Connection, request: parameters_pb2.LaneRequest
    ) -> parameters_pb2.LaneResponse:
        incarnation = self._sessions.get(request.hello.nonce)
        if incarnation is None:
            raise Unauthenticated(
                "the nonce on the Unix socket is no session's; expected the one that OpenSession "
                "gave"
            )
        self._known(connection)
        older = self._connections.pop(incarnation, None)
        if older is not None:
            self._end(older)
        connection.incarnation = incarnation
        self._connections[incarnation] = connection
        self.shared_ids[incarnation] = connection.shared_ids
        return parameters_pb2.LaneResponse(welcome=parameters_pb2.LaneWelcome())

    def _map(
        self,
        connection: _Connection,
        incarnation: Incarnation,
        shared: parameters_pb2.SharedSegment,
        descriptor: int,
    ) -> None:
        last = self._last_ids.get(incarnation, 0)
        if shared.segment_id <= last:
            raise InvalidConfig(
                f"a shared segment has number {shared.segment_id}; expected one above {last}, the "
                "last of this session"
            )
        if len(connection.segments) >= limits.MAX_LANE_SEGMENT_COUNT:
            raise Overloaded(f"a session shares {limits.MAX_LANE_SEGMENT_COUNT} segments already")
        if shared.byte_count > limits.MAX_LANE_SEGMENT_BYTES:
            raise InvalidConfig(
                f"a shared segment has {shared.byte_count} bytes; expected at most "
                f"{limits.MAX_LANE_SEGMENT_BYTES}"
            )
        connection.segments[shared.segment_id] = map_segment(descriptor, shared.byte_count)
        self._last_ids[incarnation] = shared.segment_id

    @staticmethod
    def _send(
        connection: _Connection, message: parameters_pb2.LaneResponse, descriptor: int | None = None
    ) -> bool:
        descriptors = [] if descriptor is None else [descriptor]
        with contextlib.suppress(OSError):  # gone, or it does not read what it gets
            socket.send_fds(connection.socket, [message.SerializeToString()], descriptors)
            return True
        return False
