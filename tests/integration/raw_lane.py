"""The plainest client of a server's Unix socket: messages and descriptors sent by hand."""

from __future__ import annotations

import os
import socket
from types import TracebackType
from typing import Any, Self

import numpy as np

from ps_runtime.system.shared_memory import Bytes, SharedSegment, map_segment, receive
from pushpull.v1 import parameters_pb2
from tests.integration.raw_wire import DEADLINE_S, RawWorker, Wire

Request = parameters_pb2.LaneRequest
_MESSAGE_BYTES = 65_536


def offer_of(wire: Wire, who: RawWorker, node_id: int) -> parameters_pb2.SameHostOffer:
    """What a server tells a session about its socket."""
    request = parameters_pb2.OpenSessionRequest(session=who.session)
    answer = wire.servers[node_id].OpenSession(request, timeout=DEADLINE_S)
    assert answer.HasField("same_host")
    assert len(answer.same_host.nonce) == 16
    offer: parameters_pb2.SameHostOffer = answer.same_host
    return offer


def connected(offer: parameters_pb2.SameHostOffer) -> socket.socket:
    """A connection on which nothing was said yet."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.connect(f"\0{offer.socket_name}")
    made.settimeout(DEADLINE_S)
    return made


class RawLane:
    """One connection; a context manager. What the server lends is kept in `lent`."""

    def __init__(self, offer: parameters_pb2.SameHostOffer) -> None:
        self.offer = offer
        self.socket = connected(offer)
        self.lent: dict[int, Bytes] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.socket.close()

    def send(self, message: bytes | Request, *descriptors: int) -> None:
        """One message, with descriptors beside it."""
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        socket.send_fds(self.socket, [raw], descriptors)

    def receive(self) -> Any:
        """The server's next message, its segment mapped; None at the connection's end."""
        try:
            raw, descriptor = receive(self.socket, _MESSAGE_BYTES, takes_file=True)
        except ConnectionResetError:
            return None
        if not raw:
            return None
        response = parameters_pb2.LaneResponse.FromString(raw)
        if response.HasField("segment"):
            shared = response.segment
            assert descriptor >= 0
            self.lent[shared.segment_id] = map_segment(descriptor, shared.byte_count)
        if descriptor >= 0:
            os.close(descriptor)
        return response

    def hello(self) -> Self:
        """Say who it is, and be welcome."""
        self.send(Request(hello=parameters_pb2.LaneHello(nonce=self.offer.nonce)))
        assert self.receive().HasField("welcome")
        return self

    def share(self, segment_id: int, content: bytes) -> SharedSegment:
        """Share a segment that begins with `content`, and is as long."""
        made = SharedSegment("raw-lane", len(content))
        made.array[:] = np.frombuffer(content, np.uint8)
        self.send(segment(segment_id, made.byte_count), made.fd)
        assert self.receive().mapped.segment_id == segment_id
        return made


def segment(segment_id: int, byte_count: int) -> Request:
    """The message that shares a segment, whose descriptor goes beside it."""
    shared = parameters_pb2.SharedSegment(segment_id=segment_id, byte_count=byte_count)
    return Request(segment=shared)


def dropped(segment_id: int) -> Request:
    """The message that gives a segment up."""
    return Request(dropped=parameters_pb2.SegmentDropped(segment_id=segment_id))
