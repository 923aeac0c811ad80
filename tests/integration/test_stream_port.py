"""The stream port's server over real sockets, to gRPC's own client and to raw peers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from ps_core.errors import Draining, InvalidConfig
from ps_core.limits import MAX_MESSAGE_BYTES
from ps_runtime.http2.channel import StreamChannel
from ps_runtime.http2.protocol import frames as wire
from ps_runtime.http2.protocol.bounds import Bounds
from ps_runtime.http2.protocol.frames import ErrorCode, Flag, FrameType
from ps_runtime.http2.server import StreamServer, _Call
from ps_runtime.http2.transport import Http2Transport
from tests.integration.stream_peers import (
    ALL_WINDOWS,
    DEADLINE_S,
    LOOPS,
    SERVICE,
    Methods,
    RawPeer,
    Run,
    grpcio_channel,
    path_of,
    runner,
    status_of,
    stream_channel,
    stream_server,
)

OPENING = wire.PREFACE + wire.settings({})
SIZES = [0, 1, 70_000, 1 << 20, MAX_MESSAGE_BYTES - 100, 3]


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param)


def data(stream_id: int, message: bytes, flag: int = 0, *, ends: bool = True) -> bytes:
    whole = bytes((flag,)) + wire.prefix(len(message))[1:] + message
    return wire.frame(FrameType.DATA, Flag.END_STREAM if ends else 0, stream_id, whole)


async def requests() -> AsyncIterator[bytes]:
    for number, size in enumerate(SIZES):
        yield bytes((number,)) * size


def test_a_port_at_every_address_takes_ipv4_and_ipv6(run: Run) -> None:
    async def main() -> None:
        server = await StreamServer.start("[::]:0", {SERVICE: Methods().handlers()})
        try:
            for host in ("127.0.0.1", "::1"):
                channel = await StreamChannel.connect(host, server.port, DEADLINE_S)
                assert bytes(await channel.unary(path_of("Echo"), b"here", DEADLINE_S)) == b"here"
                channel.close()
        finally:
            await server.stop(0.0)

    run(main())


def test_a_host_that_cannot_be_a_name_is_refused(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(InvalidConfig, match="cannot be bound"):
            await StreamServer.start(f"{'long' * 20}:0", {})

    run(main())


def test_grpcs_own_client_calls_every_kind_of_method(run: Run) -> None:
    async def main() -> None:
        async with stream_server() as (server, _), grpcio_channel(server.port) as channel:
            echo: Any = channel.unary_unary(path_of("Echo"))
            for size in SIZES:
                assert await echo(bytes(size), timeout=DEADLINE_S) == bytes(size)
            count: Any = channel.unary_stream(path_of("Count"))
            counted = [each async for each in count(b"9 1000000", timeout=DEADLINE_S)]
            assert counted == [bytes((number,)) * 1_000_000 for number in range(9)]
            talk: Any = channel.stream_stream(path_of("Talk"))
            said = [each async for each in talk(requests(), timeout=DEADLINE_S)]
            assert said == [each async for each in requests()]
            total: Any = channel.stream_unary(path_of("Total"))
            assert await total(requests(), timeout=DEADLINE_S) == str(SIZES).encode()

    run(main())


def test_many_calls_with_large_messages_at_once_all_end(run: Run) -> None:
    """gRPC's client gives each stream its turn, so that all are inside of a message."""

    async def main() -> None:
        async with stream_server() as (server, _), grpcio_channel(server.port) as channel:
            echo: Any = channel.unary_unary(path_of("Echo"))
            sent = [bytes((number,)) * 4_000_000 for number in range(40)]
            got = await asyncio.gather(*(echo(each, timeout=DEADLINE_S) for each in sent))
            assert got == sent

    run(main())


def test_a_status_comes_with_its_text_and_metadata(run: Run) -> None:
    async def main() -> None:
        async with stream_server() as (server, _), grpcio_channel(server.port) as channel:
            fail: Any = channel.unary_unary(path_of("Fail"))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await fail(b"", timeout=DEADLINE_S)
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND
            assert caught.value.details() == "no \u00fcber 100 %"
            trailing = caught.value.trailing_metadata()
            assert trailing is not None
            found = dict(trailing)
            assert found == {"reason-bin": bytes(range(256)), "retry-after-ms": "7"}

    run(main())


