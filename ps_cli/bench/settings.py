"""Settings of a benchmark, and the options of `pushpull bench`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from ps_cli.bench.devices import CPU
from ps_cli.bench.lanes import LANES

ROUND_COUNT = 5
QUICK_ROUND_COUNT = 2


def _nobody(what: str) -> None:
    """The default listener: nobody watches."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Settings of one run.

    Attributes:
        quick: small sizes and two rounds: whether it runs, not how fast.
        size_mb: size of the table in MiB; 0 means the benchmark's own.
        lanes: which lanes are measured.
        replica_count: dense: servers that hold each range, where more than one.
        has_update_log: dense: with an update log, and without.
        device: where a training step computes: one of `ps_cli.bench.devices.DEVICES`.
        on_progress: hears what is being measured.
    """

    quick: bool = False
    size_mb: int = 0
    lanes: tuple[str, ...] = LANES
    device: str = CPU
    replica_count: int = 1
    has_update_log: bool = False
    on_progress: Callable[[str], None] = _nobody

    @property
    def round_count(self) -> int:
        """Rounds that count, after the warm-up."""
        return QUICK_ROUND_COUNT if self.quick else ROUND_COUNT

    def on_round(self, number: int) -> None:
        """Say which round begins; 0 is the warm-up."""
        self.on_progress(f"round {number} of {self.round_count}" if number else "warm-up")

    def within(self, part: str) -> BenchSettings:
        """The same settings for a part of a benchmark: its name goes before what is said."""
        return replace(self, on_progress=lambda what: self.on_progress(f"{part}, {what}"))


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
