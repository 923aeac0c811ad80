"""`pushpull up`: a local cluster alone, for workers that are started by hand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ps_cli.output import Output
from ps_cli.supervisor import Supervisor
from ps_runtime.launcher import ClusterShape, ReadyRole, start_scheduler, start_servers


@dataclass(frozen=True, slots=True)
class UpSettings:
    """The cluster to run; `listen` is the scheduler's "host:port", port 0 for a free one;
    `max_workers` is how many workers there may be in the end, 0 for `worker_count`.
    """

    worker_count: int
    server_count: int
    listen: str
    is_quiet: bool = False
    max_workers: int = 0


async def run_up(settings: UpSettings, output: Output) -> int:
    """Run a cluster until a signal or a role's death ends it.

    Returns:
        The exit code: 128 + the signal's number, or 1 if a role died.
    """
    kinds = () if settings.is_quiet else ("server", "scheduler")
    supervisor = Supervisor(output, frozenset(kinds))
    ending = await supervisor.run(_work(supervisor, settings, output), worker_count=0)
    output.complain(ending.message)
    return ending.exit_code


async def _work(supervisor: Supervisor, settings: UpSettings, output: Output) -> None:
    launcher = supervisor.launcher
    shape = ClusterShape(
        settings.server_count,
        settings.worker_count,
        listen=settings.listen,
        max_workers=settings.max_workers,
    )
    scheduler = await asyncio.to_thread(start_scheduler, launcher, shape)
    servers = await asyncio.to_thread(start_servers, launcher, shape, scheduler.address)
    for server in servers:
        await asyncio.to_thread(launcher.wait_ready, server)
    output.say(how_to_use(scheduler, settings))
    await asyncio.Event().wait()


def how_to_use(scheduler: ReadyRole, settings: UpSettings) -> str:
    """What to type next, with the cluster's address in it."""
    shells = "a shell" if settings.worker_count == 1 else f"each of {settings.worker_count} shells"
    return "\n".join(
        (
            f"cluster is up: scheduler at {scheduler.address}, {settings.server_count} servers",
            f"  export PUSHPULL_SCHEDULER={scheduler.address}",
            f"  python -m ps_worker SCRIPT.py      # in {shells}",
            "  pushpull status",
            f"  http://{scheduler.http_address}/metrics and /healthz",
            "Ctrl-C ends it.",
        )
    )
