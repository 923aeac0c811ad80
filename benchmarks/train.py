"""What a cluster costs a training step: the same script with torch's optimizer and with ours."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable

from rich.table import Table as TextTable

import ps_worker as ps
from benchmarks.child import Child
from benchmarks.environment import environment
from benchmarks.sampling import rounded
from benchmarks.settings import BenchSettings
from ps_core.errors import InvalidConfig

WIDTH, BATCH, LENGTH, STEP_COUNT = 1280, 16, 128, 3
"""About 10 million parameters; three steps a run."""

QUICK_WIDTH, QUICK_BATCH, QUICK_LENGTH = 128, 4, 16
ELEMENT_BYTES = 4


def train(settings: BenchSettings) -> dict[str, object]:
    """Measure everything; the document that `--json` writes.

    Blocking: a minute or two.

    Raises:
        InvalidConfig: a size was chosen.
    """
    if settings.size_mb:
        raise InvalidConfig(
            f"train has a model of its own; leave the size of {settings.size_mb} MB out"
        )
    found = environment()
    sizes = (QUICK_WIDTH, QUICK_BATCH, QUICK_LENGTH) if settings.quick else (WIDTH, BATCH, LENGTH)
    shape = tuple(str(size) for size in (*sizes, STEP_COUNT))
    with contextlib.ExitStack() as stack:
        roles = stack.enter_context(ps.local_cluster(servers=1, workers=1))
        worker = stack.enter_context(Child("benchmarks.training", roles.address, *shape))
        alone = stack.enter_context(Child("benchmarks.training", "", *shape))
        parameter_count = int(alone.do("parameters").result)
        runs = {
            "alone": _timed(alone, "steps"),
            "cluster": _timed(worker, "steps"),
            "transfer": _timed(worker, "transfer"),
        }
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(settings.round_count + 1):
            settings.on_round(number)
            for name, run in runs.items():
                seconds = run()
                if number:
                    samples[name].append(seconds)
    alone_s, cluster_s, transfer_s = (statistics.median(taken) for taken in samples.values())
    return {
        "environment": {
            **found,
            "batch": sizes[1],
            "length": sizes[2],
            "steps_per_run": STEP_COUNT,
            "round_count": settings.round_count,
        },
        "ceilings": {"local_step_s": rounded(alone_s)},
        "rows": [
            {
                "lane": "grpc",
                "optimizer": "adam",
                "workers": 1,
                "servers": 1,
                "parameter_count": parameter_count,
                "bytes_per_step": 2 * ELEMENT_BYTES * parameter_count,
                "step_s": rounded(cluster_s),
                "of_local": rounded(alone_s / cluster_s),
                "transfer_s": rounded(transfer_s),
                "hidden": rounded(_hidden(alone_s, cluster_s, transfer_s)),
            }
        ],
    }


def _hidden(alone_s: float, cluster_s: float, transfer_s: float) -> float:
    """The part of the transfer that a step does not wait for, 0 to 1."""
    return min(1.0, max(0.0, 1.0 - (cluster_s - alone_s) / transfer_s))


def _timed(child: Child, action: str) -> Callable[[], float]:
    def run() -> float:
        return float(child.do(action).result)

    return run


def train_table(document: dict[str, object]) -> TextTable:
    """The document for a person."""
    ceilings, rows = document["ceilings"], document["rows"]
    assert isinstance(ceilings, dict)
    assert isinstance(rows, list)
    table = TextTable(title="train: a step of a byte LSTM with Adam, 1 torch thread a process")
    table.add_column("")
    for heading in ("step s", "of local", "MB a step", "transfer alone s", "hidden"):
        table.add_column(heading, justify="right")
    table.add_row("plain torch", f"{ceilings['local_step_s']:.3f}", "1.00", "", "", "")
    for row in rows:
        table.add_row(
            f"{row['lane']}, {row['workers']} worker, {row['servers']} server",
            f"{row['step_s']:.3f}",
            f"{row['of_local']:.2f}",
            f"{row['bytes_per_step'] / 1e6:.0f}",
            f"{row['transfer_s']:.3f}",
            f"{row['hidden']:.0%}",
        )
    return table
