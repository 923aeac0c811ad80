"""An embedded cluster for notebooks and tests: real processes that end with their parent."""

from __future__ import annotations

import contextlib
import os
from typing import Self

from ps_runtime.launch.cluster_shape import ClusterShape, UpdateLogPlan, checkpoints_of
from ps_runtime.launch.launcher import (
    CHECKPOINT_GRACE_S,
    READY_DEADLINE_S,
    Launcher,
    start_scheduler,
    start_servers,
)
from ps_worker.client.open_clients import OWN_CLUSTERS, strand


class LocalCluster:
    """A scheduler and servers on this machine; workers connect from this or any other process.

    The processes end with `stop`, at the end of the `with` block, and with this process, however it
    ends: a SIGKILL leaves nothing behind.

    Args, Blocking, Raises: as `local_cluster`.
    """

    def __init__(
        self,
        servers: int = 1,
        workers: int = 1,
        ready_deadline_s: float = READY_DEADLINE_S,
        replicas: int = 1,
        checkpoint_url: str = "",
        resume: str = "",
    ) -> None:
        shape = ClusterShape(
            servers,
            workers,
            replica_count=replicas,
            checkpoints=checkpoints_of(checkpoint_url, resume, os.environ),
            update_log=UpdateLogPlan(os.environ.get("PUSHPULL_UPDATE_LOG", "")),
        )
        self._start(shape, ready_deadline_s)

    @classmethod
    def of(cls, shape: ClusterShape, ready_deadline_s: float = READY_DEADLINE_S) -> Self:
        """A cluster of any shape; blocks and raises as `local_cluster`."""
        made = cls.__new__(cls)
        made._start(shape, ready_deadline_s)
        return made

    def _start(self, shape: ClusterShape, ready_deadline_s: float) -> None:
        self._launcher = Launcher()
        self._has_ended = False
        self._process_id = os.getpid()
        self._keeps_checkpoints = bool(shape.checkpoints.url)
        with contextlib.ExitStack() as undo:
            undo.callback(self._launcher.stop)
            self._scheduler = start_scheduler(self._launcher, shape, ready_deadline_s)
            servers = start_servers(self._launcher, shape, self._scheduler.address)
            self._servers = [self._launcher.wait_ready(each, ready_deadline_s) for each in servers]
            undo.pop_all()
        OWN_CLUSTERS.add(self)

    @property
    def address(self) -> str:
        """The scheduler's "host:port", as `ps.connect` takes it."""
        return self._scheduler.address

    @property
    def http_address(self) -> str:
        """The scheduler's "host:port" for /metrics and /healthz."""
        return self._scheduler.http_address

    @property
    def server_http_addresses(self) -> tuple[str, ...]:
        """The "host:port" of each server for /metrics, /healthz and /readyz."""
        return tuple(server.http_address for server in self._servers)

    @property
    def process_ids(self) -> dict[str, int]:
        """The process id of each role by its name: "scheduler", "server 0", ..."""
        return {process.name: process.pid for process in self._launcher.processes}

    def stop(self) -> None:
        """End all processes, after a checkpoint that is being made. Idempotent; without effect in a
        child that this process has forked.

        A client that is open stays so: close it before. What it has not committed is gone, and the
        end of this process waits for nothing of it.

        Blocking: a few seconds at most; half a minute while a checkpoint is written.
        """
        if os.getpid() != self._process_id:
            return
        if not self._has_ended:
            self._has_ended = True
            OWN_CLUSTERS.discard(self)
            strand(self.address)
        if self._keeps_checkpoints:  # servers have to live until it is complete
            self._launcher.end("scheduler", CHECKPOINT_GRACE_S)
        self._launcher.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def local_cluster(
    servers: int = 1,
    workers: int = 1,
    ready_deadline_s: float = READY_DEADLINE_S,
    replicas: int = 1,
    checkpoint_url: str = "",
    resume: str = "",
) -> LocalCluster:
    """Start a scheduler and servers on this machine, as child processes.

        with ps.local_cluster(servers=2) as cluster, ps.connect(cluster.address) as client:
            ...

    Args:
        servers: the number of servers.
        workers: the number of workers that clock 1 of a BSP table waits for.
        ready_deadline_s: seconds that each role may take until it serves.
        replicas: the number of servers that hold each range; all but one of them may die.
        checkpoint_url: where checkpoints go; empty: PUSHPULL_CHECKPOINT_URL, else nowhere.
        resume: the checkpoint that it starts from: its directory, or a directory of checkpoints;
            empty: PUSHPULL_RESUME, else none.

    Returns:
        The cluster, which ends with its `with` block, with `stop`, and with this process.

    Blocking: until all roles serve.

    Raises:
        InvalidConfig: `servers` or `workers` is below 1, or `replicas` above `servers`.
        Recovering: a role ended before it served; the message has its last lines.
        WaitExpired: a role did not serve in time; the message has its last lines.
    """
    return LocalCluster(servers, workers, ready_deadline_s, replicas, checkpoint_url, resume)
