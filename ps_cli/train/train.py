"""`pushpull train`: a local cluster and N copies of a training script."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from ps_cli.console.options import LAST_CHECKPOINT_S, ClusterOptions, Script, WorkerCount
from ps_cli.console.output import Output
from ps_cli.console.progress import (
    RateWindow,
    WorkerRow,
    counted,
    early_ends,
    live_view,
    outsiders,
    plain_lines,
    still_awaited,
    worker_samples,
)
from ps_cli.console.scheduler_query import SchedulerQuery
from ps_cli.train.devices import AUTO, devices_of, remark, share
from ps_cli.train.exit_rules import FAILURE_EXIT_CODE, ExitRules, RunEnd
from ps_cli.train.run_checkpoints import (
    CheckpointWatch,
    RunBeginning,
    earlier_checkpoints,
    make_last,
    tell_beginning,
    tell_how_to_go_on,
)
from ps_cli.train.supervisor import Supervisor
from ps_core.errors import PushpullError
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import RoleExit, start_scheduler, start_servers, worker_command
from ps_runtime.launch.role_environment import thread_count
from ps_runtime.system.capacity import usable_core_count

LIVE_INTERVAL_S = 0.5
"""Between two views of the live table: workers report each second."""

LOOK_S = 1.0
"""Between two questions to the scheduler, if nothing is shown before."""

CHECKPOINT_EXIT_CODE = 3
"""The run ended well, but a checkpoint failed, periodic or last."""

DEFAULT_LINE_INTERVAL_S = 5.0

ALL_KINDS = frozenset({"worker", "server", "scheduler"})
"""The kinds of role, as the launcher names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions(ClusterOptions):
    """The options of `pushpull train`."""

    script: Script
    script_arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGS", help="Arguments of the script, after `--`."),
    ] = None
    workers: WorkerCount = 2
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between progress lines without a terminal.")
    ] = DEFAULT_LINE_INTERVAL_S
    devices: Annotated[
        str,
        typer.Option(
            help="The GPUs that the workers get: auto deals out all that this process may use, a "
            "list such as 0,1,3 those; none leaves CUDA_VISIBLE_DEVICES as it is."
        ),
    ] = AUTO
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Show the output of the scheduler and the servers, too."
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """The script and the cluster of a run.

    Attributes:
        arguments: the script's own.
        line_interval_s: seconds between progress lines without a terminal.
        shown_kinds: the kinds of role whose lines are shown.
        environment: variables for the workers alone.
        max_restarts: restarts of workers and servers together; None: as `ExitRules`.
        devices: as of `devices_of`.
        last_checkpoint_s: seconds that the last checkpoint may take; 0: none is made.
    """

    script: Path
    arguments: tuple[str, ...]
    shape: ClusterShape
    line_interval_s: float = DEFAULT_LINE_INTERVAL_S
    shown_kinds: frozenset[str] = frozenset({"worker"})
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int | None = None
    devices: str = AUTO
    last_checkpoint_s: float = LAST_CHECKPOINT_S


class SharedCluster:
    """A cluster for several runs, one after the other; it is emptied between them.

    Attributes:
        output: takes the roles' lines.
        scheduler: the scheduler's address; empty until it was started.
    """

    def __init__(self, output: Output, shown_kinds: frozenset[str]) -> None:
        self.output = output
        self._shown_kinds = shown_kinds
        self._supervisor: Supervisor | None = None
        self.scheduler = ""

    def supervised(self) -> Supervisor:
        """The cluster's supervisor; a new one, without roles yet, if roles of the last are gone."""
        if self._supervisor is None or not self._supervisor.is_whole:
            self._supervisor, self.scheduler = Supervisor(self.output, self._shown_kinds), ""
        return self._supervisor

    async def renew(self) -> None:
        """Empty the cluster for the next run; if that fails stop it, and the run gets another."""
        if self._supervisor is None or not self.scheduler:
            return
        if not self._supervisor.is_whole:
            await self.stop()
            return
        try:
            async with SchedulerQuery(self.scheduler) as query:
                await query.begin_anew()
        except PushpullError as error:
            self.output.say(f"the next run has a cluster of its own: {error.message}")
            await self.stop()

    async def stop(self) -> None:
        """Stop the roles. Idempotent."""
        if self._supervisor is not None:
            await self._supervisor.stop()


