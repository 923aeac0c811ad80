"""Checkpoints: the rates of writing and restoring, and the pushes while one is written."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table as TextTable

import ps_worker as ps
from ps_cli.bench.contenders.child import Child, started
from ps_cli.bench.contenders.disk_writes import THREAD_COUNTS, action_of
from ps_cli.bench.instruments.process_memory import PeakWatch
from ps_cli.bench.instruments.sampling import (
    GB,
    MB,
    MIB,
    Measured,
    Operation,
    figures_table,
    joined,
    measured_in_turns,
    percentile,
    rounded,
    samples_gb_s,
)
from ps_cli.bench.measurements.restoring import Saved, memory_row, restores
from ps_cli.bench.settings import BenchSettings
from ps_core.errors import InvalidConfig

DEFAULT_SIZE_MB = 1024
QUICK_SIZE_MB = 16
QUICK_ROUND_COUNT = 3
LARGE, SMALL, WHOLE = "large", "small", "whole"
"""Tables: `large` and `small` are on one server, `whole` is alone on another."""

_STATES = 3
"""A checkpoint of a table has its values and Adam's two moments, each as large as the table."""

_WHOLE_SHARE, _SMALL_SHARE = 16, 256
_SAMPLE_COUNT, _QUICK_SAMPLE_COUNT = 300, 5
_MOST_CHECKPOINTS = 60
_FILE_COUNT = 3
"""Files that the disk must have space for: two at once, and one for other work."""

_THREADS = {1: "one_thread", 2: "two_threads"}


class _Site(NamedTuple):
    """A cluster of one server that writes checkpoints, and a worker that asks for them."""

    lane: str
    worker: Child
    server_pid: int
    sizes: dict[str, int]

    @property
    def place(self) -> dict[str, Any]:
        return {"lane": self.lane, "servers": 1}

    def do(self, action: str) -> dict[str, Any]:
        """The worker's figures; a checkpoint that it made stays."""
        found: dict[str, Any] = self.worker.do(action).result
        return found

    def passing(self, action: str) -> dict[str, Any]:
        """As `do`, and remove the checkpoint."""
        found = self.do(action)
        shutil.rmtree(found["url"])
        return found


def checkpoint(settings: BenchSettings) -> dict[str, Any]:
    """The document of `--json`; takes some minutes for each lane at 1 GB."""
    byte_count = settings.table_bytes(DEFAULT_SIZE_MB, QUICK_SIZE_MB)
    _check_space(byte_count)
    round_count = max(settings.round_count, QUICK_ROUND_COUNT)
    sizes = {LARGE: byte_count, SMALL: _share(byte_count, _SMALL_SHARE)}
    rows: list[dict[str, Any]] = []
    legs = []
    with tempfile.TemporaryDirectory(prefix="pushpull-bench-") as folder:
        for lane in settings.lanes:
            within = settings.within(lane)
            with _site(lane, folder, sizes) as site:
                within.on_progress("memory")
                rows.append(_memory(site))
                legs.append(_writes(site, folder, round_count, within))
                rows.append(_pushes(site, SMALL, within))
                # A checkpoint is the same over each lane: that of the first is restored.
                made = site.do("write") if lane == settings.lanes[0] else None
            with _site(lane, folder, {WHOLE: _share(byte_count, _WHOLE_SHARE)}) as site:
                rows.append(_pushes(site, WHOLE, within))
            if made is not None:
                saved = Saved(made["url"], made["byte_count"], LARGE, byte_count)
                rows += restores(saved, lane, within)
                shutil.rmtree(saved.url)
    measured = joined(legs)
    return {
        "environment": {"table_bytes": byte_count, "round_count": round_count},
        "ceilings": {
            f"write_{name}_gb_s": rounded(measured[action_of(count)].gb_s)
            for count, name in _THREADS.items()
        },
        "rows": [*(_written(lane, measured) for lane in settings.lanes), *rows],
        "samples_gb_s": samples_gb_s(measured),
    }


