"""What a worker process shows of itself: metrics of all its clients, /healthz, health, reflection.

The metrics are kept in any case; the ports are opened by `python -m ps_worker` only, since a
library that is imported somewhere has no business to listen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ps_core.errors import InvalidConfig
from ps_runtime import logs
from ps_runtime.metrics import NodeMetrics, WorkerMetrics, new_registry
from ps_runtime.node_server import LOOPBACK, NodeServer
from ps_runtime.ready_file import write_ready_file
from ps_worker.loop import background

REGISTRY = new_registry()
MEASURES = WorkerMetrics(REGISTRY)
"""The metrics of this process's clients, together."""

NODE_MEASURES = NodeMetrics(REGISTRY)

_START_DEADLINE_S = 10.0
_STOP_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """Settings of `python -m ps_worker`, beside those of `connect`; all from the environment."""

    listen: str = field(
        default=LOOPBACK,
        metadata={"help": "host:port of gRPC health and reflection; port 0: free"},
    )
    advertise: str | None = field(
        default=None, metadata={"help": "host:port or host under which others reach them"}
    )
    http_listen: str = field(
        default=LOOPBACK,
        metadata={"help": "host:port of /metrics and /healthz; port 0 is free"},
    )
    log_level: str = field(
        default="warning",
        metadata={"help": "debug, info, warning or error: pushpull's own lines"},
    )
    ready_file: Path | None = field(
        default=None, metadata={"help": "file to write when serving: the addresses as JSON"}
    )


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
