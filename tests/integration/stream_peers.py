"""What the tests of the stream port call, and who calls it: methods, raw peers, both loops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, cast

import grpc
import grpc.aio
import hpack
import uvloop

from ps_core.limits import MAX_MESSAGE_BYTES
from ps_runtime.grpc.channels import CHANNEL_OPTIONS
from ps_runtime.http2.channel import StreamChannel
from ps_runtime.http2.protocol import frames as wire
from ps_runtime.http2.protocol.frames import Flag, FrameHead, FrameType, Setting
from ps_runtime.http2.protocol.grpc_fields import request_fields
from ps_runtime.http2.server import StreamServer

DEADLINE_S = 20.0
SERVICE = "tests.Methods"
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
ALL_WINDOWS = wire.settings({Setting.INITIAL_WINDOW_SIZE: 1 << 30}) + wire.window_update(0, 1 << 30)
Run = Callable[[Coroutine[Any, Any, None]], None]


def runner(loop: str) -> Run:
    """What runs a test on a loop of this kind."""

    async def with_deadline(main: Awaitable[None]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await main

    def run(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[loop]) as made:
            made.run(with_deadline(main))

    return run


def path_of(method: str) -> str:
    return f"/{SERVICE}/{method}"


class Methods:
    """Handlers of bytes, and what happened in them."""

    def __init__(self) -> None:
        self.parked: asyncio.Queue[bytes] = asyncio.Queue()
        self.cancelled: asyncio.Queue[bytes] = asyncio.Queue()
        self.release = asyncio.Event()
        self.made_count = 0

    async def echo(self, request: bytes, _context: Any) -> bytes:
        return bytes(request)

    async def park(self, request: bytes, _context: Any) -> bytes:
        self.parked.put_nowait(bytes(request))
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.put_nowait(bytes(request))
            raise
        return b"released"

    async def fail(self, request: bytes, context: Any) -> bytes:
        metadata = (("reason-bin", bytes(range(256))), ("retry-after-ms", "7"))
        await context.abort(grpc.StatusCode.NOT_FOUND, "no \u00fcber 100 %", metadata)
        return request

    async def break_down(self, _request: bytes, _context: Any) -> bytes:
        raise RuntimeError("a bug")

    async def count(self, request: bytes, _context: Any) -> AsyncIterator[bytes]:
        """As many messages, of such a size."""
        number, size = map(int, bytes(request).split())
        for each in range(number):
            yield bytes((each,)) * size

    async def flow(self, request: bytes, _context: Any) -> AsyncIterator[bytes]:
        """Messages without end."""
        try:
            while True:
                self.made_count += 1
                yield bytes(1 << 20)
        finally:
            self.cancelled.put_nowait(bytes(request))

    async def hold(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """What `count` gives, and then nothing."""
        async for message in self.count(request, context):
            yield message
        await self.park(request, context)

    async def talk(self, requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield bytes(request)

    async def total(self, requests: AsyncIterator[bytes], _context: Any) -> bytes:
        return str([len(request) async for request in requests]).encode()

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        made: dict[str, Any] = {
            "Echo": grpc.unary_unary_rpc_method_handler(cast(Any, self.echo), bytes, bytes),
            "Park": grpc.unary_unary_rpc_method_handler(cast(Any, self.park), bytes, bytes),
            "Fail": grpc.unary_unary_rpc_method_handler(cast(Any, self.fail), bytes, bytes),
            "Break": grpc.unary_unary_rpc_method_handler(cast(Any, self.break_down), bytes, bytes),
            "Count": grpc.unary_stream_rpc_method_handler(cast(Any, self.count), bytes, bytes),
            "Flow": grpc.unary_stream_rpc_method_handler(cast(Any, self.flow), bytes, bytes),
            "Hold": grpc.unary_stream_rpc_method_handler(cast(Any, self.hold), bytes, bytes),
            "Talk": grpc.stream_stream_rpc_method_handler(cast(Any, self.talk), bytes, bytes),
            "Total": grpc.stream_unary_rpc_method_handler(cast(Any, self.total), bytes, bytes),
        }
        return made


@contextlib.asynccontextmanager
async def stream_server() -> AsyncIterator[tuple[StreamServer, Methods]]:
    methods = Methods()
    server = await StreamServer.start("127.0.0.1:0", {SERVICE: methods.handlers()})
    try:
        yield server, methods
    finally:
        await server.stop(0.0)


@contextlib.asynccontextmanager
async def grpcio_server() -> AsyncIterator[tuple[int, Methods]]:
    methods = Methods()
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),))
    handler = grpc.method_handlers_generic_handler(SERVICE, methods.handlers())
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port, methods
    finally:
        await server.stop(0.0)


@contextlib.asynccontextmanager
async def grpcio_channel(port: int, *options: tuple[str, int]) -> AsyncIterator[grpc.aio.Channel]:
    """A channel of gRPC's own client, connected: an attempt to connect ends after a second, which
    a machine that first prepares large requests may not keep.
    """
    options = (*CHANNEL_OPTIONS, *options)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        await channel.channel_ready()
        yield channel


@contextlib.asynccontextmanager
async def stream_channel(port: int) -> AsyncIterator[StreamChannel]:
    channel = await StreamChannel.connect("127.0.0.1", port, DEADLINE_S)
    try:
        yield channel
    finally:
        channel.close()


class RawPeer:
    """A client that sends what it is told to, and no more."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, port: int) -> AsyncIterator[RawPeer]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield cls(reader, writer)
        finally:
            writer.transport.abort()

    def opening(self, stream_id: int, method: str, timeout_s: float | None = None) -> bytes:
        """The headers of a call."""
        fields = request_fields(path_of(method), "test", timeout_s)
        return self.headers(stream_id, list(fields))

    def headers(self, stream_id: int, fields: list[tuple[bytes, bytes]]) -> bytes:
        return wire.header_frames(stream_id, self._encoder.encode(fields), 16_384, ends=False)

    def send(self, *frames: bytes) -> None:
        """All in one write."""
        self.writer.write(b"".join(frames))

    async def frame(self) -> tuple[FrameHead, bytes]:
        raw = await self.reader.readexactly(wire.FRAME_HEAD_BYTES)
        head = wire.read_head(memoryview(raw), 0)
        return head, await self.reader.readexactly(head.length)

    async def fields(self) -> dict[bytes, bytes]:
        """Of the next headers."""
        while True:
            head, payload = await self.frame()
            if head.kind == FrameType.HEADERS:
                assert head.flags & Flag.END_HEADERS
                return {bytes(k): bytes(v) for k, v in self._decoder.decode(payload, raw=True)}

    async def answered(self) -> None:
        """All that was sent has been taken."""
        self.send(wire.ping(b"answered", is_ack=False))
        while True:
            head, payload = await self.frame()
            if head.kind == FrameType.PING and payload == b"answered":
                return


@contextlib.asynccontextmanager
async def raw_server(
    greeting: bytes, *, reads: bool = True
) -> AsyncIterator[tuple[int, asyncio.Queue[asyncio.StreamWriter]]]:
    """A listener that says `greeting` to who connects: its port, and the connections."""
    made: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        made.put_nowait(writer)
        if not reads:
            cast(asyncio.ReadTransport, writer.transport).pause_reading()
            return
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], made
    finally:
        server.close()
        while not made.empty():
            made.get_nowait().transport.abort()


def status_of(failure: BaseException) -> grpc.StatusCode:
    assert isinstance(failure, grpc.aio.AioRpcError)
    return failure.code()
