"""Settings of a benchmark, and the options of `pushpull bench`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from ps_cli.bench.devices import CPU
from ps_cli.bench.instruments.sampling import MIB
from ps_cli.bench.lanes import LANES

RATE_MBIT = 1000
ROUND_COUNT = 5
QUICK_ROUND_COUNT = 2


def _ignore(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Settings of a run, as in `BenchOptions`; `on_progress` gets a phrase about each phase."""

    quick: bool = False
    size_mb: int = 0
    lanes: tuple[str, ...] = LANES
    device: str = CPU
    replica_count: int = 1
    server_count: int = 0
    has_update_log: bool = False
    rate_mbit: int = RATE_MBIT
    on_progress: Callable[[str], None] = _ignore

    def table_bytes(self, default_mb: int, quick_mb: int) -> int:
        """The size of a table, from a benchmark's own sizes in MiB."""
        return (self.size_mb or (quick_mb if self.quick else default_mb)) * MIB

    @property
    def round_count(self) -> int:
        """Rounds that count, after the warm-up."""
        return QUICK_ROUND_COUNT if self.quick else ROUND_COUNT

    def within(self, phase: str) -> BenchSettings:
        """The same settings, with `phase` before each phrase about the progress."""
        return replace(self, on_progress=lambda inner: self.on_progress(f"{phase}, {inner}"))


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of `pushpull bench`."""

    name: Annotated[
        str,
        typer.Argument(
            help="dense, latency, sparse, train, optimizers, codecs, link, memory, sessions, "
            "shards or checkpoint."
        ),
    ]
    json_path: Annotated[
        str, typer.Option("--json", help="Write the figures to this JSON file; -: standard output.")
    ] = ""
    size_mb: Annotated[
        int,
        typer.Option(
            min=0,
            help="The size of the table in MiB, for dense, optimizers, codecs, link, memory, "
            "sessions and checkpoint, and of the model's parameters for train; 0: their own.",
        ),
    ] = 0
    lane: Annotated[
        str,
        typer.Option(
            help="The lane to measure, for all but optimizers and link: shm or grpc; by default "
            "both, for shards shm alone."
        ),
    ] = ""
    device: Annotated[str, typer.Option(help="train: the device of its steps, cpu or cuda.")] = CPU
    replicas: Annotated[
        int,
        typer.Option(
            min=1,
            help="dense: servers that hold each range, compared with 1. sparse: the same, and one "
            "is killed.",
        ),
    ] = 1
    servers: Annotated[
        int,
        typer.Option(
            min=0,
            help="The cluster's servers. sparse with --replicas, 0: one more than replicas. train "
            "with --size-mb, 0: one for every two cores, eight at most.",
        ),
    ] = 0
    rate_mbit: Annotated[int, typer.Option(min=1, help="link: Mbit/s of the link, each way.")] = (
        RATE_MBIT
    )
    update_log: Annotated[
        bool, typer.Option("--update-log", help="dense: with an update log, compared with none.")
    ] = False
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes and two rounds, to see that it runs.")
    ] = False
