"""Ends of HTTP/2 connections without a network: what they heard, a fake link, and raw frames."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import hpack
import pytest

from ps_runtime.http2.protocol import frames as wire
from ps_runtime.http2.protocol.bounds import Bounds
from ps_runtime.http2.protocol.connection import Http2Connection
from ps_runtime.http2.protocol.frames import ConnectionBroken, ErrorCode, Flag, FrameHead, FrameType
from ps_runtime.http2.protocol.streams import Fields, MessagePiece, Stream

BOUNDS = Bounds(max_message_bytes=100_000, window_bytes=300_000, stream_count=4)
REQUEST: Fields = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/s/m"),
    (b":authority", b"here"),
)
ANSWER: Fields = ((b":status", b"200"),)
TRAILERS: Fields = ((b"grpc-status", b"0"),)
OPENING = wire.settings({})
BLOCK = hpack.Encoder().encode(list(REQUEST))
LARGE = bytes(range(256)) * 390  # nearly BOUNDS.max_message_bytes


@dataclass(eq=False)
class Heard:
    """A receiver that remembers all, in order."""

    stream: Stream | None = None
    fields: list[Fields] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)
    pieces: list[MessagePiece] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    broken: list[tuple[int | None, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def opened(self) -> Stream:
        assert self.stream is not None
        return self.stream

    def on_open(self, stream: Stream, fields: Fields) -> None:
        self.stream = stream
        self.on_fields(fields)

    def on_fields(self, fields: Fields) -> None:
        self.calls.append("fields")
        self.fields.append(tuple(fields))

    def on_message(self, message: MessagePiece) -> None:
        self.calls.append("message")
        self.messages.append(bytes(message))
        self.pieces.append(message)

    def on_unreadable(self, problem: str) -> None:
        self.calls.append("unreadable")
        self.problems.append(problem)

    def on_end(self) -> None:
        self.calls.append("end")

    def on_broken(self, code: int | None, text: str) -> None:
        self.calls.append("broken")
        self.broken.append((code, text))

    def on_writable(self) -> None:
        self.calls.append("writable")


class Server:
    """A server's machine, and what it heard of each stream that was opened."""

    def __init__(self, bounds: Bounds = BOUNDS) -> None:
        self.heard: list[Heard] = []
        self.connection = Http2Connection(bounds, self.accept)

    def accept(self) -> Heard:
        self.heard.append(Heard())
        return self.heard[-1]


class Pair:
    """A client's machine and a server's, joined by a link that loses nothing."""

    def __init__(self, bounds: Bounds = BOUNDS) -> None:
        self.client = Http2Connection(bounds)
        self.server = Server(bounds)
        self.carry()

    def carry(self) -> None:
        """Until nothing is on its way."""
        while carry(self.client, self.server.connection) + carry(
            self.server.connection, self.client
        ):
            pass

    def open(self, heard: Heard | None = None) -> tuple[Stream, Heard, Heard]:
        """A call: the client's stream, what the client hears, and what the server hears."""
        at_client = heard or Heard()
        stream = self.client.open(REQUEST, at_client)
        at_client.stream = stream
        self.carry()
        return stream, at_client, self.server.heard[-1]


class Raw:
    """A server's machine and a client of single frames."""

    def __init__(self, bounds: Bounds = BOUNDS) -> None:
        self.server = Server(bounds)
        self.connection = self.server.connection
        feed(self.connection, wire.PREFACE + OPENING)
        taken(self.connection)
        self._encoder = hpack.Encoder()

    def open(self, stream_id: int = 1, flags: int = 0) -> Heard:
        block = self._encoder.encode(list(REQUEST))
        self.feed(wire.frame(FrameType.HEADERS, Flag.END_HEADERS | flags, stream_id, block))
        return self.server.heard[-1]

    def feed(self, raw: bytes) -> None:
        feed(self.connection, raw)

    def broken_by(self, raw: bytes) -> ErrorCode:
        """The code of the GOAWAY that `raw` is answered with."""
        with pytest.raises(ConnectionBroken) as caught:
            self.feed(raw)
        *_, (head, payload) = frames_of(taken(self.connection))
        assert head.kind == FrameType.GOAWAY
        assert int.from_bytes(payload[4:8]) == caught.value.code
        return caught.value.code


def taken(connection: Http2Connection) -> bytes:
    """What an end wants to send."""
    return b"".join(connection.output.take())


def carry(source: Http2Connection, target: Http2Connection) -> int:
    """All that `source` wants to send; how many bytes that were."""
    raw = taken(source)
    feed(target, raw)
    return len(raw)


def feed(connection: Http2Connection, raw: bytes, steps: Iterable[int] = ()) -> None:
    """Let bytes come in, `steps` at a time while there are any, then as many as the buffer takes.

    A buffer is never empty.
    """
    rest, sizes = memoryview(raw), itertools.chain(steps, itertools.repeat(1 << 30))
    while len(rest):
        buffer = connection.buffer()
        assert len(buffer) > 0
        count = min(len(buffer), len(rest), next(sizes))
        buffer[:count] = rest[:count]
        rest = rest[count:]
        connection.received(count)


def frames_of(raw: bytes) -> Iterator[tuple[FrameHead, bytes]]:
    """The frames of what an end sent; a client's preface is passed over."""
    raw = raw.removeprefix(wire.PREFACE)
    at = 0
    while at < len(raw):
        head = wire.read_head(memoryview(raw), at)
        at += wire.FRAME_HEAD_BYTES + head.length
        yield head, raw[at - head.length : at]
    assert at == len(raw)


def kinds_of(raw: bytes) -> list[str]:
    """The names of the frames of what an end sent."""
    return [FrameType(head.kind).name for head, _ in frames_of(raw)]


def whole(message: bytes, flag: int = 0) -> bytes:
    """A message behind its prefix."""
    return bytes((flag,)) + wire.prefix(len(message))[1:] + message


def body(stream_id: int, content: bytes, flags: int = 0, padding: int | None = None) -> bytes:
    """A DATA frame."""
    if padding is not None:
        flags |= wire.Flag.PADDED
        content = bytes((padding,)) + content + bytes(padding)
    return wire.frame(FrameType.DATA, flags, stream_id, content)


def check_credits(connection: Http2Connection) -> None:
    """Nothing of a window leaked: what may come, what is held, what is to be given back."""
    bounds = connection._bounds
    held = sum(stream.unconsumed for stream in connection.streams.values())
    assert connection._window + connection._credit + held == bounds.connection_window_bytes
    assert 0 <= connection._credit * 2 < bounds.window_bytes
    for stream in connection.streams.values():
        if stream.is_deaf:
            continue
        parts = (stream.receive_window, stream.unconsumed, stream.credit)
        assert min(parts) >= 0
        assert sum(parts) == bounds.window_bytes
