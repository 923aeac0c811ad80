"""The servers of every node: its own gRPC services, health, reflection, and the HTTP port.

All run on one event loop; no call holds a thread, so a parked pull costs a future.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from ps_core.errors import InvalidConfig, InvalidTensor
from ps_runtime.grpc.addresses import advertised, join_address, split_address
from ps_runtime.grpc.channels import SERVER_OPTIONS
from ps_runtime.grpc.errors import abort
from ps_runtime.grpc.http_endpoint import HttpEndpoint
from ps_runtime.observe import logs
from ps_runtime.observe.metrics import TurnMetrics
from ps_runtime.system.turns import TurnMeter

Service = tuple[str, Callable[[grpc.aio.Server], object]]
"""A service's full name, and the function that adds its servicer to a server."""

READINESS = "readiness"
"""The name of readiness in the health service."""

LOOPBACK = "127.0.0.1:0"
"""The default address: loopback, at a free port."""


class NodeServer:
    """A running gRPC server with its health, reflection and HTTP port. Made by `start`.

    Calls are answered from the start, but `/healthz` answers 503 and health NOT_SERVING until the
    role calls `set_serving(True)`. A serving node is ready unless `set_unready` gave a reason:
    `/readyz` and health's service "readiness" say so.

    Attributes:
        degraded: a problem of more than this node, in words, for `/healthz`; empty: none.
    """

    def __init__(self, registry: CollectorRegistry, service_names: Sequence[str]) -> None:
        self.address = ""
        self.http_address = ""
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(_RefuseMalformed(),))
        self._service_names = ("", *service_names)
        self._health = health.aio.HealthServicer()
        self._turns = TurnMeter()
        TurnMetrics(registry).watch(self._turns)
        self._http = HttpEndpoint(
            registry, lambda: self.is_serving, lambda: self.why_unready, lambda: self.degraded
        )
        self.degraded = ""
        self.is_serving = False
        self._unready = self._waits_for = ""
        self._is_stopped = False
        self._updates: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(
        cls,
        listen: str = LOOPBACK,
        *,
        advertise: str | None = None,
        http_listen: str = LOOPBACK,
        services: Sequence[Service] = (),
        registry: CollectorRegistry,
    ) -> NodeServer:
        """Bind both ports, of which 0 takes a free one, or raise InvalidConfig; answer calls.

        `advertise` is as in `addresses.advertised`; `registry` has the metrics of /metrics.
        """
        node = cls(registry, [name for name, _ in services])
        for _, add_to_server in services:
            add_to_server(node._server)
        health_pb2_grpc.add_HealthServicer_to_server(node._health, node._server)
        reflection.enable_server_reflection(
            (*(name for name, _ in services), health.SERVICE_NAME, reflection.SERVICE_NAME),
            node._server,
        )
        await node._publish_health()
        host, port = split_address(listen, "listen")
        bound = node._bind(join_address(host, port))
        node.address = advertised(advertise, host, bound)
        await node._http.start(http_listen)
        node.http_address = node._http.address
        await node._server.start()
        node._turns.start()
        logs.info("listening", address=node.address, http_address=node.http_address)
        return node

    def set_serving(self, is_serving: bool) -> None:
        """Set the state in health and /healthz; watchers hear of it in the loop's next turns."""
        if is_serving == self.is_serving or self._is_stopped:
            return
        self.is_serving = is_serving
        logs.info("serving" if is_serving else "not_serving", address=self.address)
        self._publish_soon()

    @property
    def why_unready(self) -> str:
        """The reason why the node is not ready; empty: it is ready."""
        if self.is_serving:
            return self._unready
        return f"not serving: {self._waits_for}" if self._waits_for else "not serving"

    def set_unready(self, reason: str) -> None:
        """Set the reason in health and /readyz why other nodes cannot rely on this one alone. An
        empty `reason` makes the node ready as soon as it serves.
        """
        if bool(reason) != bool(self._unready) and not self._is_stopped:
            logs.info("not_ready" if reason else "ready", **({"reason": reason} if reason else {}))
            self._unready = reason
            self._publish_soon()
        self._unready = reason

    def set_waiting(self, reason: str) -> None:
        """Set the reason in /readyz why the node does not serve yet; empty: none that it knows."""
        self._waits_for = reason

    def _publish_soon(self) -> None:
        update = asyncio.get_running_loop().create_task(self._publish_health())
        self._updates.add(update)
        update.add_done_callback(self._updates.discard)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let those in progress finish within `grace_s`, then cut them.

        Health says NOT_SERVING and /healthz 503 during the grace. Idempotent.

        Blocking: up to `grace_s` and a little.
        """
        if self._is_stopped:
            return
        self.set_serving(False)
        self._is_stopped = True
        self._turns.stop()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        await self._http.stop()
        await asyncio.gather(*self._updates)
        logs.info("stopped", address=self.address)

    def _bind(self, listen: str) -> int:
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise InvalidConfig(f"listen is '{listen}', which cannot be bound: {error}") from error
        if port == 0:
            raise InvalidConfig(f"listen is '{listen}', which cannot be bound")
        return port

    async def _publish_health(self) -> None:
        states = health_pb2.HealthCheckResponse
        for name in self._service_names:
            await self._health.set(name, states.SERVING if self.is_serving else states.NOT_SERVING)
        is_ready = not self.why_unready
        await self._health.set(READINESS, states.SERVING if is_ready else states.NOT_SERVING)


class _RefuseMalformed(grpc.aio.ServerInterceptor):
    """Answers a single request that does not parse with InvalidTensor; gRPC would answer UNKNOWN.
    Messages of a request stream are parsed inside the servicer, under `translated`.
    """

    def __init__(self) -> None:
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        name = handler_call_details.method
        if name not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None or handler.request_streaming or handler.request_deserializer is None:
                return handler
            self._wrapped[name] = _guarded(name, handler)
        return self._wrapped[name]


def _guarded(name: str, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
    def deserialize(payload: bytes) -> object:
        try:
            return handler.request_deserializer(payload)
        except DecodeError as error:  # until the call can end with it
            return InvalidTensor(f"the request of {name} does not parse: {error}")

    async def unary(request: Any, context: Any) -> Any:
        if isinstance(request, InvalidTensor):
            await abort(context, request)
        return await (handler.unary_unary or handler.unary_stream)(request, context)

    async def stream(request: Any, context: Any) -> Any:
        if isinstance(request, InvalidTensor):
            await abort(context, request)
        async with contextlib.aclosing(handler.unary_stream(request, context)) as responses:
            async for response in responses:
                yield response

    if not handler.response_streaming:
        return grpc.unary_unary_rpc_method_handler(unary, deserialize, handler.response_serializer)
    # gRPC distinguishes a generator from a coroutine that writes through its context.
    yields = inspect.isasyncgenfunction(handler.unary_stream)
    return grpc.unary_stream_rpc_method_handler(
        stream if yields else unary, deserialize, handler.response_serializer
    )
