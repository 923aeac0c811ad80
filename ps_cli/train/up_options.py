"""What the command line of `pushpull up` takes."""

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
    ServerCount,
    UpdateLogMb,
    UpdateLogPath,
    UpdateLogSync,
    WorkerCount,
)


@dataclass(frozen=True, slots=True)
class UpOptions(PlansStorage):
    """The options as they are given."""

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
        typer.Option(help="Where the scheduler listens; port 0 takes a free one."),
    ] = "127.0.0.1:0"
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Do not show what the roles say.")
    ] = False
