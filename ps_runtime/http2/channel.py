"""gRPC's client side on an HTTP/2 of our own: calls to `ps_runtime.http2.server`, or to any gRPC
server with plain HTTP/2.

Callers serialize messages, in pieces, which are written from their memory; messages are received
into the memory where they are read. Failures are `grpc.aio.AioRpcError`, as those of `grpc.aio`.

A channel belongs to the loop that it was connected on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import grpc
import grpc.aio

from ps_core.limits import MAX_MESSAGE_BYTES
from ps_runtime.grpc.addresses import join_address
from ps_runtime.http2.protocol import grpc_fields
from ps_runtime.http2.protocol.bounds import Bounds
from ps_runtime.http2.protocol.frames import ErrorCode
from ps_runtime.http2.protocol.memory import MessageMemory
from ps_runtime.http2.protocol.streams import Fields, MessagePiece
from ps_runtime.http2.transport import CallEnd, Http2Transport
from ps_runtime.system.trimming import trim_often

_STATUS = {status.value[0]: status for status in grpc.StatusCode}
_OF_RESET: dict[int, grpc.StatusCode] = {
    ErrorCode.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.CANCEL: grpc.StatusCode.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_OF_HTTP = {
    b"404": grpc.StatusCode.UNIMPLEMENTED,
    b"429": grpc.StatusCode.UNAVAILABLE,
    b"502": grpc.StatusCode.UNAVAILABLE,
    b"503": grpc.StatusCode.UNAVAILABLE,
    b"504": grpc.StatusCode.UNAVAILABLE,
}


class _Failure(NamedTuple):
    """A call's failure. Each caller gets a new exception, because the traceback of a shared one
    would keep all their memory until the collector runs.
    """

    status: grpc.StatusCode
    text: str
    metadata: grpc_fields.Metadata = ()

    def error(self) -> grpc.aio.AioRpcError:
        trailing = grpc.aio.Metadata.from_tuple(self.metadata)
        return grpc.aio.AioRpcError(self.status, grpc.aio.Metadata(), trailing, details=self.text)


class StreamChannel:
    """A connection. Made by `connect`; a lost one does not come back."""

    def __init__(self, authority: str, transport: Http2Transport, memory: MessageMemory) -> None:
        self._authority = authority
        self._transport = transport
        self._trimming = trim_often(memory.trim)

    @classmethod
    async def connect(cls, host: str, port: int, deadline_s: float) -> StreamChannel:
        """Connect; raises OSError, TimeoutError among them, if no server answers."""
        loop = asyncio.get_running_loop()
        memory = MessageMemory()
        transport = Http2Transport(Bounds(MAX_MESSAGE_BYTES), memory=memory)
        try:
            async with asyncio.timeout(deadline_s):
                await loop.create_connection(lambda: transport, host, port)
        except BaseException:  # uvloop closes what was connected, and does not call connection_lost
            transport.connection_lost(None)
            raise
        return cls(join_address(host, port), transport, memory)

    @property
    def is_open(self) -> bool:
        """True if calls can be started."""
        return self._transport.is_open and not self._transport.connection.is_going_away

    def call(self, path: str, timeout_s: float | None = None) -> StreamCall:
        """Start a call of the method `path`, "/service/method", which fails with DEADLINE_EXCEEDED
        after `timeout_s`; None: never. grpc.aio.AioRpcError if the connection takes no more calls.
        """
        if not self.is_open or not self._transport.connection.can_open:
            text = "the connection takes no more calls"
            raise _Failure(grpc.StatusCode.UNAVAILABLE, text).error()
        fields = grpc_fields.request_fields(path, self._authority, timeout_s)
        return StreamCall(self._transport, fields, timeout_s)

    async def unary(self, path: str, request: bytes, timeout_s: float) -> MessagePiece:
        """Send one message and return the one answer; grpc.aio.AioRpcError if the call failed."""
        call = self.call(path, timeout_s)
        try:
            await call.write((request,))
            call.done_writing()
            response: MessagePiece | None = None
            async for response in call:  # noqa: B007 - to its end, which has the status
                pass
        finally:
            call.cancel()
        if response is None:
            raise _Failure(grpc.StatusCode.INTERNAL, f"{path} gave no answer").error()
        return response

    def close(self) -> None:
        """End the connection; open calls fail."""
        self._trimming()
        self._transport.close()


class StreamCall(CallEnd):
    """One call: write, and iterate over the answers."""

    def __init__(self, transport: Http2Transport, fields: Fields, timeout_s: float | None) -> None:
        super().__init__(transport)
        self._failure: _Failure | None = None
        self._stream = transport.connection.open(fields, self)
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout_s, self._expire)

    # --- for the caller

    async def write(self, pieces: Sequence[MessagePiece]) -> None:
        """Send a message, in pieces that must not change until it is answered. Raises
        grpc.aio.AioRpcError if the call has failed. Blocking: while the peer takes no more.
        """
        if self._failure is not None:
            raise self._failure.error()
        await self._transport.send(self._stream, pieces, self._writable)
        if self._failure is not None:
            raise self._failure.error()

    def done_writing(self) -> None:
        """End the client's side of the stream."""
        self._transport.connection.end(self._stream)
        self._transport.flush()

    def cancel(self) -> None:
        """Give the call up, unless it has ended."""
        self._end(_Failure(grpc.StatusCode.CANCELLED, "the call was cancelled by its caller"))

    async def __anext__(self) -> MessagePiece:
        """The next message; raises grpc.aio.AioRpcError if the call has failed."""
        while not self._messages:
            if self._failure is not None:
                raise self._failure.error()
            if self._is_done:
                raise StopAsyncIteration
            self._came.clear()
            if self._transport.connection.output.pieces:
                self._transport.flush()  # the headers of a call that reads before it writes
            await self._came.wait()
        message = self._messages.popleft()
        self._transport.consumed(self._stream, message)
        return message

    # --- from the stream

    def on_fields(self, fields: Fields) -> None:
        found = dict(fields)
        ended = grpc_fields.read_trailers(fields)
        if ended is not None:
            number, text, metadata = ended
            status = _STATUS.get(number, grpc.StatusCode.UNKNOWN)
            is_ok = status is grpc.StatusCode.OK
            self._close(None if is_ok else _Failure(status, text, metadata))
        elif found.get(b":status", b"200") != b"200":
            http = found[b":status"]
            status = _OF_HTTP.get(http, grpc.StatusCode.UNKNOWN)
            self._end(_Failure(status, f"HTTP status {http.decode(errors='replace')}"))

    def on_unreadable(self, problem: str) -> None:
        """End the call with the problem."""
        is_large = "larger" in problem
        status = grpc.StatusCode
        self._end(_Failure(status.RESOURCE_EXHAUSTED if is_large else status.INTERNAL, problem))

    def on_end(self) -> None:
        """Fail unless trailers came before the server's end."""
        self._close(_Failure(grpc.StatusCode.INTERNAL, "the server ended without a status"))
        if not self._stream.has_ended:
            self._transport.connection.reset(self._stream, ErrorCode.NO_ERROR)

    def on_broken(self, code: int | None, text: str) -> None:
        """Fail: the server reset the stream, or the connection is gone."""
        status = grpc.StatusCode.UNAVAILABLE
        if code is not None:
            status = _OF_RESET.get(code, grpc.StatusCode.INTERNAL)
        self._end(_Failure(status, text))

    def _expire(self) -> None:
        self._end(_Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "the call's deadline has passed"))

    def _end(self, failure: _Failure) -> None:
        """Fail, and reset the stream, which a server that goes on has open."""
        self._transport.connection.reset(self._stream, ErrorCode.CANCEL)
        self._transport.flush()
        self._close(failure)

    def _close(self, failure: _Failure | None) -> None:
        if self._is_done:
            return
        self._is_done, self._failure = True, failure
        self._came.set()
        self._writable.set()
        self._stop_timer()
