"""Memory of a server and a worker while a large table is pushed and pulled."""

from __future__ import annotations

import contextlib
from typing import Any

from rich.table import Table as TextTable

from ps_cli.bench.contenders import contenders
from ps_cli.bench.contenders.child import together
from ps_cli.bench.contenders.worker import PRIVATE
from ps_cli.bench.instruments.process_memory import PeakWatch
from ps_cli.bench.instruments.sampling import MB, figures_table, rounded
from ps_cli.bench.settings import BenchSettings

DEFAULT_SIZE_MB = 1024
QUICK_SIZE_MB = 16
OPTIMIZER = "adam"
WORKER_COUNTS = (1, 2)
MOVES = ("push", "pull", "round")
PASS_COUNT = 2
"""The first update makes the optimizer's state; the second finds it there."""

TABLES_ON_A_SERVER = 5
"""Parameters, Adam's two moments, one accumulator, and one staged step."""

SERVER_ALLOWANCE = 1.25
SERVER_EXTRA_BYTES = 300_000_000
WORKER_GROWTH_BYTES = 256_000_000
"""The bounds that the figures are compared with."""


def memory(settings: BenchSettings) -> dict[str, Any]:
    """The document of `--json`; takes a few minutes at 1 GB."""
    byte_count = settings.table_bytes(DEFAULT_SIZE_MB, QUICK_SIZE_MB)
    rows = []
    for lane in settings.lanes:
        for worker_count in WORKER_COUNTS:
            settings.on_progress(f"{lane}, workers: {worker_count}")
            rows += _rows(lane, worker_count, byte_count)
    return {
        "environment": {"table_bytes": byte_count, "pass_count": PASS_COUNT},
        "ceilings": {},
        "rows": rows,
    }


def _rows(lane: str, worker_count: int, byte_count: int) -> list[dict[str, Any]]:
    """The peaks of one cluster's server, and of the worker that grew most."""
    # The gradient is the script's: in shared memory it would count as the client's.
    name = f"{OPTIMIZER}{PRIVATE}"
    commands = contenders.members(worker_count, byte_count, (name,))
    with contenders.cluster(lane, commands) as cluster, contextlib.ExitStack() as watching:
        server = watching.enter_context(PeakWatch(cluster.server_pid, since_its_start=True))
        workers = [watching.enter_context(PeakWatch(pid)) for pid in cluster.worker_pids]
        for move in MOVES * PASS_COUNT:
            together(cluster.workers, f"{name} {move}")
    worker = max(workers, key=lambda watch: watch.growth_bytes)
    bound_bytes = round(SERVER_ALLOWANCE * TABLES_ON_A_SERVER * byte_count) + SERVER_EXTRA_BYTES
    held_bytes = server.highest.private_bytes
    more_bytes = worker.highest.private_bytes - worker.before.private_bytes
    figures = {
        "server": _figures(server, bound_bytes, server.peak_bytes, held_bytes),
        "worker": _figures(worker, WORKER_GROWTH_BYTES, worker.growth_bytes, more_bytes),
    }
    place = {"lane": lane, "optimizer": OPTIMIZER, "workers": worker_count, "servers": 1}
    return [
        {**place, "role": role, "table_bytes": byte_count, **own} for role, own in figures.items()
    ]


def _figures(
    watch: PeakWatch, bound_bytes: int, peak_bytes: int, private_bytes: int
) -> dict[str, Any]:
    return {
        "bound_bytes": bound_bytes,
        "peak_bytes": peak_bytes,
        "of_bound": rounded(peak_bytes / bound_bytes),
        "private_bytes": private_bytes,
        "shared_bytes": max(watch.highest.shared_bytes - watch.borrowed_bytes, 0),
        "borrowed_bytes": watch.borrowed_bytes,
    }


def memory_view(document: dict[str, Any]) -> TextTable:
    table_mb = document["environment"]["table_bytes"] / MB
    table = figures_table(
        f"memory: MB while a table of {table_mb:.0f} MB with Adam is pushed and pulled",
        *("MB", "bound", "of bound", "private", "shared", "borrowed"),
        caption="server: its peak; worker: its growth; borrowed: mapped, and another process's",
        names="lane, workers",
    )
    for row in document["rows"]:
        table.add_row(
            f"{row['lane']}, {row['workers']}: {row['role']}",
            *(f"{row[key] / MB:.0f}" for key in ("peak_bytes", "bound_bytes")),
            f"{row['of_bound']:.2f}",
            *(f"{row[f'{kind}_bytes'] / MB:.0f}" for kind in ("private", "shared", "borrowed")),
        )
    return table
