"""The metrics of a worker process, and its ports: /metrics, /healthz, gRPC health, reflection.

`pushpull worker` opens the ports; in any other process a client opens an HTTP port only on request
(`connect(http_listen=...)`, or PUSHPULL_HTTP_LISTEN), as no imported library should listen unasked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ps_core.codecs.choices import PushCodec
from ps_core.errors import InvalidConfig
from ps_runtime.grpc.http_endpoint import HttpEndpoint
from ps_runtime.grpc.node_server import NodeServer
from ps_runtime.launch.ready_file import write_ready_file
from ps_runtime.observe import logs
from ps_runtime.observe.metrics import NodeMetrics, WorkerMetrics, new_registry
from ps_worker.transport.config import ProcessConfig
from ps_worker.transport.loop import background

REGISTRY = new_registry()
MEASURES = WorkerMetrics(REGISTRY)
"""The metrics of this process's clients, together."""

NODE_MEASURES = NodeMetrics(REGISTRY)

_START_DEADLINE_S = 10.0
_STOP_DEADLINE_S = 5.0


def open_ports(config: ProcessConfig) -> Callable[[], None]:
    """Serve /metrics, /healthz, health and reflection, and wait until the ports are open; the
    result closes them. If a port cannot be bound, this logs it, and training goes on without.
    """
    loop = background()

    async def start() -> NodeServer:
        node = await NodeServer.start(
            config.listen,
            advertise=config.advertise,
            http_listen=config.http_listen,
            registry=REGISTRY,
        )
        node.set_serving(True)
        return node

    try:
        node = loop.start(start()).result(_START_DEADLINE_S)
    except InvalidConfig as error:
        logs.warning("metrics_are_not_served", error=error.message)
        return lambda: None
    PORT.take_over(node.http_address)
    if config.ready_file is not None:
        write_ready_file(config.ready_file, node.address, node.http_address)

    def close() -> None:
        try:
            loop.start(node.stop(0.0)).result(_STOP_DEADLINE_S)
        except TimeoutError:  # the process still ends with its script's exit status
            logs.warning("ports_not_closed", waited_s=_STOP_DEADLINE_S)

    return close


class HttpPort:
    """The HTTP port of a process whose clients asked for one; open while one of them is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._endpoint: HttpEndpoint | None = None
        self._user_count = 0
        self._address = ""  # of a port of the process, which no client closes

    def take_over(self, address: str) -> None:
        self._address = address

    def open(self, listen: str) -> str:
        """Serve /metrics and /healthz, unless this process does; the address, which needs a
        `close`, is empty if the port cannot be bound, which is logged.
        """
        with self._lock:
            if self._address:
                return self._address
            if self._endpoint is None:
                endpoint = HttpEndpoint(REGISTRY, lambda: True, str)
                try:
                    background().start(endpoint.start(listen)).result(_START_DEADLINE_S)
                except InvalidConfig as error:
                    logs.warning("metrics_are_not_served", error=error.message)
                    return ""
                self._endpoint = endpoint
            self._user_count += 1
            return self._endpoint.address

    def close(self) -> None:
        with self._lock:
            self._user_count = max(self._user_count - 1, 0)
            endpoint = None if self._user_count else self._endpoint
            if endpoint is not None:
                self._endpoint = None
                background().start(endpoint.stop()).result(_STOP_DEADLINE_S)


PORT = HttpPort()
"""The port of this process."""


def tell_of_fall_back(table: str, codec: PushCodec, count: int) -> None:
    """A block of the table is pushed in int8 from now on; so are `count` in all."""
    MEASURES.fallen_back_blocks.inc()
    if count == 1:
        logs.warning(
            "residual_outgrew_gradients",
            table=table,
            push_codec=codec,
            done="a block is pushed in int8 from now on, and so will others be that need it",
            remedy="a denser push_codec, or a smaller learning rate",
        )
