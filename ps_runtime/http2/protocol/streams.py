"""One stream of an HTTP/2 connection with gRPC messages: incoming messages, and outgoing pieces.

A large message is received into its own memory, which is taken when its length is known. Only the
bytes that came together with the length are copied.

Invariants:
    HST-1  Pieces leave in the order in which they were put, and the stream's end leaves last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ps_runtime.http2.protocol import frames as wire
from ps_runtime.http2.protocol.memory import MessageMemory

MessagePiece = bytes | memoryview
"""A piece of a message; a view is one of single bytes."""

Fields = Sequence[tuple[bytes, bytes]]
"""Header fields: names in lower case, and values."""


class Receiver(Protocol):
    """Gets the events of a stream.

    Attributes:
        on_fields: headers, or trailers.
        on_message: a whole message, which does not change any more. The receiver owes
            `Http2Connection.consumed` for it.
        on_unreadable: a message is larger than the limit, or compressed; no event follows.
        on_end: the peer has ended its side.
        on_broken: the stream broke: the peer reset it, with a code, or the connection is gone.
        on_writable: all sent pieces have left, after some had to wait.
    """

    def on_fields(self, fields: Fields) -> None: ...
    def on_message(self, message: MessagePiece) -> None: ...
    def on_unreadable(self, problem: str) -> None: ...
    def on_end(self) -> None: ...
    def on_broken(self, code: int | None, text: str) -> None: ...
    def on_writable(self) -> None: ...


class ServerReceiver(Receiver, Protocol):
    """Gets the events of a stream that a client opened: first `on_open`, with the headers."""

    def on_open(self, stream: Stream, fields: Fields) -> None: ...


@dataclass(slots=True, eq=False)
class Assembly:
    """The incoming message of a stream."""

    max_bytes: int
    pool: MessageMemory
    head: bytearray = field(default_factory=bytearray)
    memory: memoryview | None = None
    filled: int = 0

    @property
    def has_begun(self) -> bool:
        """True inside of a message."""
        return self.memory is not None or len(self.head) > 0

    def rest(self, most: int) -> memoryview | None:
        """Up to `most` bytes of memory that the message has to fill; None between messages."""
        return None if self.memory is None else self.memory[self.filled : self.filled + most]

    def take(self, view: memoryview) -> tuple[list[MessagePiece], str]:
        """Take all of `view`: the messages it completes, and the problem of the next, if any."""
        found: list[MessagePiece] = []
        at, end = 0, len(view)
        while at < end:
            if self.memory is not None:
                step = min(end - at, len(self.memory) - self.filled)
                self.memory[self.filled : self.filled + step] = view[at : at + step]
                at += step
                found += self.advance(step)
                continue
            if self.head or end - at < wire.PREFIX_BYTES:
                step = min(end - at, wire.PREFIX_BYTES - len(self.head))
                self.head += view[at : at + step]
                at += step
                if len(self.head) < wire.PREFIX_BYTES:
                    break
                flag, length = wire.read_prefix(self.head)
                self.head.clear()
            else:
                flag, length = wire.read_prefix(view, at)
                at += wire.PREFIX_BYTES
            if flag or length > self.max_bytes:
                return found, _problem(flag, length, self.max_bytes)
            if length <= end - at:
                found.append(bytes(view[at : at + length]))
                at += length
            else:
                self.memory, self.filled = self.pool.take(length), 0
        return found, ""

    def advance(self, count: int) -> list[MessagePiece]:
        """Count bytes that came into the message's memory; returns the message if it is whole."""
        self.filled += count
        if self.memory is None or self.filled < len(self.memory):
            return []
        message, self.memory = self.memory, None
        return [message.toreadonly()]


def _problem(flag: int, length: int, max_bytes: int) -> str:
    if flag:
        return f"a message has the flag {flag}; compression is not supported"
    return f"a message of {length} bytes is larger than max ({max_bytes})"


@dataclass(slots=True, eq=False)
class Stream:
    """One stream.

    Attributes:
        send_window: bytes that the peer takes of this stream now.
        receive_window: bytes that the peer may still send.
        unconsumed: bytes that came and that `consumed` has not given back.
        credit: consumed bytes that the peer does not know of yet.
        tail: trailers, which leave after all pieces; empty: the stream ends without any.
        is_deaf: the receiver gets no more events.
        had_to_wait: some piece waited for the peer's window, so `on_writable` is due.
    """

    stream_id: int
    receiver: Receiver
    incoming: Assembly
    send_window: int
    receive_window: int
    unconsumed: int = 0
    credit: int = 0
    pieces: deque[MessagePiece] = field(default_factory=deque)
    queued_bytes: int = 0
    tail: Fields | None = None
    has_ended: bool = False
    peer_has_ended: bool = False
    is_deaf: bool = False
    had_to_wait: bool = False

    def put(self, pieces: Iterable[MessagePiece]) -> None:
        """Queue outgoing pieces."""
        for piece in pieces:
            if len(piece):
                self.pieces.append(piece)
                self.queued_bytes += len(piece)

    def next_pieces(self, count: int) -> list[MessagePiece]:
        """The next `count` bytes of the queue; the last piece may be cut."""
        leaving: list[MessagePiece] = []
        self.queued_bytes -= count
        while count:
            piece = self.pieces.popleft()
            if len(piece) > count:
                view = memoryview(piece)
                self.pieces.appendleft(view[count:])
                piece = view[:count]
            leaving.append(piece)
            count -= len(piece)
        return leaving

    def close(self) -> None:
        """End both sides."""
        self.has_ended = self.peer_has_ended = self.is_deaf = True
        self.tail = ()
        self.pieces.clear()
        self.queued_bytes = 0
        self.incoming.memory = None
