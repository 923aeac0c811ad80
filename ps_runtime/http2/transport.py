"""An HTTP/2 connection on an event loop: joins a `Http2Connection` to a socket.

Rules:
    - The inside of a large message is received into the message's memory; sent pieces go to the
      socket from their caller's memory.
    - A silent peer is pinged, and given up without an answer.

A transport belongs to the loop that it was connected on.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self, cast

from ps_runtime.grpc.channels import KEEPALIVE_TIME_S
from ps_runtime.http2.protocol import frames as wire
from ps_runtime.http2.protocol.bounds import Bounds
from ps_runtime.http2.protocol.connection import Http2Connection
from ps_runtime.http2.protocol.frames import ConnectionBroken
from ps_runtime.http2.protocol.memory import MessageMemory
from ps_runtime.http2.protocol.streams import MessagePiece, ServerReceiver, Stream

_WRITE_BUFFER_BYTES = 4 * 1024 * 1024
"""Bytes that wait for the socket before callers wait, too."""

_SAME_HOST_SEND_BYTES = 512 * 1024
"""The kernel's send buffer of a connection within one machine; measured in ADR 0022."""

_ANSWER_S = 20.0
"""A peer's time to answer a ping: its loop may be held up, unlike gRPC's threads."""

_LATE_S = 1.0
"""A timer that is later was held up with the loop: bytes that came meanwhile are still unread."""

_LINGER_S = 1.0
"""Time for written bytes to leave when a connection breaks."""

_PING = b"pushpull"


class Http2Transport(asyncio.BufferedProtocol):
    """One connection; the protocol of an asyncio transport. `on_lost` is called once, when it has
    ended; the rest is as in `Http2Connection`.
    """

    def __init__(
        self,
        bounds: Bounds,
        accept: Callable[[], ServerReceiver] | None = None,
        on_lost: Callable[[Http2Transport], None] | None = None,
        memory: MessageMemory | None = None,
    ) -> None:
        self.connection = Http2Connection(bounds, accept, memory)
        self.is_open = False
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._is_unwanted = False
        self._look_at_s = 0.0
        self._can_write = True
        self._waiting: set[asyncio.Event] = set()
        self._has_heard = False
        self._has_asked = False
        self._timer: asyncio.TimerHandle | None = None

    # --- for calls

    async def send(
        self, stream: Stream, pieces: Sequence[MessagePiece], writable: asyncio.Event
    ) -> None:
        """Send one message; its bytes must not change until the peer has them.

        `writable` is the event that the stream's `on_writable` sets, as does its end.

        Blocking: while the peer, or the socket, takes no more, and the stream has not ended.
        """
        while not self._can_write and not stream.has_ended:
            writable.clear()
            self._waiting.add(writable)
            await writable.wait()
        writable.clear()
        has_left = self.connection.output.message(stream, pieces)
        self.flush()
        if not has_left:
            await writable.wait()

    def consumed(self, stream: Stream, message: MessagePiece) -> None:
        """The receiver has taken a message."""
        self.connection.consumed(stream, message)
        if self.connection.output.pieces:
            self.flush()

    def go_away(self) -> None:
        """Accept no more calls; open ones go on."""
        self.connection.go_away()
        self.flush()

    def flush(self) -> None:
        """Write the output, at once or when the socket takes more."""
        if self._transport is not None and self.is_open and self._can_write:
            pieces = self.connection.output.take()
            if pieces:
                self._transport.writelines(pieces)

    def close(self) -> None:
        """End the connection after its output; open calls end now."""
        self._is_unwanted = True
        self._give_up("the connection was closed")

    # --- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self.is_open = True
        if self._is_unwanted:
            self._transport.close()
            return
        _keep_in_cache(self._transport)
        self.flush()
        self._look_in(KEEPALIVE_TIME_S)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's name
        return self.connection.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._has_heard = True
        try:
            self.connection.received(nbytes)
        except ConnectionBroken as failure:
            self._give_up(f"the connection broke: {failure}")
            return
        if self.connection.output.pieces:
            self.flush()

    def pause_writing(self) -> None:
        self._can_write = False

    def resume_writing(self) -> None:
        self._can_write = True
        self.flush()
        waiting, self._waiting = self._waiting, set()
        for writable in waiting:
            writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        self.connection.broken(f"the connection was lost: {exc or 'it was closed'}")
        if self._on_lost is not None:
            self._on_lost(self)

    # --- signs of life

    def _look_in(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._look_at_s = loop.time() + wait_s
        self._timer = loop.call_at(self._look_at_s, self._look)

    def _look(self) -> None:
        if asyncio.get_running_loop().time() - self._look_at_s > _LATE_S:
            self._look_in(KEEPALIVE_TIME_S)
            return
        if self._has_asked and not self._has_heard:
            self._give_up("the peer gives no sign of life")
            return
        self._has_asked = not self._has_heard
        if self._has_asked:
            self.connection.output.pieces.append(wire.ping(_PING, is_ack=False))
            self.flush()
        self._has_heard = False
        self.connection.renew()
        self._look_in(_ANSWER_S if self._has_asked else KEEPALIVE_TIME_S)

    def _give_up(self, text: str) -> None:
        self._can_write = True
        self.flush()
        self.connection.broken(text)
        if self._transport is not None:
            self._transport.close()
            asyncio.get_running_loop().call_later(_LINGER_S, self._transport.abort)


class CallEnd:
    """One end of a call: its messages that came, and its wait to send."""

    _stream: Stream

    def __init__(self, transport: Http2Transport) -> None:
        self._transport = transport
        self._messages: deque[MessagePiece] = deque()
        self._came = asyncio.Event()
        self._writable = asyncio.Event()
        self._is_done = False
        self._timer: asyncio.TimerHandle | None = None

    def on_message(self, message: MessagePiece) -> None:
        self._messages.append(message)
        self._came.set()

    def on_writable(self) -> None:
        self._writable.set()

    def __aiter__(self) -> Self:
        return self

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _keep_in_cache(transport: asyncio.Transport) -> None:
    """On one machine, let the kernel hold no more than the processor's caches, so that bytes are
    received before they leave the caches. Between machines the kernel's choice is better.
    """
    own, peer = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
    made = transport.get_extra_info("socket")
    if made is not None and own and peer and own[0] == peer[0]:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SAME_HOST_SEND_BYTES)
