"""What a worker process shows of itself: metrics of all its clients, /healthz, health, reflection.

The metrics are kept in any case; the ports are opened by `pushpull worker` only, since a
library that is imported somewhere has no business to listen.
"""

from __future__ import annotations

from collections.abc import Callable

from ps_core.errors import InvalidConfig
from ps_runtime import logs
from ps_runtime.metrics import NodeMetrics, WorkerMetrics, new_registry
from ps_runtime.node_server import NodeServer
from ps_runtime.ready_file import write_ready_file
from ps_worker.config import ProcessConfig
from ps_worker.loop import background

REGISTRY = new_registry()
MEASURES = WorkerMetrics(REGISTRY)
"""The metrics of this process's clients, together."""

NODE_MEASURES = NodeMetrics(REGISTRY)

_START_DEADLINE_S = 10.0
_STOP_DEADLINE_S = 5.0


def open_ports(config: ProcessConfig) -> Callable[[], None]:
    """Serve /metrics, /healthz, health and reflection; the result closes them.

    A port that cannot be bound is logged, and training goes on without.

    Blocking: until the ports are open.
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
    if config.ready_file is not None:
        write_ready_file(config.ready_file, node.address, node.http_address)
    return lambda: loop.start(node.stop(0.0)).result(_STOP_DEADLINE_S)
