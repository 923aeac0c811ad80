"""A client's connections to a server's stream port, whoever asks for one meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import grpc.aio

from ps_core.cluster_view import Node, NodeState, Role
from ps_core.keys import Incarnation, NodeId
from ps_runtime.http2.server import StreamServer
from ps_worker.transport.links import ServerCalls
from pushpull.v1 import parameters_pb2
from tests.integration.stream_peers import DEADLINE_S, runner

REQUEST = parameters_pb2.OpenSessionRequest
_RESPONSE = parameters_pb2.OpenSessionResponse


class Sessions:
    """A server's stream port, whose OpenSession waits for `release`."""

    def __init__(self) -> None:
        self.entered, self.release = asyncio.Event(), asyncio.Event()
        self.response = _RESPONSE(node_id=1, incarnation=1)

    async def open_session(self, _request: Any, _context: Any) -> Any:
        self.entered.set()
        await self.release.wait()
        return self.response

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[tuple[StreamServer, ServerCalls]]:
        handler = grpc.unary_unary_rpc_method_handler(
            cast(Any, self.open_session), REQUEST.FromString, _RESPONSE.SerializeToString
        )
        services = {"pushpull.v1.ParameterService": {"OpenSession": handler}}
        server = await StreamServer.start("127.0.0.1:0", services)
        self.response.stream_port = server.port
        node = Node(NodeId(1), Incarnation(1), Role.SERVER, 0, "127.0.0.1:7", NodeState.ALIVE)
        try:
            async with grpc.aio.insecure_channel(node.address) as channel:
                yield server, ServerCalls(node, channel)
        finally:
            await server.stop(0.0)


async def until_closed(server: StreamServer) -> None:
    while server.connection_count:
        turned = asyncio.Event()
        asyncio.get_running_loop().call_soon(turned.set)
        await turned.wait()


def test_sessions_that_are_opened_at_once_share_a_connection() -> None:
    async def main() -> None:
        sessions = Sessions()
        sessions.release.set()
        async with sessions.served() as (server, calls):
            both = (calls.use_port(REQUEST(), sessions.response, DEADLINE_S) for _ in range(2))
            await asyncio.gather(*both)
            assert server.connection_count == 1
            calls.close()
            await until_closed(server)

    runner("uvloop")(main())


def test_a_connection_that_comes_after_the_close_is_closed() -> None:
    async def main() -> None:
        sessions = Sessions()
        async with sessions.served() as (server, calls):
            opening = asyncio.create_task(calls.use_port(REQUEST(), sessions.response, DEADLINE_S))
            await sessions.entered.wait()
            calls.close()
            sessions.release.set()
            await opening
            await until_closed(server)

    runner("uvloop")(main())
