"""What the command line of `pushpull train` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

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
from ps_cli.train.train import DEFAULT_LINE_INTERVAL_S


@dataclass(frozen=True, slots=True)
class TrainOptions(PlansStorage):
    """The options as they are given."""

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
