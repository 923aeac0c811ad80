"""One stream of an HTTP/2 connection that carries gRPC messages: what comes in and what waits to
leave.

A large message is received where it will be read: memory of its size is taken when its length is
known, and the connection's owner receives the rest of it there. Nothing is copied but what came
together with the length.

Invariants:
    HST-1  Pieces leave in the order in which they were put, and what ends the stream leaves last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ps_runtime.http2.protocol import frames as wire
from ps_runtime.http2.protocol.memory import MessageMemory

Piece = bytes | memoryview
"""Of a message; a view is one of single bytes."""

Fields = Sequence[tuple[bytes, bytes]]
"""Header fields: names in lower case, and values."""


class Receiver(Protocol):
    """Who hears what comes on a stream."""

    def on_fields(self, fields: Fields) -> None:
        """Headers, or trailers."""

    def on_message(self, message: Piece) -> None:
        """A whole message, which nobody changes any more. `Connection.consumed` is owed for it."""

    def on_unreadable(self, problem: str) -> None:
        """A message is larger than the limit, or compressed; nothing more is heard."""

    def on_end(self) -> None:
        """The peer sends nothing more."""

    def on_broken(self, code: int | None, text: str) -> None:
        """The stream ended before its end: reset by the peer, with a code, or with the
        connection.
        """

    def on_room(self) -> None:
        """All that was sent has left, after some of it had to wait."""


class ServerReceiver(Receiver, Protocol):
    """Who hears a stream that a client opened."""

    def on_open(self, stream: Stream, fields: Fields) -> None:
        """First of all: the stream, and the request's headers."""


@dataclass(slots=True, eq=False)
class Assembly:
    """The message that is coming in."""

    max_bytes: int
    pool: MessageMemory
    head: bytearray = field(default_factory=bytearray)
    memory: memoryview | None = None
    filled: int = 0

    @property
    def has_begun(self) -> bool:
        """Whether some of a message has come, and not all."""
        return self.memory is not None or len(self.head) > 0

    def rest(self, most: int) -> memoryview | None:
        """Up to `most` bytes that the message still has to fill; None between messages."""
        return None if self.memory is None else self.memory[self.filled : self.filled + most]

    def take(self, view: memoryview) -> tuple[list[Piece], str]:
        """All bytes of `view`: the messages that they complete, and what is wrong with the next."""
        found: list[Piece] = []
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

    def advance(self, count: int) -> list[Piece]:
        """`count` bytes of the message more are in its memory; the message, if it is whole."""
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
        send_window: what the peer takes of this stream now.
        receive_window: what the peer may still send.
        unconsumed: what came and was not given back by `consumed`.
        credit: what was consumed and the peer does not know of yet.
        tail: trailers that leave behind all pieces; empty ends the stream without.
        is_deaf: what else comes is for nobody.
        had_to_wait: whether something waited for the peer's window, so that `on_room` is owed.
    """

    stream_id: int
    receiver: Receiver
    incoming: Assembly
    send_window: int
    receive_window: int
    unconsumed: int = 0
    credit: int = 0
    pieces: deque[Piece] = field(default_factory=deque)
    queued_bytes: int = 0
    tail: Fields | None = None
    has_ended: bool = False
    peer_has_ended: bool = False
    is_deaf: bool = False
    had_to_wait: bool = False

    def put(self, pieces: Iterable[Piece]) -> None:
        """Queue what is to leave."""
        for piece in pieces:
            if len(piece):
                self.pieces.append(piece)
                self.queued_bytes += len(piece)

    def next_pieces(self, count: int) -> list[Piece]:
        """The next `count` bytes of the queue, cut where they have to be."""
        leaving: list[Piece] = []
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
        """Nothing more goes either way."""
        self.has_ended = self.peer_has_ended = self.is_deaf = True
        self.tail = ()
        self.pieces.clear()
        self.queued_bytes = 0
        self.incoming.memory = None
