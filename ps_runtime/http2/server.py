"""gRPC's server side on an HTTP/2 of our own: the methods that move parameters, on their own port.

It serves the same handlers as `grpc.aio`, to any gRPC client; `ps_runtime.http2.channel` gains
most by it. Messages are received into the memory where they are read, on the thread that handles
them. There is no compression (the answer is UNIMPLEMENTED, as gRPC demands) and no encryption.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ps_core.errors import Internal, InvalidConfig, InvalidTensor, PushpullError
from ps_core.limits import MAX_MESSAGE_BYTES, MAX_STREAM_CONNECTION_COUNT
from ps_runtime.grpc.addresses import listening, split_address
from ps_runtime.grpc.errors import abort
from ps_runtime.http2.protocol import grpc_fields
from ps_runtime.http2.protocol.bounds import Bounds
from ps_runtime.http2.protocol.frames import ErrorCode
from ps_runtime.http2.protocol.memory import MessageMemory
from ps_runtime.http2.protocol.streams import Fields, MessagePiece, Stream
from ps_runtime.http2.transport import CallEnd, Http2Transport
from ps_runtime.observe import logs
from ps_runtime.system.trimming import trim_often

Handlers = Mapping[str, "grpc.RpcMethodHandler[Any, Any]"]
"""Handlers by the method's name."""

_HEADERS: Fields = ((b":status", b"200"), grpc_fields.CONTENT_TYPE)
_NO_GRPC: Fields = ((b":status", b"415"),)

_CLEANUP_S = 1.0
"""Time for cut methods to end."""


class StreamServer:
    """A listening port. Made by `start`."""

    def __init__(self, handlers: Handlers) -> None:
        self.port = 0
        self.handlers = handlers
        self._server: asyncio.Server | None = None
        self._is_stopping = False
        self._connections: set[Http2Transport] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._memory = MessageMemory()
        self._end_trimming: Callable[[], None] | None = None

    @classmethod
    async def start(cls, listen: str, services: Mapping[str, Handlers]) -> StreamServer:
        """Bind "host:port" (port 0: a free one), or raise InvalidConfig, and answer calls.
        `services` has the methods by the service's full name.
        """
        server = cls(
            {
                f"/{service}/{name}": handler
                for service, handlers in services.items()
                for name, handler in handlers.items()
            }
        )
        host, port = split_address(listen, "stream_listen")
        loop = asyncio.get_running_loop()
        try:
            server._server = await loop.create_server(server._connected, **listening(host, port))
        except (OSError, UnicodeError) as error:
            raise InvalidConfig(
                f"stream_listen is '{listen}', which cannot be bound: {error}"
            ) from error
        server._end_trimming = trim_often(server._memory.trim)
        server.port = server._server.sockets[0].getsockname()[1]
        return server

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new, let calls end within `grace_s`, then cut them. Idempotent. Blocking:
        up to `grace_s` and a little.
        """
        self._is_stopping = True
        if self._end_trimming is not None:
            self._end_trimming()
        if self._server is not None:
            self._server.close()
        for transport in list(self._connections):
            transport.go_away()
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=grace_s)
        for transport in list(self._connections):
            transport.close()
        if self._calls:  # cut calls are cancelled, and clean up
            await asyncio.wait(set(self._calls), timeout=_CLEANUP_S)

    def begin(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a call as a task."""
        task = asyncio.get_running_loop().create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    def _connected(self) -> Http2Transport:
        transport: Http2Transport

        def accept() -> _Call:
            return _Call(transport, self)

        lost = self._connections.discard
        transport = Http2Transport(Bounds(MAX_MESSAGE_BYTES), accept, lost, self._memory)
        self._connections.add(transport)
        if self._is_stopping or len(self._connections) > MAX_STREAM_CONNECTION_COUNT:
            transport.close()
        return transport