WRONG = [
    ("None", b"", {}, grpc.StatusCode.UNIMPLEMENTED),
    ("Break", b"", {}, grpc.StatusCode.UNKNOWN),
    ("Echo", bytes(MAX_MESSAGE_BYTES + 1), {}, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ("Park", bytes(999), {"compression": grpc.Compression.Gzip}, grpc.StatusCode.UNIMPLEMENTED),
    ("Park", b"", {"timeout": 0.1}, grpc.StatusCode.DEADLINE_EXCEEDED),
]


@pytest.mark.parametrize(("method", "request_", "options", "status"), WRONG)
def test_what_cannot_be_answered_has_its_status(
    run: Run, method: str, request_: bytes, options: dict[str, Any], status: grpc.StatusCode
) -> None:
    async def main() -> None:
        unbounded = ("grpc.max_send_message_length", -1)
        async with (
            stream_server() as (server, _),
            grpcio_channel(server.port, unbounded) as channel,
        ):
            call: Any = channel.unary_unary(path_of(method))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request_, **{"timeout": DEADLINE_S, **options})
            assert caught.value.code() == status
            echo: Any = channel.unary_unary(path_of("Echo"))
            assert await echo(b"still here", timeout=DEADLINE_S) == b"still here"

    run(main())


def test_a_call_that_its_client_cancels_is_cancelled(run: Run) -> None:
    async def main() -> None:
        async with stream_server() as (server, methods), grpcio_channel(server.port) as channel:
            park: Any = channel.unary_unary(path_of("Park"))
            call = park(b"mine", timeout=DEADLINE_S)
            task = asyncio.ensure_future(call)
            assert await methods.parked.get() == b"mine"
            call.cancel()
            assert await methods.cancelled.get() == b"mine"
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main())


