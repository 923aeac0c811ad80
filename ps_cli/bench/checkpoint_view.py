"""The document of `checkpoint` for a person."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as TextTable

from ps_cli.bench.sampling import GB

_MB = 1e6


def checkpoint_view(document: dict[str, Any]) -> RenderableType:
    """Four tables: writing, pushing meanwhile, restoring, memory."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in document["rows"]:
        rows.setdefault(row["part"], []).append(row)
    return Group(
        _writes(rows["write"], document["ceilings"]),
        _pushes(rows["push"]),
        _restores(rows["restore"]),
        _memory(rows["memory"]),
    )


def _table(title: str, *headings: str, caption: str | None = None) -> TextTable:
    table = TextTable(title=title, caption=caption)
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _writes(rows: list[dict[str, Any]], ceilings: dict[str, float]) -> TextTable:
    table = _table(
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


def _pushes(rows: list[dict[str, Any]]) -> TextTable:
    table = _table(
        "checkpoint: ms of a push while one is written",
        "p50", "p99", "max", "p99 / quiet", "pushes", "took s",
        caption="in brackets: as many pushes between checkpoints; whole: of all of the state; "
        "small: beside a large table that rests",
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


def _restores(rows: list[dict[str, Any]]) -> TextTable:
    table = _table(
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


def _memory(rows: list[dict[str, Any]]) -> TextTable:
    table = _table(
        "checkpoint: MB that servers take for it beyond what they have",
        "before", "peak", "growth", "bound", "of bound",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            f"{row['lane']}, servers: {row['servers']}, {row['during']}",
            *(f"{row[f'{key}_bytes'] / _MB:.0f}" for key in ("before", "peak", "growth", "bound")),
            f"{row['of_bound']:.2f}",
        )
    return table
