"""The HTTP port over real sockets: what it answers, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry, Counter

from ps_core.limits import MAX_HTTP_CONNECTION_COUNT, MAX_HTTP_REQUEST_BYTES
from ps_runtime.grpc import channels
from ps_runtime.grpc.addresses import split_address
from ps_runtime.grpc.http_endpoint import HttpEndpoint
from ps_runtime.grpc.node_server import NodeServer
from ps_runtime.observe.metrics import new_registry

Ask = Callable[[bytes], Awaitable[bytes]]


async def answer_to(address: str, request: bytes) -> bytes:
    """All that comes back for `request`, until the other side closes."""
    reader, writer = await asyncio.open_connection(*split_address(address, "address"))
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(-1), 10.0)
    finally:
        await closed(writer)


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):  # it may have been the other side that ended it
        await writer.wait_closed()


def with_endpoint(
    work: Callable[[HttpEndpoint], Awaitable[None]], deadline_s: float = 10.0
) -> None:
    async def main() -> None:
        registry = CollectorRegistry()
        Counter("pushpull_test_total", "A counter.", registry=registry).inc(3)
        endpoint = HttpEndpoint(registry, lambda: True, request_deadline_s=deadline_s)
        await endpoint.start("127.0.0.1:0")
        try:
            await work(endpoint)
        finally:
            await endpoint.stop()

    channels.run(main())


def test_a_port_at_every_address_is_probed_by_ipv4_and_by_ipv6() -> None:
    async def main() -> None:
        endpoint = HttpEndpoint(CollectorRegistry(), lambda: True)
        await endpoint.start("[::]:0")
        _, port = split_address(endpoint.address, "address")
        try:
            for host in ("127.0.0.1", "[::1]"):
                answer = await answer_to(f"{host}:{port}", b"GET /healthz HTTP/1.1\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 200 OK")
        finally:
            await endpoint.stop()

    channels.run(main())


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        (b"GET /healthz HTTP/1.1", b"200 OK", b"\r\n\r\nok\n"),
        (b"GET /healthz?verbose HTTP/1.0", b"200 OK", b"\r\n\r\nok\n"),
        (b"GET /metrics HTTP/1.1", b"200 OK", b"pushpull_test_total 3.0\n"),
        (b"GET / HTTP/1.1", b"404 Not Found", b"expected /metrics, /healthz or /readyz\n"),
        (b"POST /metrics HTTP/1.1", b"405 Method Not Allowed", b"expected GET\n"),
        (b"GET /metrics", b"400 Bad Request", b"expected an HTTP/1 request line\n"),
        (b"\x16\x03\x01\x02", b"400 Bad Request", b"expected an HTTP/1 request line\n"),
    ],
)
def test_what_a_request_gets(request_line: bytes, status: bytes, body: bytes) -> None:
    async def work(endpoint: HttpEndpoint) -> None:
        answer = await answer_to(endpoint.address, request_line + b"\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 " + status + b"\r\n")
        assert body in answer
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert f"Content-Length: {len(rest)}".encode() in head
        assert (b"Allow: GET" in head) == (b"405" in status)

    with_endpoint(work)


def test_a_request_over_the_limit_is_refused() -> None:
    async def work(endpoint: HttpEndpoint) -> None:
        # More than is read before the answer: the rest must not cost the client the answer.
        huge = b"GET /healthz HTTP/1.1\r\nX: " + b"x" * (12 * MAX_HTTP_REQUEST_BYTES)
        assert (await answer_to(endpoint.address, huge)).startswith(b"HTTP/1.1 431 ")

    with_endpoint(work)


def test_a_client_that_says_nothing_is_dropped_at_the_deadline() -> None:
    async def work(endpoint: HttpEndpoint) -> None:
        assert await answer_to(endpoint.address, b"GET /heal") == b""

    with_endpoint(work, deadline_s=0.05)


def test_connections_are_limited_and_the_oldest_makes_room_for_the_newest() -> None:
    async def work(endpoint: HttpEndpoint) -> None:
        place = split_address(endpoint.address, "address")
        idle = [await asyncio.open_connection(*place) for _ in range(MAX_HTTP_CONNECTION_COUNT)]
        request = b"GET /healthz HTTP/1.1\r\n\r\n"
        assert (await answer_to(endpoint.address, request)).endswith(b"ok\n")
        reader, writer = idle.pop(0)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read(-1) == b""
        await closed(writer)
        for reader, writer in idle:
            writer.write(request)
            assert (await reader.read(-1)).endswith(b"ok\n")
            await closed(writer)
        assert (await answer_to(endpoint.address, request)).endswith(b"ok\n")

    with_endpoint(work)


def test_stop_closes_what_is_open() -> None:
    async def work(endpoint: HttpEndpoint) -> None:
        reader, writer = await asyncio.open_connection(*split_address(endpoint.address, "address"))
        writer.write(b"GET /healthz")
        await answer_to(endpoint.address, b"GET /healthz HTTP/1.1\r\n\r\n")  # both are accepted now
        await endpoint.stop()
        assert await reader.read(-1) == b""
        await closed(writer)

    with_endpoint(work)


def test_healthz_of_a_node_follows_set_serving() -> None:
    async def main() -> None:
        node = await NodeServer.start(registry=new_registry())
        request = b"GET /healthz HTTP/1.1\r\n\r\n"
        try:
            assert (await answer_to(node.http_address, request)).startswith(b"HTTP/1.1 503 ")
            node.set_serving(True)
            assert (await answer_to(node.http_address, request)).startswith(b"HTTP/1.1 200 ")
            node.set_serving(False)
            assert (await answer_to(node.http_address, request)).startswith(b"HTTP/1.1 503 ")
        finally:
            await node.stop(0.0)

    channels.run(main())
