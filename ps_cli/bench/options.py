"""What `pushpull bench` may be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of `pushpull bench`."""

    name: Annotated[
        str,
        typer.Argument(help="dense, latency, train, optimizers, memory, sessions or checkpoint."),
    ]
    json_path: Annotated[
        str, typer.Option("--json", help="Write the figures to this file; - is standard output.")
    ] = ""
    size_mb: Annotated[
        int,
        typer.Option(
            min=0,
            help="MiB of the table of dense, optimizers, memory, sessions or checkpoint; 0: their "
            "own.",
        ),
    ] = 0
    lane: Annotated[
        str, typer.Option(help="Measure this lane alone: shm or grpc; by default both.")
    ] = ""
    device: Annotated[str, typer.Option(help="Where the steps of train compute: cpu or cuda.")] = (
        "cpu"
    )
    replicas: Annotated[
        int,
        typer.Option(min=1, help="dense: hold each range on so many servers, and compare with 1."),
    ] = 1
    update_log: Annotated[
        bool,
        typer.Option("--update-log", help="dense: keep an update log, and compare with none."),
    ] = False
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes, two rounds: whether it runs.")
    ] = False