class TrainRun:
    """One run, from the first process to the last line, on the cluster `shared`, which it leaves as
    it is, or on one of its own.
    """

    def __init__(
        self, settings: TrainSettings, output: Output, shared: SharedCluster | None = None
    ) -> None:
        self._settings = settings
        self._devices = devices_of(settings.devices, os.environ)
        self._shared = shared
        self._output = output
        self._rates = RateWindow()
        self._began_s = time.monotonic()
        self._shown: tuple[WorkerRow, ...] = ()
        self._note = ""
        self._awaited = ""
        self._scheduler = ""
        self._checkpoints = CheckpointWatch(output)
        self._makes_last = bool(settings.shape.checkpoints.url and settings.last_checkpoint_s)
        self._has_last = not self._makes_last
        self._cut_off: set[int] = set()
        self._joined: set[int] = set()
        self._earlier: Collection[str] = ()  # names of checkpoints that were there before
        self._beginning = RunBeginning()

    async def run(self) -> int:
        """Train to the end, print how the run ended, and return the exit code of `ending`."""
        ending = await self.ending()
        self._tell(ending)
        if ending.exit_code == FAILURE_EXIT_CODE:
            checkpoints = self._settings.shape.checkpoints
            known = self._earlier, self._beginning
            await asyncio.to_thread(tell_how_to_go_on, checkpoints, *known, self._output)
        return ending.exit_code

    async def ending(self) -> RunEnd:
        """Train to the end: exit code 0 if every worker finished, 1 if a role died that the run
        needs, 3 if every worker finished but a checkpoint failed, 128 + the number of the signal
        that ended it.
        """
        settings, shape = self._settings, self._settings.shape
        environment, note = thread_environment(os.environ, usable_core_count(), shape.worker_count)
        for line in filter(None, (note, remark(self._devices, shape.worker_count))):
            self._output.say(line)
        self._earlier = await asyncio.to_thread(
            earlier_checkpoints, shape.checkpoints, self._output
        )
        cluster = self._shared or SharedCluster(self._output, settings.shown_kinds)
        supervisor = cluster.supervised()
        ending = await supervisor.run(
            self._work(supervisor, replace(shape, environment=environment), cluster),
            ExitRules(shape, settings.max_restarts),
            self._last,
            self._ended,
            leaves_roles=self._shared is not None,
        )
        self._output.close()
        if not ending.exit_code and (self._checkpoints.failed_count or not self._has_last):
            return replace(ending, exit_code=CHECKPOINT_EXIT_CODE)
        return ending

    async def _ended(self, role_exit: RoleExit) -> None:
        """Tell the scheduler that a worker's process has ended, so that no lease is waited for."""
        launch_id = role_exit.command.launch_id
        if not launch_id or not self._scheduler:
            return
        with contextlib.suppress(PushpullError):  # then its lease runs out
            async with SchedulerQuery(self._scheduler) as query:
                if await query.process_ended(launch_id, role_exit.fate):
                    self._cut_off.add(role_exit.command.index or 0)

    async def _last(self, ending: RunEnd) -> None:
        if not self._scheduler:
            return
        await self._look()
        if self._makes_last:
            last_s = self._settings.last_checkpoint_s
            self._has_last = await make_last(self._scheduler, last_s, ending, self._output)
            await self._look()  # a checkpoint that the script did not wait for may have failed

    async def _look(self) -> None:
        with contextlib.suppress(PushpullError):
            async with SchedulerQuery(self._scheduler) as query:
                await self._observe(query)

    async def _observe(self, query: SchedulerQuery) -> None:
        status, session = await query.status(), await query.session()
        shape, view = self._settings.shape, status.view
        self._beginning = RunBeginning(view.cluster_id, view.restored_from, session.timeline)
        self._awaited = still_awaited(status, shape.server_count, shape.worker_count)
        samples = worker_samples(status, time.monotonic())
        self._joined.update(sample.rank for sample in samples)
        self._rates.observe(samples)
        self._checkpoints.observe(status.checkpoints)

    async def _work(
        self, supervisor: Supervisor, shape: ClusterShape, cluster: SharedCluster
    ) -> None:
        settings, launcher = self._settings, supervisor.launcher
        is_new = not cluster.scheduler
        if is_new:
            self._output.say("starting the scheduler")
            started = await asyncio.to_thread(start_scheduler, launcher, shape)
            await asyncio.to_thread(start_servers, launcher, shape, started.address)
            cluster.scheduler = started.address
            workers = counted(shape.worker_count, "worker")
            servers = counted(shape.server_count, "server")
            self._output.say(
                f"scheduler at {cluster.scheduler}; starting {workers} on {servers}, which import "
                "torch first"
            )
        self._scheduler = cluster.scheduler
        script = (str(settings.script), *settings.arguments)
        environment = {**shape.environment, **settings.environment}
        for rank in range(shape.worker_count):
            own = {**environment, **share(self._devices, rank, shape.worker_count)}
            command = worker_command(rank, cluster.scheduler, script, own)
            await asyncio.to_thread(launcher.start, command)
        async with SchedulerQuery(cluster.scheduler) as query:
            if is_new:
                with contextlib.suppress(PushpullError):
                    restored_from = (await query.status()).view.restored_from
                    tell_beginning(shape.checkpoints, restored_from, self._output)
            await self._show_progress(query)

    async def _show_progress(self, query: SchedulerQuery) -> None:
        """Ask the scheduler often, so that failures appear at once; show at the set interval."""
        interval_s = LIVE_INTERVAL_S if self._output.is_terminal else self._settings.line_interval_s
        shown_s = -math.inf
        while True:
            try:
                await self._observe(query)
                self._note = ""
            except PushpullError as error:
                self._note = f"(the scheduler does not answer: {error.message})"
            if time.monotonic() - shown_s >= interval_s:
                shown_s = time.monotonic()
                self._show()
            await asyncio.sleep(min(max(shown_s + interval_s - time.monotonic(), 0), LOOK_S))

    def _show(self) -> None:
        elapsed_s = time.monotonic() - self._began_s
        rows = self._rates.rows()
        if self._output.is_terminal:
            self._output.show(live_view(rows, elapsed_s, self._note or self._awaited))
            return
        has_ended = all(row.sample.state in ("left", "gone") for row in rows)
        if rows and rows == self._shown and has_ended:
            return
        self._shown = rows
        lines = plain_lines(rows, elapsed_s, self._awaited)
        for line in [*lines, self._note] if self._note else lines:
            self._output.say(line)

    def _tell(self, ending: RunEnd) -> None:
        if ending.exit_code not in (0, CHECKPOINT_EXIT_CODE):
            self._output.complain(ending.message)
            return
        elapsed_s = time.monotonic() - self._began_s
        count = self._settings.shape.worker_count
        early = early_ends(self._rates.rows(), self._cut_off)
        finished = f"{count - len(early)} of {count}" if early else f"{count}"
        self._output.say(f"{finished} workers finished in {elapsed_s:.1f} s")
        is_known = bool(self._beginning.cluster_id)
        absent = outsiders(self._joined, count) if is_known else ""
        for line in filter(None, (*early, absent)):
            self._output.warn(line)
        if ending.exit_code:
            told = "the last checkpoint failed"
            if self._has_last:
                failed = counted(self._checkpoints.failed_count, "checkpoint")
                told = f"{failed} before the last one failed; the last one is complete"
            self._output.complain(f"the run has ended well, but {told}")


def thread_environment(
    inherited: Mapping[str, str], core_count: int, worker_count: int
) -> tuple[dict[str, str], str]:
    """The variable that limits each process's threads, and a line about it; a user's setting wins.
    Without it, N workers with a thread for each core would be slower than one.
    """
    if "OMP_NUM_THREADS" in inherited:
        return {}, ""
    threads = thread_count(core_count, worker_count)
    remark = (
        f"OMP_NUM_THREADS={threads} for each process ({core_count} cores, {worker_count} workers); "
        "set it yourself to use another number"
    )
    return {"OMP_NUM_THREADS": str(threads)}, remark