def _share(byte_count: int, divisor: int) -> int:
    return max(MIB // 4, byte_count // divisor)


def _check_space(byte_count: int) -> None:
    needed_bytes = _FILE_COUNT * _STATES * byte_count
    folder = tempfile.gettempdir()
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise InvalidConfig(
            f"{folder} has {free_bytes / 1e9:.1f} GB free; expected {needed_bytes / 1e9:.1f} for "
            "checkpoints: choose a smaller --size-mb, or another folder with TMPDIR"
        )


@contextlib.contextmanager
def _site(lane: str, folder: str, sizes: dict[str, int]) -> Iterator[_Site]:
    given = [f"{name}={size}" for name, size in sizes.items()]
    with ps.local_cluster(1, 1, checkpoint_url=folder) as cluster:
        command = ("checkpoint_worker:checkpoint_worker", cluster.address, lane, *given)
        with started(command) as (worker,):
            yield _Site(lane, worker, cluster.process_ids["server 0"], sizes)


def _writes(
    site: _Site, folder: str, round_count: int, settings: BenchSettings
) -> dict[str, Measured]:
    """Checkpoints without training, and plain writes of as many bytes, in turns."""
    byte_count = site.passing("write")["byte_count"]

    def write() -> float:
        return float(site.passing("write")["wall_s"])

    with started(("disk_writes:disk_writes", folder, str(byte_count))) as (writer,):
        operations = [
            Operation(_write_name(site.lane), write, byte_count, (site.server_pid,)),
            *(
                Operation(name, writer.timed(name), byte_count)
                for name in map(action_of, THREAD_COUNTS)
            ),
        ]
        return measured_in_turns(operations, round_count, settings.within("write").on_progress)


def _write_name(lane: str) -> str:
    return f"{lane} checkpoint"


def _written(lane: str, measured: dict[str, Measured]) -> dict[str, Any]:
    own = measured[_write_name(lane)]
    (server_pid,) = own.operation.pids
    return {
        "part": "write",
        "lane": lane,
        "servers": 1,
        "checkpoint_bytes": own.operation.byte_count,
        "write_gb_s": rounded(own.gb_s),
        **{
            f"of_{name}": rounded(own.gb_s / measured[action_of(count)].gb_s)
            for count, name in _THREADS.items()
        },
        "server_cpu_s_per_gb": rounded(own.cpu_s(server_pid) / own.gb),
    }


def _memory(site: _Site) -> dict[str, Any]:
    """The server's peak while it trains and writes, over its peak while it trains.

    This is the server's first checkpoint, because the allocator may keep the memory of one.
    """
    site.do(f"{LARGE} between")  # a warm-up
    with PeakWatch(site.server_pid) as quiet:
        site.do(f"{LARGE} between")
    with PeakWatch(site.server_pid) as busy:
        site.passing(f"{LARGE} during")
    return memory_row(site.place, "write", quiet.peak_bytes, busy.peak_bytes)


def _pushes(site: _Site, table: str, settings: BenchSettings) -> dict[str, Any]:
    """The latency of pushes while a checkpoint is written, and between checkpoints."""
    wanted_count = _QUICK_SAMPLE_COUNT if settings.quick else _SAMPLE_COUNT
    site.passing(f"{table} during")
    site.do(f"{table} between")
    made: list[dict[str, Any]] = []
    during_s: list[float] = []
    between_s: list[float] = []
    while len(made) < settings.round_count or (
        len(during_s) < wanted_count and len(made) < _MOST_CHECKPOINTS
    ):
        settings.on_progress(f"pushes of {table}, checkpoint {len(made) + 1}")
        made.append(site.passing(f"{table} during"))
        during_s += made[-1]["waits_s"]
        between_s += site.do(f"{table} between")["waits_s"]
    figures = {**_figures("", during_s), **_figures("quiet_", between_s)}
    return {
        "part": "push",
        **site.place,
        "table": table,
        "table_bytes": site.sizes[table],
        "checkpoint_bytes": made[0]["byte_count"],
        "checkpoint_count": len(made),
        "checkpoint_s": rounded(statistics.median(one["wall_s"] for one in made)),
        "held_ms": rounded(statistics.median(one["held_s"] for one in made) * 1000),
        "sample_count": len(during_s),
        **figures,
        "p99_over_quiet": rounded(figures["p99_ms"] / figures["quiet_p99_ms"]),
    }


def _figures(prefix: str, waits_s: list[float]) -> dict[str, float]:
    return {
        f"{prefix}{name}_ms": rounded(percentile(waits_s, percent) * 1000)
        for name, percent in {"p50": 50, "p99": 99, "max": 100}.items()
    }


def checkpoint_view(document: dict[str, Any]) -> RenderableType:
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in document["rows"]:
        rows.setdefault(row["part"], []).append(row)
    return Group(
        _writes_table(rows["write"], document["ceilings"]),
        _pushes_table(rows["push"]),
        _restores_table(rows["restore"]),
        _memory_table(rows["memory"]),
    )


def _writes_table(rows: list[dict[str, Any]], ceilings: dict[str, float]) -> TextTable:
    table = figures_table(
        "checkpoint: GB/s from the request until it is complete, without training",
        "GB", "GB/s", "of one thread", "of two", "CPU s/GB",
        caption="threads: plain writes of 1 MiB with CRC-32, and fsync",
    )  # fmt: skip
    for name in ("one_thread", "two_threads"):
        table.add_row(name.replace("_", " "), "", f"{ceilings[f'write_{name}_gb_s']:.2f}")
    for row in rows:
        table.add_row(
            row["lane"],
            f"{row['checkpoint_bytes'] / GB:.2f}",
            *(f"{row[key]:.2f}" for key in ("write_gb_s", "of_one_thread", "of_two_threads")),
            f"{row['server_cpu_s_per_gb']:.2f}",
        )
    return table


def _pushes_table(rows: list[dict[str, Any]]) -> TextTable:
    table = figures_table(
        "checkpoint: ms of a push while one is written",
        "p50", "p99", "max", "p99 / quiet", "pushes", "took s",
        caption="in brackets: as many pushes between checkpoints; whole: the server's only table; "
        "small: beside a large table without pushes",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            f"{row['lane']}, {row['table']}",
            *(f"{row[f'{p}_ms']:.3g} ({row[f'quiet_{p}_ms']:.3g})" for p in ("p50", "p99", "max")),
            f"{row['p99_over_quiet']:.1f}",
            str(row["sample_count"]),
            f"{row['checkpoint_s']:.2f}",
        )
    return table


def _restores_table(rows: list[dict[str, Any]]) -> TextTable:
    table = figures_table(
        "checkpoint: seconds until a cluster has answered the first pull of the whole table",
        "resumed", "new", "difference", "GB/s",
        caption="warm, cold: the files are in the page cache, or not",
    )  # fmt: skip
    for row in rows:
        rate = row["restore_gb_s"]
        table.add_row(
            f"{row['lane']}, servers: {row['servers']}, {row['cache']}",
            *(f"{row[f'{key}_s']:.2f}" for key in ("with", "without", "restore")),
            "-" if rate is None else f"{rate:.2f}",
        )
    return table


def _memory_table(rows: list[dict[str, Any]]) -> TextTable:
    table = figures_table(
        "checkpoint: MB that servers take for it beyond their tables",
        "before", "peak", "growth", "bound", "of bound",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            f"{row['lane']}, servers: {row['servers']}, {row['during']}",
            *(f"{row[f'{key}_bytes'] / MB:.0f}" for key in ("before", "peak", "growth", "bound")),
            f"{row['of_bound']:.2f}",
        )
    return table
