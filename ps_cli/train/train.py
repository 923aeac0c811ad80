"""`pushpull train`: a local cluster and N copies of a training script."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from ps_cli.console.exit_rules import Ending, ExitRules
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
    Script,
    ServerCount,
    UpdateLogMb,
    UpdateLogPath,
    UpdateLogSync,
    WorkerCount,
)
from ps_cli.console.output import Output
from ps_cli.console.progress import (
    RateWindow,
    WorkerRow,
    counted,
    early_ends,
    live_view,
    plain_lines,
    still_awaited,
    worker_samples,
)
from ps_cli.console.scheduler_query import SchedulerQuery
from ps_cli.train.run_checkpoints import (
    CheckpointWatch,
    make_last,
    tell_beginning,
    warn_of_earlier_runs,
)
from ps_cli.train.supervisor import Supervisor
from ps_core.errors import PushpullError
from ps_runtime.launch.cluster_shape import (
    NO_CHECKPOINTS,
    NO_UPDATE_LOG,
    CheckpointPlan,
    ClusterShape,
    UpdateLogPlan,
)
from ps_runtime.launch.launcher import RoleExit, start_scheduler, start_servers, worker_command
from ps_runtime.launch.role_environment import thread_count
from ps_runtime.system.capacity import usable_core_count
from pushpull.v1 import scheduler_pb2

LIVE_INTERVAL_S = 0.5
"""The workers report each second; half of that keeps the table at most half a second behind."""

LOOK_S = 1.0
"""How often the scheduler is asked where nothing is shown meanwhile."""

CHECKPOINT_EXIT_CODE = 3
"""The run ended well, and a checkpoint failed, periodic or last."""

DEFAULT_LINE_INTERVAL_S = 5.0

ALL_KINDS = frozenset({"worker", "server", "scheduler"})
"""The kinds of role, as the launcher names them."""


@dataclass(frozen=True, slots=True)
class TrainOptions(PlansStorage):
    """The options of `pushpull train` as they are given."""

    script: Script
    script_arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGS", help="Arguments of the script, after `--`."),
    ] = None
    workers: WorkerCount = 2
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
    interval: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds between progress lines where there is no terminal."),
    ] = DEFAULT_LINE_INTERVAL_S
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show what the scheduler and the servers say, too."),
    ] = False


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What to train with what.

    Attributes:
        script: the training script.
        arguments: its own.
        worker_count: copies of it.
        server_count: servers that share the parameters.
        line_interval_s: seconds between progress lines where the output is no terminal.
        shown_kinds: the kinds of role whose lines are shown.
        environment: variables for the workers alone.
        max_workers: workers that there may be with those that are started by hand; 0: the copies.
        replica_count: servers that hold each range.
        min_in_sync: replicas that must hold a push before it counts.
        lease_s: when a node counts as silent, in seconds; 0: the scheduler's own setting.
        checkpoints: where it keeps them, and which it starts from.
        update_log: where its servers keep what they did.
        max_restarts: how many dead roles may be started again, all in all; None: as `ExitRules`.
    """

    script: Path
    arguments: tuple[str, ...]
    worker_count: int
    server_count: int
    line_interval_s: float = DEFAULT_LINE_INTERVAL_S
    shown_kinds: frozenset[str] = frozenset({"worker"})
    environment: Mapping[str, str] = field(default_factory=dict)
    max_workers: int = 0
    replica_count: int = 1
    min_in_sync: int = 1
    lease_s: float = 0.0
    checkpoints: CheckpointPlan = NO_CHECKPOINTS
    update_log: UpdateLogPlan = NO_UPDATE_LOG
    max_restarts: int | None = None


