"""Latency of small calls: push, pull and push_pull of a 4 KB table."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable

from rich.table import Table as TextTable

from ps_cli.bench.contenders import contenders
from ps_cli.bench.contenders.child import Child
from ps_cli.bench.contenders.contenders import Load, Pair
from ps_cli.bench.instruments.environment import environment
from ps_cli.bench.instruments.sampling import figures_table, rounded
from ps_cli.bench.settings import BenchSettings
from ps_core.errors import InvalidConfig

TABLE_BYTES = 4096
CALL_COUNT = 1000
QUICK_CALL_COUNT = 50
_VERBS = ("push_pull", "push", "pull")

Percentiles = dict[str, float]


def latency(settings: BenchSettings) -> dict[str, object]:
    """Measure everything; the document of `--json`.

    Each run is many calls, one after the other; the contenders' runs take turns.

    Blocking: about half a minute.

    Raises:
        InvalidConfig: the settings have a size.
    """
    if settings.size_mb:
        raise InvalidConfig(
            f"latency is measured on a table of {TABLE_BYTES} bytes; leave the size of "
            f"{settings.size_mb} MB out"
        )
    found = environment()
    call_count = QUICK_CALL_COUNT if settings.quick else CALL_COUNT
    with contextlib.ExitStack() as stack:
        load = Load(TABLE_BYTES, call_count=call_count)
        raw, torch_rpc = contenders.enter_all(
            stack,
            [
                contenders.raw_grpc(TABLE_BYTES, call_count),
                contenders.torch_rpc("own", TABLE_BYTES, call_count),
            ],
        )
        clusters = contenders.enter_all(
            stack, [contenders.cluster(lane, 1, load) for lane in settings.lanes]
        )
        runs = {
            "raw_unary": _runner(raw, "exchange"),
            "torch_rpc": _runner(torch_rpc, "exchange"),
            **{
                f"{cluster.lane} {verb}": _runner(cluster.workers[0], f"sgd {verb} latency")
                for cluster in clusters
                for verb in _VERBS
            },
        }
        samples: dict[str, list[Percentiles]] = {name: [] for name in runs}
        for number in range(settings.round_count + 1):
            settings.on_round(number)
            for name, run in runs.items():
                taken = run()
                if number:
                    samples[name].append(taken)
    figures = {name: _medians_ms(taken) for name, taken in samples.items()}
    return {
        "environment": {
            **found,
            "table_bytes": TABLE_BYTES,
            "calls_per_run": call_count,
            "round_count": settings.round_count,
        },
        "ceilings": {
            f"{name}_{key}": figures[name][key]
            for name in ("raw_unary", "torch_rpc")
            for key in ("p50_ms", "p99_ms")
        },
        "rows": [
            {"lane": lane, "call": verb, "workers": 1, "servers": 1, **figures[f"{lane} {verb}"]}
            for lane in settings.lanes
            for verb in _VERBS
        ],
    }


def _runner(contender: Child | Pair, action: str) -> Callable[[], Percentiles]:
    def run() -> Percentiles:
        found: Percentiles = contender.do(action).result
        return found

    return run


def _medians_ms(samples: list[Percentiles]) -> dict[str, float]:
    return {
        f"{name}_ms": rounded(statistics.median(one[f"{name}_s"] for one in samples) * 1000)
        for name in ("p50", "p99")
    }


def latency_view(document: dict[str, object]) -> TextTable:
    ceilings, rows = document["ceilings"], document["rows"]
    assert isinstance(ceilings, dict)
    assert isinstance(rows, list)
    table = figures_table(
        "latency: ms of a call on a 4 KB table",
        *("p50", "p99", "p50 / raw gRPC", "p50 / torch RPC", "p99 / p50"),
    )
    figures = [
        ("raw gRPC, unary", ceilings["raw_unary_p50_ms"], ceilings["raw_unary_p99_ms"]),
        ("torch RPC", ceilings["torch_rpc_p50_ms"], ceilings["torch_rpc_p99_ms"]),
        *((f"{row['lane']} {row['call']}", row["p50_ms"], row["p99_ms"]) for row in rows),
    ]
    for name, p50, p99 in figures:
        table.add_row(
            name,
            f"{p50:.3f}",
            f"{p99:.3f}",
            f"{p50 / ceilings['raw_unary_p50_ms']:.2f}",
            f"{p50 / ceilings['torch_rpc_p50_ms']:.2f}",
            f"{p99 / p50:.1f}",
        )
    return table