class _Call(CallEnd):
    """One call: requests of its stream, the context of its method, and its answer."""

    def __init__(self, transport: Http2Transport, server: StreamServer) -> None:
        super().__init__(transport)
        self._server = server
        self._has_all = False
        self._has_headers = False
        self._task: asyncio.Task[None] | None = None
        self._status: tuple[grpc.StatusCode, str, grpc_fields.Metadata] | None = None
        self._read: Any = None

    # --- from the stream

    def on_open(self, stream: Stream, fields: Fields) -> None:
        """Find the method, and start it."""
        self._stream = stream
        found = dict(fields)
        path = found.get(b":path", b"").decode(errors="replace")
        handler = self._server.handlers.get(path)
        if not found.get(b"content-type", b"").startswith(b"application/grpc"):
            self._is_done = self._has_headers = True
            self._transport.connection.end(stream, _NO_GRPC)
        elif handler is None:
            self._finish(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {path[:200]}")
        else:
            seconds = grpc_fields.timeout_s(found.get(b"grpc-timeout", b""))
            if seconds is not None:
                self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)
            self._read = handler.request_deserializer
            self._task = self._server.begin(self._run(path, handler))

    def on_fields(self, fields: Fields) -> None:
        """Ignore a client's trailers."""

    def on_unreadable(self, problem: str) -> None:
        """End the call with the problem."""
        is_large = "larger" in problem
        status = grpc.StatusCode
        self._fail(status.RESOURCE_EXHAUSTED if is_large else status.UNIMPLEMENTED, problem)

    def on_end(self) -> None:
        self._has_all = True
        self._came.set()

    def on_broken(self, code: int | None, text: str) -> None:  # noqa: ARG002 - a receiver's
        """End the call: the client is gone, or does not want the answer."""
        self._is_done = True
        self._cut(text)

    # --- the method's context (`grpc.aio.ServicerContext`)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        """End the call with a status."""
        self._status = (code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError("the call is aborted")

    def done(self) -> bool:
        """True if the client does not wait for an answer any more."""
        return self._is_done

    async def __anext__(self) -> Any:
        while not self._messages:
            if self._has_all:
                raise StopAsyncIteration
            self._came.clear()
            await self._came.wait()
        message = self._messages.popleft()
        self._transport.consumed(self._stream, message)
        return self._read(message)

    # --- the answer

    async def _run(self, path: str, handler: grpc.RpcMethodHandler[Any, Any]) -> None:
        status = grpc.StatusCode
        try:
            await self._answer(path, handler)
            self._finish(status.OK, "")
        except grpc.aio.AbortError:
            self._finish(*(self._status or (status.UNKNOWN, "", ())))
        except asyncio.CancelledError:
            if not self._is_done and self._stream.queued_bytes:
                # Unread answers would keep the status waiting.
                self._is_done = True
                self._transport.connection.reset(self._stream, ErrorCode.ENHANCE_YOUR_CALM)
                self._transport.flush()
            self._finish(status.CANCELLED, "the call was cancelled")
        except Exception as failure:  # noqa: BLE001 - a status for every failure
            # A refusal that nobody waits for is no failure: its client, or this server, is leaving.
            is_refusal = isinstance(failure, PushpullError) and not isinstance(failure, Internal)
            if not (self._is_done and is_refusal):
                logs.exception("call_failed", failure, method=path)
            self._finish(status.UNKNOWN, f"the method failed with {type(failure).__name__}")

    async def _answer(self, path: str, handler: grpc.RpcMethodHandler[Any, Any]) -> None:
        serialize: Any = handler.response_serializer
        given: Any = self if handler.request_streaming else await self._only_request(path)
        if not handler.response_streaming:
            unary: Any = handler.unary_unary or handler.stream_unary
            await self._send(serialize(await unary(given, self)))
            return
        streaming: Any = handler.unary_stream or handler.stream_stream
        async with contextlib.aclosing(streaming(given, self)) as responses:
            async for response in responses:
                # Memory leaves from where it is; grpcio's servers would have a copy.
                is_memory = isinstance(response, memoryview)
                await self._send(response if is_memory else serialize(response))

    async def _only_request(self, path: str) -> Any:
        try:
            async for request in self:
                return request
        except DecodeError as error:
            problem = InvalidTensor(f"the request of {path} does not parse: {error}")
            await abort(cast("grpc.aio.ServicerContext[Any, Any]", self), problem)
        return await self.abort(grpc.StatusCode.INTERNAL, f"{path} came without a request")

    async def _send(self, message: MessagePiece) -> None:
        if self._is_done:
            return
        if not self._has_headers:
            self._has_headers = True
            self._transport.connection.output.fields(self._stream, _HEADERS)
        await self._transport.send(self._stream, (message,), self._writable)

    def _finish(
        self, status: grpc.StatusCode, text: str, metadata: grpc_fields.Metadata = ()
    ) -> None:
        self._stop_timer()
        if self._is_done:
            return
        self._is_done = True
        trailers = grpc_fields.trailers(status.value[0], text, metadata)
        if not self._has_headers:
            trailers = (*_HEADERS, *trailers)
        self._transport.connection.end(self._stream, trailers)
        self._transport.flush()

    def _fail(self, status: grpc.StatusCode, text: str) -> None:
        """End the call from outside its method, which may not have started."""
        self._finish(status, text)
        self._cut(text)

    def _cut(self, text: str) -> None:
        self._stop_timer()
        if self._task is not None:
            self._task.cancel(text)

    def _expire(self) -> None:
        self._fail(grpc.StatusCode.DEADLINE_EXCEEDED, "the call's deadline has passed")