@pytest.mark.parametrize("kind", [Draining, RuntimeError])
def test_a_refusal_of_a_call_that_its_client_ended_is_not_logged_as_a_failure(
    run: Run, kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """As when a server and its clients end at once; its log had a traceback of each."""

    async def main() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def leave(_request: bytes, _context: Any) -> bytes:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
                raise kind("it ends")

        methods: Any = {"Leave": grpc.unary_unary_rpc_method_handler(leave, bytes, bytes)}
        server = await StreamServer.start("127.0.0.1:0", {SERVICE: methods})
        async with grpcio_channel(server.port) as channel:
            asked: Any = channel.unary_unary(path_of("Leave"))
            call = asyncio.ensure_future(asked(b"", timeout=DEADLINE_S))
            await begun.wait()
            call.cancel()
            await ended.wait()
        await server.stop(DEADLINE_S)

    run(main())
    assert ("event=call_failed" in caplog.text) == (kind is RuntimeError)


def test_a_deadline_ends_a_call_at_the_server_too(run: Run) -> None:
    async def main() -> None:
        async with stream_server() as (server, methods), RawPeer.connected(server.port) as peer:
            peer.send(OPENING, peer.opening(1, "Park", 0.05), data(1, b"mine"))
            found = await peer.fields()
            assert found[b"grpc-status"] == b"4"
            assert methods.cancelled.get_nowait() == b"mine"

    run(main())


@pytest.mark.parametrize(("flag", "status"), [(1, b"12"), (0, b"8")])
def test_an_unreadable_message_is_answered_before_its_method_begins(
    run: Run, flag: int, status: bytes
) -> None:
    """It comes together with the headers."""

    async def main() -> None:
        async with stream_server() as (server, methods), RawPeer.connected(server.port) as peer:
            length = 9 if flag else MAX_MESSAGE_BYTES + 1
            raw = bytes((flag,)) + wire.prefix(length)[1:] + bytes(9)
            message = wire.frame(FrameType.DATA, 0, 1, raw)
            peer.send(OPENING, peer.opening(1, "Park"), message)
            assert (await peer.fields())[b"grpc-status"] == status
            await peer.answered()
            assert methods.parked.empty()
            assert not server._calls

    run(main())


def test_nothing_is_left_of_calls_that_were_opened_and_reset(run: Run) -> None:
    async def main() -> None:
        async with stream_server() as (server, _), RawPeer.connected(server.port) as peer:
            peer.send(OPENING)
            for number in range(1, 100, 2):
                opening = peer.opening(number, "Park", 90_000.0)
                peer.send(opening, wire.reset(number, ErrorCode.CANCEL))
            await peer.answered()
            await peer.answered()
            assert not server._calls
            gc.collect()
            assert not [each for each in gc.get_objects() if type(each) is _Call]

    run(main())


def test_who_asks_for_no_grpc_is_told_so(run: Run) -> None:
    async def main() -> None:
        async with stream_server() as (server, _), RawPeer.connected(server.port) as peer:
            fields = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/")]
            peer.send(OPENING, peer.headers(1, fields))
            assert await peer.fields() == {b":status": b"415"}

    run(main())


def test_who_speaks_no_http2_is_told_so_and_left(run: Run) -> None:
    async def main() -> None:
        async with stream_server() as (server, _), RawPeer.connected(server.port) as peer:
            peer.send(b"GET /metrics HTTP/1.1\r\n\r\n")
            kinds = []
            while not peer.reader.at_eof() and FrameType.GOAWAY not in kinds:
                kinds.append((await peer.frame())[0].kind)
            assert await peer.reader.read() == b""

    run(main())


def test_a_client_that_does_not_read_costs_a_bounded_memory(run: Run) -> None:
    async def main() -> None:
        async with stream_server() as (server, methods):
            async with RawPeer.connected(server.port) as peer, stream_channel(server.port) as other:
                peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
                peer.send(wire.PREFACE, ALL_WINDOWS, peer.opening(1, "Flow"), data(1, b"mine"))
                seen, quiet = -1, 0
                while quiet < 100:
                    await other.unary(path_of("Echo"), b"", DEADLINE_S)
                    quiet = quiet + 1 if seen == methods.made_count > 0 else 0
                    seen = methods.made_count
                (transport,) = [each for each in server._connections if each.connection.streams]
                assert transport._transport is not None
                assert transport._transport.get_write_buffer_size() < 6 << 20
                assert sum(map(len, transport.connection.output.pieces)) < 2 << 20
            assert await methods.cancelled.get() == b"mine"

    run(main())


def test_a_call_may_end_within_the_grace_of_a_stop(run: Run) -> None:
    async def main() -> None:
        async with stream_server() as (server, methods), grpcio_channel(server.port) as channel:
            park: Any = channel.unary_unary(path_of("Park"))
            task = asyncio.ensure_future(park(b"mine", timeout=DEADLINE_S))
            await methods.parked.get()
            stopping = asyncio.create_task(server.stop(DEADLINE_S))
            late = asyncio.ensure_future(park(b"late", timeout=DEADLINE_S))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await late
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            methods.release.set()
            assert await task == b"released"
            await stopping

    run(main())


def test_a_call_that_outlasts_a_stop_is_cut(run: Run) -> None:
    async def main() -> None:
        async with stream_server() as (server, methods), stream_channel(server.port) as channel:
            call = asyncio.create_task(channel.unary(path_of("Park"), b"mine", DEADLINE_S))
            await methods.parked.get()
            await server.stop(0.0)
            assert methods.cancelled.get_nowait() == b"mine"
            assert not server._calls
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert status_of(caught.value) == grpc.StatusCode.UNAVAILABLE
            assert not channel.is_open

    run(main())


def test_a_stop_does_not_wait_for_a_client_that_does_not_read(run: Run) -> None:
    async def main() -> None:
        async with stream_server() as (server, methods), RawPeer.connected(server.port) as peer:
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            peer.send(wire.PREFACE, ALL_WINDOWS, peer.opening(1, "Flow"), data(1, b"mine"))
            async with stream_channel(server.port) as other:
                while methods.made_count < 5:
                    await other.unary(path_of("Echo"), b"", DEADLINE_S)
            await server.stop(0.0)
            assert methods.cancelled.get_nowait() == b"mine"
            assert not server._calls

    run(main())


def test_a_connection_that_is_closed_before_it_is_made_ends(run: Run) -> None:
    """As those above the limit of a server's connections are."""

    async def main() -> None:
        lost = asyncio.Event()

        def unwanted() -> Http2Transport:
            transport = Http2Transport(Bounds(MAX_MESSAGE_BYTES), None, lambda _: lost.set())
            transport.close()
            return transport

        async with stream_server() as (server, _):
            loop = asyncio.get_running_loop()
            await loop.create_connection(unwanted, "127.0.0.1", server.port)
            await lost.wait()

    run(main())


def test_nothing_is_left_of_a_connection_whose_caller_went_away_while_it_was_made(
    run: Run,
) -> None:
    """Its timer would write to a closed socket, and log a traceback."""
    turns, kept = 40, list[StreamChannel]()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0), backlog=turns) as server:
            port = int(server.getsockname()[1])
            for count in range(turns):  # of the loop, after which the caller goes away
                connecting = loop.create_task(StreamChannel.connect("127.0.0.1", port, 10.0))
                for _ in range(count):
                    turn = asyncio.Event()
                    loop.call_soon(turn.set)
                    await turn.wait()
                connecting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    kept.append(await connecting)
            found = [each for each in gc.get_objects() if isinstance(each, Http2Transport)]
            own = {id(channel._transport) for channel in kept}
            assert not [each for each in found if each.is_open and id(each) not in own]
            for channel in kept:
                channel.close()

    run(main())


def test_a_connection_that_is_taken_during_a_stop_is_closed(run: Run) -> None:
    """The system had accepted it before the port was closed."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        own, others = socket.socketpair()
        async with stream_server() as (server, _):
            await server.stop(0.0)
            await loop.connect_accepted_socket(server._connected, others)
            reader, writer = await asyncio.open_connection(sock=own)
            await reader.read()  # to its end
            writer.close()
            assert not server.connection_count

    run(main())


def test_an_address_that_cannot_be_bound_is_named(run: Run) -> None:
    async def main() -> None:
        async with stream_server() as (server, _):
            address = f"127.0.0.1:{server.port}"
            with pytest.raises(InvalidConfig, match=f"'{address}', which cannot be bound"):
                await StreamServer.start(address, {SERVICE: {}})

    run(main())
