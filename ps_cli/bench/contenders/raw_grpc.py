"""Raw gRPC from Python: bytes without stubs, protocol or updates.

Both ends are built as pushpull's nodes are: `grpc.aio` on uvloop, with the same channel options and
allocator settings. Every message is a fresh 1 MiB cut from a buffer of the whole table, and every
byte is copied out of it at the other end, because one that is sent again would be in the cache.
A round is a push and then a pull, or one call in which the server sends each message back as soon
as it has it; both are measured, and the better one counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import numpy as np

from ps_cli.bench.contenders.child import Actions
from ps_cli.bench.instruments.sampling import MIB, latency_percentiles
from ps_core.errors import Internal
from ps_runtime.grpc.channels import SERVER_OPTIONS, aio_channel, new_event_loop, tune_allocator

SERVICE = "benchmarks.RawBytes"
LATENCY_DEADLINE_S = 60.0


class _RawServer:
    def __init__(self, byte_count: int) -> None:
        self._values = np.ones(byte_count, dtype=np.uint8)

    async def push(self, messages: AsyncIterator[bytes], context: Any) -> bytes:  # noqa: ARG002
        begin = 0
        async for message in messages:
            self._values[begin : begin + len(message)] = np.frombuffer(message, np.uint8)
            begin += len(message)
        return b""

    async def pull(self, request: bytes, context: Any) -> AsyncIterator[bytes]:  # noqa: ARG002
        for begin in range(0, self._values.nbytes, MIB):
            yield self._values[begin : begin + MIB].tobytes()

    async def round(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:  # noqa: ARG002
        begin = 0
        async for message in messages:
            end = begin + len(message)
            self._values[begin:end] = np.frombuffer(message, np.uint8)
            yield self._values[begin:end].tobytes()
            begin = end

    async def exchange(self, request: bytes, context: Any) -> bytes:  # noqa: ARG002
        self._values[:] = np.frombuffer(request, np.uint8)
        return self._values.tobytes()

    async def start(self) -> tuple[grpc.aio.Server, int]:
        """Serve all calls, without serializers; the server and its port."""
        calls: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Push": grpc.stream_unary_rpc_method_handler(self.push),
            "Pull": grpc.unary_stream_rpc_method_handler(self.pull),
            "Round": grpc.stream_stream_rpc_method_handler(self.round),
            "Exchange": grpc.unary_unary_rpc_method_handler(self.exchange),
        }
        server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, calls),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port


@contextlib.contextmanager
def server(size: str) -> Iterator[Actions]:
    tune_allocator()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        serving, port = runner.run(_RawServer(int(size)).start())
        yield {
            "address": lambda: f"127.0.0.1:{port}",
            "serve": lambda: runner.run(asyncio.to_thread(sys.stdin.read)),
        }
        runner.run(serving.stop(None))


class _RawClient:
    def __init__(self, address: str, byte_count: int, call_count: int) -> None:
        self._source = np.random.default_rng(0).integers(0, 256, byte_count, dtype=np.uint8)
        self._target = np.zeros(byte_count, dtype=np.uint8)
        self._call_count = call_count
        self._channel = aio_channel(address)
        self._push: Any = self._channel.stream_unary(f"/{SERVICE}/Push")
        self._pull: Any = self._channel.unary_stream(f"/{SERVICE}/Pull")
        self._round: Any = self._channel.stream_stream(f"/{SERVICE}/Round")
        self._exchange: Any = self._channel.unary_unary(f"/{SERVICE}/Exchange")

    async def push(self) -> None:
        """Send the buffer; returns when the server has all of it."""
        call = self._push()
        for begin in range(0, self._source.nbytes, MIB):
            await call.write(self._source[begin : begin + MIB].tobytes())
        await call.done_writing()
        await call

    async def pull(self) -> None:
        begin = 0
        async for message in self._pull(b""):
            self._target[begin : begin + len(message)] = np.frombuffer(message, np.uint8)
            begin += len(message)

    async def round(self) -> None:
        """Send the buffer and receive it back, both at once."""
        call = self._round()

        async def send() -> None:
            for begin in range(0, self._source.nbytes, MIB):
                await call.write(self._source[begin : begin + MIB].tobytes())
            await call.done_writing()

        sending = asyncio.create_task(send())
        begin = 0
        async for message in call:
            self._target[begin : begin + len(message)] = np.frombuffer(message, np.uint8)
            begin += len(message)
        await sending

    async def exchange(self) -> dict[str, float]:
        """Percentiles of the seconds of unary calls, one after the other."""
        waits_s = []
        for _ in range(self._call_count):
            began_s = time.perf_counter()
            answer = await self._exchange(self._source.tobytes(), timeout=LATENCY_DEADLINE_S)
            self._target[:] = np.frombuffer(answer, np.uint8)
            waits_s.append(time.perf_counter() - began_s)
        return latency_percentiles(waits_s)

    async def push_and_pull(self) -> None:
        """Send the buffer, and then receive it."""
        await self.push()
        await self.pull()

    async def check(self) -> None:
        """Raise Internal unless what is sent now comes back, by each call."""
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "push and pull": self.push_and_pull,
            "round": self.round,
        }
        if self._call_count:
            calls["exchange"] = self.exchange
        for name, call in calls.items():
            self._source += 1
            await call()
            if not np.array_equal(self._target, self._source):
                raise Internal(f"raw gRPC's {name} has lost bytes")


@contextlib.contextmanager
def client(size: str, address: str, calls: str) -> Iterator[Actions]:
    tune_allocator()

    async def connect() -> _RawClient:
        return _RawClient(address, int(size), int(calls))

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        made = runner.run(connect())
        yield {
            "push": lambda: runner.run(made.push()),
            "pull": lambda: runner.run(made.pull()),
            "round apart": lambda: runner.run(made.push_and_pull()),
            "round at once": lambda: runner.run(made.round()),
            "exchange": lambda: runner.run(made.exchange()),
            "check": lambda: runner.run(made.check()),
        }
