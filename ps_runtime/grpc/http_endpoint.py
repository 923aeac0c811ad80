"""The HTTP port of a node: GET /metrics for Prometheus, /healthz and /readyz for probes.

Small on purpose: one request a connection, bounded in size, time and number, on the node's own
event loop. One connection too many closes the oldest, so that a probe is answered while other
connections are silent. Only the request line is parsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from ps_core.errors import InvalidConfig
from ps_core.limits import (
    HTTP_REQUEST_DEADLINE_S,
    MAX_HTTP_CONNECTION_COUNT,
    MAX_HTTP_REQUEST_BYTES,
)
from ps_runtime.grpc.addresses import join_address, listening, split_address
from ps_runtime.observe import logs

_TEXT = "text/plain; charset=utf-8"
_MAX_DISCARDED_BYTES = 16 * MAX_HTTP_REQUEST_BYTES


class HttpEndpoint:
    """Serves /metrics of a registry, /healthz and /readyz.

    `why_unready` returns the reason for /readyz; empty: the node is ready. /healthz shows the text
    of `degraded` with status 200, because a restart of this node would not help.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        is_serving: Callable[[], bool],
        why_unready: Callable[[], str] = str,
        degraded: Callable[[], str] = str,
        request_deadline_s: float = HTTP_REQUEST_DEADLINE_S,
    ) -> None:
        self._registry = registry
        self._is_serving = is_serving
        self._why_unready = why_unready
        self._degraded = degraded
        self._request_deadline_s = request_deadline_s
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self, listen: str) -> None:
        """Bind `listen` ("host:port", port 0 for a free one), or raise InvalidConfig, and serve."""
        host, port = split_address(listen, "http_listen")
        try:
            self._server = await asyncio.start_server(
                self._accept, limit=MAX_HTTP_REQUEST_BYTES, **listening(host, port)
            )
        except (OSError, UnicodeError) as error:
            raise InvalidConfig(
                f"http_listen is '{listen}', which cannot be bound: {error}"
            ) from error
        self.address = join_address(host, self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close the port and all connections."""
        if self._server is None:
            return
        self._server.close()
        for writer in self._connections.values():  # before Python 3.12, asyncio reports the
            writer.transport.abort()  # cancelled task of a stream as a failure
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        if len(self._connections) >= MAX_HTTP_CONNECTION_COUNT:
            oldest = next(iter(self._connections))
            self._connections.pop(oldest).transport.abort()  # which ends its task
        self._connections[task] = writer
        try:
            async with asyncio.timeout(self._request_deadline_s):
                writer.write(await self._respond(reader))
                writer.write_eof()
                await writer.drain()
                await _discard(reader)
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            logs.debug("http_request_dropped")
        finally:
            writer.transport.abort()  # unsent bytes have had their time
            self._connections.pop(task, None)

    async def _respond(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"request is too large\n")
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response(HTTPStatus.BAD_REQUEST, b"expected an HTTP/1 request line\n")
        if words[0] != b"GET":
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, b"expected GET\n")
        return self._page(words[1].split(b"?", 1)[0])

    def _page(self, path: bytes) -> bytes:
        match path:
            case b"/metrics":
                page = generate_latest(self._registry)
                return _response(HTTPStatus.OK, page, CONTENT_TYPE_LATEST)
            case b"/readyz":
                problem, text = self._why_unready(), "ok"
            case b"/healthz":
                problem, degraded = "" if self._is_serving() else "not serving", self._degraded()
                text = f"degraded: {degraded}" if degraded else "ok"
            case _:
                return _response(HTTPStatus.NOT_FOUND, b"expected /metrics, /healthz or /readyz\n")
        status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
        return _response(status, f"{problem or text}\n".encode())


async def _discard(reader: asyncio.StreamReader) -> None:
    """Read until the client closes, or has sent too much. Closing a socket with unread bytes resets
    the connection, and the client may lose the response.
    """
    left_bytes = _MAX_DISCARDED_BYTES
    while left_bytes > 0 and (chunk := await reader.read(MAX_HTTP_REQUEST_BYTES)):
        left_bytes -= len(chunk)


def _response(status: HTTPStatus, body: bytes, content_type: str = _TEXT) -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append("Allow: GET")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
