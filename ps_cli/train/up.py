"""`pushpull up`: a local cluster without workers, which are started by hand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from ps_cli.console.options import ClusterOptions
from ps_cli.console.output import Output
from ps_cli.train.exit_rules import ExitRules, RunEnd
from ps_cli.train.run_checkpoints import make_last
from ps_cli.train.supervisor import Supervisor
from ps_runtime.cluster import join_secret
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import Launcher, ReadyRole, start_scheduler, start_servers

_POLL_S = 0.05  # interval of the look for servers that serve, in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions(ClusterOptions):
    """The options of `pushpull up`."""

    listen: Annotated[
        str, typer.Option(help="host:port of the scheduler; port 0 takes a free one.")
    ] = "127.0.0.1:0"
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Do not show the output of the roles.")
    ] = False


async def run_up(options: UpOptions, output: Output) -> int:
    """Run a cluster until a signal ends it, or the death of a role that it needs.

    Returns:
        The exit code: 128 + the signal's number, or 1 if a role died.

    Raises:
        InvalidConfig: no file can keep a join secret, which workers started by hand would need.
    """
    join_secret.found_or_made()
    shape = replace(options.shape, listen=options.listen)
    kinds = () if options.quiet else ("server", "scheduler")
    supervisor = Supervisor(output, frozenset(kinds))
    rules = ExitRules(shape, options.max_restarts)
    address = ""

    async def work() -> None:
        nonlocal address
        launcher = supervisor.launcher
        scheduler = await asyncio.to_thread(start_scheduler, launcher, shape)
        servers = await asyncio.to_thread(start_servers, launcher, shape, scheduler.address)
        await _all_served(launcher, {server.name for server in servers})
        address = scheduler.address
        output.say(_how_to_use(scheduler, shape))
        await asyncio.Event().wait()

    async def last_checkpoint(ending: RunEnd) -> None:
        if address:
            await make_last(address, options.checkpoint_last_s, ending, output)

    last = last_checkpoint if options.checkpoint_url and options.checkpoint_last_s else None
    ending = await supervisor.run(work(), rules, last)
    output.complain(ending.message)
    return ending.exit_code


async def _all_served(launcher: Launcher, names: set[str]) -> None:
    """Wait until each server has served once; what follows where one ends before is the rules'.

    Raises:
        WaitExpired: one runs, and has not served in time; the message has its last lines.
    """
    while names:
        newest = {process.name: process for process in launcher.processes}
        for process in (newest[name] for name in tuple(names)):
            if launcher.ready_file(process.command).exists():
                names.discard(process.name)
            else:
                process.check_in_time()
        await asyncio.sleep(_POLL_S)


def _how_to_use(scheduler: ReadyRole, shape: ClusterShape) -> str:
    """The commands to type next, with the cluster's address in them."""
    shells = "a shell" if shape.worker_count == 1 else f"each of {shape.worker_count} shells"
    return "\n".join(
        (
            f"cluster is up: scheduler at {scheduler.address}, {shape.server_count} servers",
            f"  export PUSHPULL_SCHEDULER={scheduler.address}",
            f"  pushpull worker SCRIPT.py          # in {shells}",
            "  pushpull status",
            f"  # as another user, or on another host: {join_secret.SECRET_FILE}, a copy of",
            f"  # {join_secret.place()}",
            f"  http://{scheduler.http_address}/metrics and /healthz",
            "Ctrl-C ends it.",
        )
    )
