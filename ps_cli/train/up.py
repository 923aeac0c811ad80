"""`pushpull up`: a local cluster without workers, which are started by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import typer

from ps_cli.console.exit_rules import ExitRules, RunEnd
from ps_cli.console.options import (
    CheckpointEvery,
    CheckpointFullEvery,
    CheckpointKeep,
    CheckpointUrl,
    LeaseS,
    MaxRestarts,
    MaxWorkerCount,
    MinInSync,
    PlansStorage,
    ReplicaCount,
    Resume,
    ServerCount,
    UpdateLogMb,
    UpdateLogPath,
    UpdateLogSync,
    WorkerCount,
)
from ps_cli.console.output import Output
from ps_cli.train.run_checkpoints import make_last
from ps_cli.train.supervisor import Supervisor
from ps_runtime.cluster import join_secret
from ps_runtime.launch.cluster_shape import (
    NO_CHECKPOINTS,
    NO_UPDATE_LOG,
    CheckpointPlan,
    ClusterShape,
    UpdateLogPlan,
)
from ps_runtime.launch.launcher import ReadyRole, start_scheduler, start_servers


@dataclass(frozen=True, slots=True)
class UpOptions(PlansStorage):
    """The options of `pushpull up`."""

    workers: WorkerCount = 1
    max_workers: MaxWorkerCount = 0
    servers: ServerCount = 1
    replicas: ReplicaCount = 1
    min_in_sync: MinInSync = 1
    lease_s: LeaseS = 0.0
    checkpoint_url: CheckpointUrl = ""
    checkpoint_every: CheckpointEvery = ""
    checkpoint_keep: CheckpointKeep = 0
    checkpoint_full_every: CheckpointFullEvery = 1
    resume: Resume = ""
    update_log: UpdateLogPath = ""
    update_log_mb: UpdateLogMb = 0
    update_log_sync: UpdateLogSync = False
    max_restarts: MaxRestarts = None
    listen: Annotated[
        str,
        typer.Option(help="host:port of the scheduler; port 0 takes a free one."),
    ] = "127.0.0.1:0"
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Do not show the output of the roles.")
    ] = False


@dataclass(frozen=True, slots=True)
class UpSettings:
    """The cluster to run.

    Attributes:
        worker_count: the workers that clock 1 of a BSP table waits for.
        listen: the scheduler's "host:port"; port 0 takes a free one.
        is_quiet: the output of the roles is not shown.
        max_workers: the most workers at a time; 0: `worker_count`.
        replica_count: servers that hold each range.
        min_in_sync: replicas that must hold a push before it counts.
        lease_s: seconds of silence after which a node counts as silent; 0: the scheduler's own
            setting.
        max_restarts: restarts of dead servers; None: as `ExitRules`.
    """

    worker_count: int
    server_count: int
    listen: str
    is_quiet: bool = False
    max_workers: int = 0
    replica_count: int = 1
    min_in_sync: int = 1
    lease_s: float = 0.0
    checkpoints: CheckpointPlan = NO_CHECKPOINTS
    update_log: UpdateLogPlan = NO_UPDATE_LOG
    max_restarts: int | None = None


async def run_up(settings: UpSettings, output: Output) -> int:
    """Run a cluster until a signal ends it, or the death of a role that it needs.

    Returns:
        The exit code: 128 + the signal's number, or 1 if a role died.

    Raises:
        InvalidConfig: the settings contradict each other.
    """
    shape = ClusterShape(
        settings.server_count,
        settings.worker_count,
        listen=settings.listen,
        max_workers=settings.max_workers,
        replica_count=settings.replica_count,
        min_in_sync=settings.min_in_sync,
        lease_s=settings.lease_s,
        checkpoints=settings.checkpoints,
        update_log=settings.update_log,
        has_journal=True,
    )
    kinds = () if settings.is_quiet else ("server", "scheduler")
    supervisor = Supervisor(output, frozenset(kinds))
    rules = ExitRules(
        worker_count=0,
        replica_count=settings.replica_count,
        max_restarts=settings.max_restarts,
        has_update_log=bool(settings.update_log.path),
    )
    addresses: list[str] = []

    def tell(scheduler: ReadyRole) -> None:
        addresses.append(scheduler.address)
        output.say(how_to_use(scheduler, settings))

    async def last_checkpoint(ending: RunEnd) -> None:
        if addresses:
            await make_last(addresses[0], ending, output)

    last = last_checkpoint if settings.checkpoints.url else None
    ending = await supervisor.run(_work(supervisor, shape, tell), rules, last)
    output.complain(ending.message)
    return ending.exit_code


async def _work(
    supervisor: Supervisor, shape: ClusterShape, tell: Callable[[ReadyRole], None]
) -> None:
    launcher = supervisor.launcher
    scheduler = await asyncio.to_thread(start_scheduler, launcher, shape)
    servers = await asyncio.to_thread(start_servers, launcher, shape, scheduler.address)
    for server in servers:
        await asyncio.to_thread(launcher.wait_ready, server)
    tell(scheduler)
    await asyncio.Event().wait()


def how_to_use(scheduler: ReadyRole, settings: UpSettings) -> str:
    """The commands to type next, with the cluster's address in them."""
    shells = "a shell" if settings.worker_count == 1 else f"each of {settings.worker_count} shells"
    return "\n".join(
        (
            f"cluster is up: scheduler at {scheduler.address}, {settings.server_count} servers",
            f"  export PUSHPULL_SCHEDULER={scheduler.address}",
            f"  pushpull worker SCRIPT.py          # in {shells}",
            "  pushpull status",
            f"  # as another user, or on another host: {join_secret.SECRET_FILE}, a copy of",
            f"  # {join_secret.place()}",
            f"  http://{scheduler.http_address}/metrics and /healthz",
            "Ctrl-C ends it.",
        )
    )