class KeptCluster:
    """A cluster that several runs have one after the other, each with nothing of those before.

    Args:
        output: where its roles' lines go.
        shown_kinds: the kinds of role whose lines are shown.

    Attributes:
        scheduler: its scheduler's address; empty: it has not been started.
    """

    def __init__(self, output: Output, shown_kinds: frozenset[str]) -> None:
        self._output = output
        self._shown_kinds = shown_kinds
        self._supervisor: Supervisor | None = None
        self.scheduler = ""

    def supervised(self) -> Supervisor:
        """Who watches it: another one, that has no cluster yet, where the last is not whole."""
        if self._supervisor is None or not self._supervisor.is_whole:
            self._supervisor, self.scheduler = Supervisor(self._output, self._shown_kinds), ""
        return self._supervisor

    async def renew(self) -> None:
        """Have it begin anew for the next run; where that cannot be, stop it: then another comes
        in its place.
        """
        if self._supervisor is None or not self.scheduler:
            return
        if not self._supervisor.is_whole:
            await self.stop()
            return
        try:
            async with SchedulerQuery(self.scheduler) as query:
                await query.begin_anew()
        except PushpullError as error:
            self._output.say(f"the next run has a cluster of its own: {error.message}")
            await self.stop()

    async def stop(self) -> None:
        """Stop its roles. Idempotent."""
        if self._supervisor is not None:
            await self._supervisor.stop()


