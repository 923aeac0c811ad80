"""The cost of replicas, or of an update log: push, pull and round of one dense table.

All clusters of a run have as many servers as replicas, so that only the replication differs. With
one replica each server has its share of the table; with more, it has replicas of the other shares,
too. Without replicas, only the update log differs.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import RenderableType

from ps_cli.bench.contenders import contenders
from ps_cli.bench.contenders.contenders import MeasuredCluster, Servers
from ps_cli.bench.instruments.sampling import (
    Measured,
    Operation,
    figures_table,
    joined,
    measured_in_turns,
    rounded,
    samples_gb_s,
)
from ps_cli.bench.measurements.dense import (
    DEFAULT_SIZE_MB,
    MOVES,
    QUICK_SIZE_MB,
    cpu_s_per_gb,
    operations_by_move,
)
from ps_cli.bench.measurements.disk_rows import file_system
from ps_cli.bench.settings import BenchSettings
from ps_runtime.launch.cluster_shape import UpdateLogPlan

OPTIMIZERS = ("sgd", "adam")


class _ReplicatedRow(NamedTuple):
    cluster: MeasuredCluster
    optimizer: str
    kind: Servers
    operations: dict[str, Operation]


def replicated(settings: BenchSettings) -> dict[str, Any]:
    """The document of `--json`; takes a minute or two at 256 MB."""
    byte_count = settings.table_bytes(DEFAULT_SIZE_MB, QUICK_SIZE_MB)
    rows: list[_ReplicatedRow] = []
    legs = []
    count = settings.replica_count
    kinds = (Servers(count), Servers(count, count, settings.has_update_log))
    commands = contenders.members(1, byte_count, OPTIMIZERS)
    for lane in settings.lanes:
        with contextlib.ExitStack() as stack:
            clusters = contenders.enter_all(
                stack, [contenders.cluster(lane, commands, kind) for kind in kinds]
            )
            own = [
                _row(cluster, optimizer, kind, byte_count)
                for cluster, kind in zip(clusters, kinds, strict=True)
                for optimizer in OPTIMIZERS
            ]
            operations = [row.operations[move] for move in MOVES for row in own]
            listener = settings.within(lane).on_progress
            legs.append(measured_in_turns(operations, settings.round_count, listener))
            rows += own
    measured = joined(legs)
    figures = [_figures(row, measured) for row in rows]
    return {
        "environment": {
            "table_bytes": byte_count,
            "round_count": settings.round_count,
            **(_log_environment() if settings.has_update_log else {}),
        },
        "ceilings": {},
        "servers": settings.replica_count,
        "rows": figures,
        "compared": _compared(figures),
        "samples_gb_s": samples_gb_s(measured),
    }


def _log_environment() -> dict[str, Any]:
    folder = tempfile.gettempdir()
    return {
        "log_folder": folder,
        "log_file_system": file_system(Path(folder)),
        "log_is_synced": UpdateLogPlan().is_synced,
    }


def _row(
    cluster: MeasuredCluster, optimizer: str, kind: Servers, byte_count: int
) -> _ReplicatedRow:
    logged = " logged" if kind.has_update_log else ""
    title = f"{cluster.lane} {optimizer}, {kind.replica_count} x {{}}{logged}"
    return _ReplicatedRow(
        cluster, optimizer, kind, operations_by_move(cluster, optimizer, title, byte_count)
    )


def _figures(row: _ReplicatedRow, measured: Mapping[str, Measured]) -> dict[str, Any]:
    moves = {move: measured[operation.name] for move, operation in row.operations.items()}
    return {
        "lane": row.cluster.lane,
        "optimizer": row.optimizer,
        "workers": 1,
        "servers": row.kind.server_count,
        "replicas": row.kind.replica_count,
        "update_log": row.kind.has_update_log,
        **{f"{move}_gb_s": rounded(result.gb_s) for move, result in moves.items()},
        "cpu_s_per_gb": cpu_s_per_gb(moves, row.cluster.pids),
    }


def _compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with replicas or a log, over the row without, of the same lane and optimizer."""
    alone = {(row["lane"], row["optimizer"]): row for row in rows if not _is_safe(row)}
    found = []
    for row in filter(_is_safe, rows):
        other = alone[row["lane"], row["optimizer"]]
        ratios = {
            f"{move}_over_one_replica": rounded(row[f"{move}_gb_s"] / other[f"{move}_gb_s"])
            for move in MOVES
        }
        found.append({"lane": row["lane"], "optimizer": row["optimizer"], **ratios})
    return found


def _is_safe(row: dict[str, Any]) -> bool:
    """True if the values survive the death of a server."""
    return bool(row["update_log"]) or row["replicas"] > 1


def replicated_view(document: dict[str, Any]) -> RenderableType:
    ratios = {(row["lane"], row["optimizer"]): row for row in document["compared"]}
    environment = document["environment"]
    caption = "in brackets: of the same with one replica and no log; CPU: servers + worker"
    if "log_folder" in environment:
        synced = "synced" if environment["log_is_synced"] else "not synced"
        place = f"{environment['log_folder']} ({environment['log_file_system']})"
        caption += f"; logs: in {place}, {synced}"
    table = figures_table(
        f"dense, {document['servers']} servers: GB/s of parameters",
        *(*MOVES, "CPU s/GB"),
        caption=caption,
    )
    for row in document["rows"]:
        cells = [f"{row[f'{move}_gb_s']:.2f}" for move in MOVES]
        if _is_safe(row):
            ratio = ratios[row["lane"], row["optimizer"]]
            over = (ratio[f"{move}_over_one_replica"] for move in MOVES)
            cells = [f"{cell} ({each:.2f})" for cell, each in zip(cells, over, strict=True)]
        plural = "" if row["replicas"] == 1 else "s"
        logged = ", log" if row["update_log"] else ""
        table.add_row(
            f"{row['lane']} {row['optimizer']}, {row['replicas']} replica{plural}{logged}",
            *cells,
            f"{row['cpu_s_per_gb']:.2f}",
        )
    return table
