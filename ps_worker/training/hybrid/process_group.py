"""torch.distributed's process group of a cluster's workers.

A script that was started by torchrun, or that sets a group up itself, has one. Otherwise rank 0
opens a store, and the cluster tells the others where it is.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import distributed

from ps_core.errors import InvalidConfig
from ps_runtime.observe import logs

if TYPE_CHECKING:
    from ps_worker.client.client import Client

_STORE_S = 60.0


def join_process_group(client: Client) -> None:
    """Make this worker part of a process group of all workers, unless it is; then check it. The
    ranks are the cluster's.

    Blocking: until every worker has called this.

    Raises:
        InvalidConfig: torch has no torch.distributed; or the process group that there is has
            another size, or gives this worker another rank; or the worker joined others that have
            a group already, which takes nobody in.
    """
    rank, worker_count = client.rank, client.world_size
    if client.is_late_joiner:
        raise InvalidConfig(
            f"worker {rank} joins others that train, and their torch.distributed process group "
            "takes nobody in: start all workers again, together, from the last checkpoint "
            "(pushpull train --resume)"
        )
    if not distributed.is_available():
        raise InvalidConfig("this torch has no torch.distributed; expected a build with it")
    if not distributed.is_initialized():
        _make(client)
    found = distributed.get_rank(), distributed.get_world_size()
    if found != (rank, worker_count):
        raise InvalidConfig(
            f"this process is rank {found[0]} of {found[1]} in torch.distributed, and worker "
            f"{rank} of {worker_count} in the cluster; expected the same: connect without rank=, "
            "or let HybridOptimizer set the process group up"
        )


def _make(client: Client) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store: TCPStore | None = None
    place: tuple[str, int] | None = None
    if client.rank == 0:
        host = _own_host(client.connection.config.scheduler[0])
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        place = host, store.port
    host, port = client.broadcast(place, name="torch.distributed's store")
    if store is None:
        store = TCPStore(host, port, timeout=timedelta(seconds=_STORE_S))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(
        backend, store=store, rank=client.rank, world_size=client.world_size
    )
    atexit.register(_end)
    logs.info("process_group_made", backend=backend, store=f"{host}:{port}")


def _end() -> None:
    with contextlib.suppress(RuntimeError, AssertionError):  # the others may have gone first
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _own_host(scheduler: str) -> str:
    """This machine's address on the way to the scheduler, where other workers are reached, too."""
    host, _, port = scheduler.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
    return own
