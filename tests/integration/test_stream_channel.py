"""The stream port's client over real sockets, to gRPC's own server, to ours, and to bad ones."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import grpc.aio
import pytest

from ps_core.limits import MAX_MESSAGE_BYTES
from ps_runtime.http2.channel import StreamCall, StreamChannel
from ps_runtime.http2.protocol import frames as wire
from tests.integration.stream_peers import (
    ALL_WINDOWS,
    DEADLINE_S,
    LOOPS,
    Methods,
    Run,
    grpcio_server,
    path_of,
    raw_server,
    runner,
    status_of,
    stream_channel,
    stream_server,
)

MIB = bytes(1 << 20)
SIZES = [0, 1, 70_000, 1 << 20, MAX_MESSAGE_BYTES - 100, 3]
Served = AbstractAsyncContextManager[tuple[Any, Methods]]
SERVERS: dict[str, Callable[[], Served]] = {"grpcio": grpcio_server, "ours": stream_server}


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param)


@pytest.fixture(params=SERVERS)
def serve(request: pytest.FixtureRequest) -> Callable[[], Served]:
    return SERVERS[request.param]


def port_of(server: Any) -> int:
    return int(getattr(server, "port", server))


async def failure_of(call: StreamCall) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(call))
    return status_of(caught.value)


def test_every_kind_of_method_is_called(run: Run, serve: Callable[[], Served]) -> None:
    async def main() -> None:
        async with serve() as (server, _), stream_channel(port_of(server)) as channel:
            for size in SIZES:
                answer = await channel.unary(path_of("Echo"), bytes(size), DEADLINE_S)
                assert bytes(answer) == bytes(size)
            count = channel.call(path_of("Count"), DEADLINE_S)
            await count.write((b"9 100", b"0000"))
            count.done_writing()
            counted = [bytes(each) async for each in count]
            assert counted == [bytes((number,)) * 1_000_000 for number in range(9)]
            talk = channel.call(path_of("Talk"))
            for size in SIZES:
                half = size // 2
                await talk.write((bytes(half), memoryview(bytes(size - half))))
                assert bytes(await anext(aiter(talk))) == bytes(size)
            talk.done_writing()
            assert [each async for each in talk] == []
            total = channel.call(path_of("Total"))
            for size in SIZES:
                await total.write((bytes(size),))
            total.done_writing()
            assert [bytes(each) async for each in total] == [str(SIZES).encode()]
            assert not channel._transport.connection.streams

    run(main())


def test_a_status_is_an_error_with_its_text_and_metadata(
    run: Run, serve: Callable[[], Served]
) -> None:
    async def main() -> None:
        async with serve() as (server, _), stream_channel(port_of(server)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary(path_of("Fail"), b"", DEADLINE_S)
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND
            assert caught.value.details() == "no \u00fcber 100 %"
            trailing = caught.value.trailing_metadata()
            assert dict(trailing) == {"reason-bin": bytes(range(256)), "retry-after-ms": "7"}
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary(path_of("None"), b"", DEADLINE_S)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
            assert await channel.unary(path_of("Echo"), b"on", DEADLINE_S) == b"on"

    run(main())


def test_a_deadline_and_a_cancel_end_the_method(run: Run, serve: Callable[[], Served]) -> None:
    async def main() -> None:
        async with serve() as (server, methods), stream_channel(port_of(server)) as channel:
            late = asyncio.create_task(channel.unary(path_of("Park"), b"late", 0.3))
            assert await methods.cancelled.get() == b"late"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await late
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            call = channel.call(path_of("Park"), DEADLINE_S)
            await call.write((b"mine",))
            call.done_writing()
            await methods.parked.get()
            await methods.parked.get()
            call.cancel()
            assert await methods.cancelled.get() == b"mine"
            assert await failure_of(call) == grpc.StatusCode.CANCELLED
            with pytest.raises(grpc.aio.AioRpcError):
                await call.write((b"more",))

    run(main())


def test_a_task_that_is_cancelled_cancels_its_call(run: Run) -> None:
    async def main() -> None:
        async with stream_server() as (server, methods), stream_channel(server.port) as channel:
            task = asyncio.create_task(channel.unary(path_of("Park"), b"mine", DEADLINE_S))
            await methods.parked.get()
            task.cancel()
            assert await methods.cancelled.get() == b"mine"
            assert not channel._transport.connection.streams

    run(main())


def test_a_call_may_read_before_it_writes(run: Run) -> None:
    async def main() -> None:
        async with stream_server() as (server, _), stream_channel(server.port) as channel:
            await channel.unary(path_of("Echo"), b"", DEADLINE_S)  # the settings have come
            call = channel.call(path_of("None"), DEADLINE_S)
            assert await failure_of(call) == grpc.StatusCode.UNIMPLEMENTED

    run(main())


def test_a_hundred_calls_are_open_and_one_more_is_not(run: Run) -> None:
    async def main() -> None:
        async with stream_server() as (server, methods), stream_channel(server.port) as channel:
            await channel.unary(path_of("Echo"), b"", DEADLINE_S)  # the settings have come
            calls = [channel.call(path_of("Park"), DEADLINE_S) for _ in range(100)]
            for call in calls:
                await call.write((b"",))
                await methods.parked.get()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                channel.call(path_of("Park"), DEADLINE_S)
            assert status_of(caught.value) == grpc.StatusCode.UNAVAILABLE
            calls[7].cancel()
            assert await channel.unary(path_of("Echo"), b"x", DEADLINE_S) == b"x"
            methods.release.set()
            assert bytes(await anext(aiter(calls[99]))) == b"released"

    run(main())


def test_a_connection_that_is_lost_fails_who_reads_and_who_writes(run: Run) -> None:
    async def main() -> None:
        async with (
            raw_server(wire.settings({})) as (port, connections),
            stream_channel(port) as channel,
        ):
            call = channel.call("/a/b")
            reading = asyncio.create_task(failure_of(call))
            writing = asyncio.create_task(call.write((MIB,)))  # the windows end within
            writer = await connections.get()
            other = channel.call("/a/c")
            writer.transport.abort()
            assert await reading == grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await writing
            assert status_of(caught.value) == grpc.StatusCode.UNAVAILABLE
            assert await failure_of(other) == grpc.StatusCode.UNAVAILABLE
            assert not channel.is_open
            with pytest.raises(grpc.aio.AioRpcError):
                channel.call("/a/b")

    run(main())


def test_what_came_before_the_connection_was_lost_is_read(run: Run) -> None:
    async def main() -> None:
        async with stream_server() as (server, methods), stream_channel(server.port) as channel:
            hold = channel.call(path_of("Hold"))
            await hold.write((b"3 4000000",))
            assert await methods.parked.get()
            while len(hold._messages) < 3:
                await channel.unary(path_of("Echo"), b"", DEADLINE_S)
            await server.stop(0.0)
            messages = [bytes(await anext(aiter(hold))) for _ in range(3)]
            assert messages == [bytes((number,)) * 4_000_000 for number in range(3)]
            assert await failure_of(hold) == grpc.StatusCode.UNAVAILABLE
            channel._transport.connection.output.put(wire.ping(bytes(8), is_ack=False))
            channel._transport.flush()  # to nobody, and without an error

    run(main())


def test_a_closed_channel_fails_its_calls_at_once(run: Run) -> None:
    async def main() -> None:
        async with (
            raw_server(ALL_WINDOWS, reads=False) as (port, _),
            stream_channel(port) as channel,
        ):
            call = channel.call("/a/b")
            writing = asyncio.create_task(_write_on(call))
            reading = asyncio.create_task(failure_of(call))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(writing), 0.3)
            channel.close()
            assert await reading == grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError):
                await writing

    run(main())


async def _write_on(call: StreamCall) -> None:
    while True:
        await call.write((MIB,))


def test_a_deadline_ends_who_waits_for_a_server_that_does_not_read(run: Run) -> None:
    async def main() -> None:
        async with (
            raw_server(ALL_WINDOWS, reads=False) as (port, _),
            stream_channel(port) as channel,
        ):
            call = channel.call("/a/b", 0.5)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _write_on(call)
            assert status_of(caught.value) == grpc.StatusCode.DEADLINE_EXCEEDED
            transport = channel._transport._transport
            assert transport is not None
            assert 4 << 20 <= transport.get_write_buffer_size() < 6 << 20
            assert sum(map(len, channel._transport.connection.output.pieces)) < 100
            assert not channel._transport.connection.streams

    run(main())


def test_a_deadline_ends_who_waits_for_a_server_that_gives_no_room(run: Run) -> None:
    async def main() -> None:
        async with raw_server(wire.settings({})) as (port, _), stream_channel(port) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary("/a/b", MIB, 0.2)
            assert status_of(caught.value) == grpc.StatusCode.DEADLINE_EXCEEDED
            assert not channel._transport.connection.streams

    run(main())


@pytest.mark.parametrize(
    ("greeting", "status"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", grpc.StatusCode.UNAVAILABLE),
        (b"\x00\x00\x00\xff\x00\x00\x00\x00\x00", grpc.StatusCode.UNAVAILABLE),
        (b"", grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_a_listener_that_speaks_no_http2_fails_the_call(
    run: Run, greeting: bytes, status: grpc.StatusCode
) -> None:
    async def main() -> None:
        async with raw_server(greeting) as (port, _), stream_channel(port) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary("/a/b", b"", 0.3)
            assert status_of(caught.value) == status

    run(main())


def test_nobody_listens(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(OSError, match=r"(?i)connect"):
            await StreamChannel.connect("127.0.0.1", 1, DEADLINE_S)

    run(main())


class Held:
    """What who waits for a call has."""


def test_a_call_that_failed_holds_nothing_of_who_waited(run: Run) -> None:
    """Not until the collector looks: it may be the memory of a server that has died."""
    found: list[weakref.ref[Held]] = []

    async def wait(call: StreamCall) -> None:
        held = Held()
        found.append(weakref.ref(held))
        async for _ in call:
            assert held is not None

    async def main() -> None:
        async with stream_server() as (server, _), stream_channel(port_of(server)) as channel:
            call = channel.call(path_of("Talk"))
            waiting = asyncio.create_task(wait(call))
            await call.write((b"x",))
            channel.close()
            with contextlib.suppress(grpc.aio.AioRpcError):
                await waiting
            del waiting
            await asyncio.create_task(failure_of(call))  # the loop lets go of the first meanwhile
            assert found[0]() is None

    gc.disable()
    try:
        run(main())
    finally:
        gc.enable()