class TrainRun:
    """One run, from the first process to the last line.

    Args:
        settings: what it trains.
        output: where it says so.
        kept: the cluster that it trains on, and leaves where it is; None: one of its own.
    """

    def __init__(
        self, settings: TrainSettings, output: Output, kept: KeptCluster | None = None
    ) -> None:
        self._settings = settings
        self._kept = kept
        self._output = output
        self._rates = RateWindow()
        self._began_s = time.monotonic()
        self._shown: tuple[WorkerRow, ...] = ()
        self._note = ""
        self._awaited = ""
        self._scheduler = ""
        self._checkpoints = CheckpointWatch(output)
        self._has_last = not settings.checkpoints.url
        self._cut_off: set[int] = set()

    async def run(self) -> int:
        """Train to the end, and say how it ended.

        Returns:
            The exit code, as `ending` has it.
        """
        ending = await self.ending()
        self._tell(ending)
        return ending.exit_code

    async def ending(self) -> Ending:
        """Train to the end.

        Returns:
            Exit code 0 if every worker finished, 1 if a role died that the run cannot do without,
            3 if every worker finished and a checkpoint failed, 128 + the number of the signal that
            ended it.

        Raises:
            InvalidConfig: there is no such cluster.
        """
        settings = self._settings
        environment, remark = thread_environment(
            os.environ, usable_core_count(), settings.worker_count
        )
        shape = self._shape(environment)
        if remark:
            self._output.say(remark)
        await asyncio.to_thread(warn_of_earlier_runs, settings.checkpoints, self._output)
        kept = self._kept or KeptCluster(self._output, settings.shown_kinds)
        supervisor = kept.supervised()
        rules = ExitRules(
            settings.worker_count,
            settings.replica_count,
            settings.max_restarts,
            has_update_log=bool(settings.update_log.path),
        )
        ending = await supervisor.run(
            self._work(supervisor, shape, kept),
            rules,
            self._last,
            self._ended,
            is_kept=self._kept is not None,
        )
        self._output.close()
        if ending.exit_code:
            return ending
        return replace(ending, exit_code=self._checkpoint_exit_code())

    async def _ended(self, role_exit: RoleExit) -> None:
        """Tell the scheduler that a worker's process has ended: nobody waits for its silence."""
        launch_id = role_exit.command.launch_id
        if not launch_id or not self._scheduler:
            return
        with contextlib.suppress(PushpullError):  # then it is silent until it is gone
            async with SchedulerQuery(self._scheduler) as query:
                if await query.process_ended(launch_id, role_exit.fate):
                    self._cut_off.add(role_exit.command.index or 0)

    async def _last(self, ending: Ending) -> None:
        """What is done while the servers still serve."""
        if not self._scheduler:
            return
        await self._look()
        if self._settings.checkpoints.url:
            self._has_last = await make_last(self._scheduler, ending, self._output)
            await self._look()  # one that a script did not wait for may have failed meanwhile

    async def _look(self) -> None:
        with contextlib.suppress(PushpullError):
            async with SchedulerQuery(self._scheduler) as query:
                self._observe(await query.status())

    def _checkpoint_exit_code(self) -> int:
        return CHECKPOINT_EXIT_CODE if self._checkpoints.failed_count or not self._has_last else 0

    def _observe(self, status: scheduler_pb2.GetClusterStatusResponse) -> None:
        settings = self._settings
        self._awaited = still_awaited(status, settings.server_count, settings.worker_count)
        self._rates.observe(worker_samples(status, time.monotonic()))
        self._checkpoints.observe(status.checkpoints)

    def _shape(self, environment: Mapping[str, str]) -> ClusterShape:
        settings = self._settings
        return ClusterShape(
            settings.server_count,
            settings.worker_count,
            environment=environment,
            max_workers=settings.max_workers,
            replica_count=settings.replica_count,
            min_in_sync=settings.min_in_sync,
            lease_s=settings.lease_s,
            checkpoints=settings.checkpoints,
            update_log=settings.update_log,
            has_journal=True,
        )

    async def _work(self, supervisor: Supervisor, shape: ClusterShape, kept: KeptCluster) -> None:
        settings, launcher = self._settings, supervisor.launcher
        is_new = not kept.scheduler
        if is_new:
            self._output.say("starting the scheduler")
            started = await asyncio.to_thread(start_scheduler, launcher, shape)
            await asyncio.to_thread(start_servers, launcher, shape, started.address)
            kept.scheduler = started.address
            workers = counted(settings.worker_count, "worker")
            servers = counted(settings.server_count, "server")
            self._output.say(
                f"scheduler at {kept.scheduler}; starting {workers} on {servers}, which import "
                "torch first"
            )
        self._scheduler = kept.scheduler
        script = (str(settings.script), *settings.arguments)
        environment = {**shape.environment, **settings.environment}
        for rank in range(settings.worker_count):
            command = worker_command(rank, kept.scheduler, script, environment)
            await asyncio.to_thread(launcher.start, command)
        async with SchedulerQuery(kept.scheduler) as query:
            if is_new:
                with contextlib.suppress(PushpullError):
                    view = (await query.status()).view
                    tell_beginning(settings.checkpoints, view.restored_from, self._output)
            await self._show_progress(query)

    async def _show_progress(self, query: SchedulerQuery) -> None:
        """Look often, so that what fails is told at once; show as often as is asked for."""
        interval_s = LIVE_INTERVAL_S if self._output.is_terminal else self._settings.line_interval_s
        shown_s = -math.inf
        while True:
            try:
                self._observe(await query.status())
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
        for line in plain_lines(rows, elapsed_s, self._awaited):
            self._output.say(line)
        if self._note:
            self._output.say(self._note)

    def _tell(self, ending: Ending) -> None:
        elapsed_s = time.monotonic() - self._began_s
        if ending.exit_code not in (0, CHECKPOINT_EXIT_CODE):
            self._output.complain(ending.message)
            return
        count = self._settings.worker_count
        early = early_ends(self._rates.rows(), self._cut_off)
        finished = f"{count - len(early)} of {count}" if early else f"{count}"
        self._output.say(f"{finished} workers finished in {elapsed_s:.1f} s")
        for line in early:
            self._output.warn(line)
        if ending.exit_code:
            told = "the last checkpoint failed"
            if self._has_last:
                count = self._checkpoints.failed_count
                failed = "1 checkpoint" if count == 1 else f"{count} checkpoints"
                told = f"{failed} before the last one failed; the last one is complete"
            self._output.complain(f"the run has ended well, but {told}")


def thread_environment(
    inherited: Mapping[str, str], core_count: int, worker_count: int
) -> tuple[dict[str, str], str]:
    """How many threads each process may use, and the line that says so.

    Without it every worker starts a thread a core and they fight for the cores: on one machine N
    workers would be slower than one. What the user set stands.
    """
    if "OMP_NUM_THREADS" in inherited:
        return {}, ""
    threads = thread_count(core_count, worker_count)
    remark = (
        f"OMP_NUM_THREADS={threads} for each process ({core_count} cores, {worker_count} workers); "
        "set it yourself to use another number"
    )
    return {"OMP_NUM_THREADS": str(threads)}, remark
