"""The cost of replicas, or of an update log: push, pull and round of one dense table.

All clusters of a run have as many servers as replicas, so that only the replication differs. With
one replica each server has its share of the table; with more, it has replicas of the other shares,
too.
Without replicas, only the update log differs.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from rich.console import RenderableType

from ps_cli.bench.contenders import contenders
from ps_cli.bench.contenders.child import together
from ps_cli.bench.contenders.contenders import Cluster, Load, Servers
from ps_cli.bench.instruments.environment import environment
from ps_cli.bench.instruments.sampling import (
    Measured,
    Operation,
    figures_table,
    joined,
    rounded,
    take_turns,
)
from ps_cli.bench.measurements.dense import DEFAULT_SIZE_MB, MOVES, QUICK_SIZE_MB
from ps_cli.bench.settings import BenchSettings

OPTIMIZERS = ("sgd", "adam")


def replicated(settings: BenchSettings) -> dict[str, object]:
    """Measure everything; the document of `--json`.

    Blocking: a minute or two at 256 MB.
    """
    found = environment()
    byte_count = settings.table_bytes(DEFAULT_SIZE_MB, QUICK_SIZE_MB)
    rows, legs = [], []
    for lane in settings.lanes:
        with contextlib.ExitStack() as stack:
            count = settings.replica_count
            kinds = (Servers(count), Servers(count, count, settings.has_update_log))
            load = Load(byte_count, OPTIMIZERS)
            clusters = contenders.enter_all(
                stack, [contenders.cluster(lane, 1, load, kind) for kind in kinds]
            )
            own = [
                (cluster, optimizer, kind)
                for cluster, kind in zip(clusters, kinds, strict=True)
                for optimizer in OPTIMIZERS
            ]
            operations = [
                _operation(cluster, optimizer, kind, move, byte_count)
                for move in MOVES
                for cluster, optimizer, kind in own
            ]
            listener = settings.within(lane).on_round
            legs.append(take_turns(operations, settings.round_count, listener))
            rows += own
    measured = joined(legs)
    figures = [_figures(*row, measured) for row in rows]
    return {
        "environment": {**found, "table_bytes": byte_count, "round_count": settings.round_count},
        "servers": settings.replica_count,
        "rows": figures,
        "compared": _compared(figures),
        "samples_gb_s": {
            name: [rounded(rate) for rate in result.rates_gb_s] for name, result in measured.items()
        },
    }


def _name(lane: str, optimizer: str, kind: Servers, move: str) -> str:
    logged = " logged" if kind.has_update_log else ""
    return f"{lane} {optimizer}, {kind.replica_count} x {move}{logged}"


def _operation(
    cluster: Cluster, optimizer: str, kind: Servers, move: str, byte_count: int
) -> Operation:
    name = _name(cluster.lane, optimizer, kind, move)
    run = partial(together, cluster.workers, f"{optimizer} {move}")
    return Operation(name, run, byte_count, cluster.pids)


def _figures(
    cluster: Cluster, optimizer: str, kind: Servers, measured: dict[str, Measured]
) -> dict[str, Any]:
    moves = {m: measured[_name(cluster.lane, optimizer, kind, m)] for m in MOVES}
    moved_gb = moves["push"].gb + moves["pull"].gb + 2 * moves["round"].gb
    cpu_s = sum(move.cpu_s(pid) for move in moves.values() for pid in cluster.pids)
    return {
        "lane": cluster.lane,
        "optimizer": optimizer,
        "workers": 1,
        "servers": len(cluster.server_pids),
        "replicas": kind.replica_count,
        "update_log": kind.has_update_log,
        **{f"{move}_gb_s": rounded(result.gb_s) for move, result in moves.items()},
        "cpu_s_per_gb": rounded(cpu_s / moved_gb),
    }


def _compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with replicas or a log, over the row without, of the same lane and optimizer."""
    alone = {(row["lane"], row["optimizer"]): row for row in rows if not _is_safe(row)}
    found = []
    for row in rows:
        if not _is_safe(row):
            continue
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
    table = figures_table(
        f"dense, {document['servers']} servers: GB/s of parameters",
        *(*MOVES, "CPU s/GB"),
        caption="in brackets: of the same with one replica and no log; CPU: servers + worker",
    )
    for row in document["rows"]:
        ratio = ratios[row["lane"], row["optimizer"]]
        cells = [f"{row[f'{move}_gb_s']:.2f}" for move in MOVES]
        if _is_safe(row):
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
