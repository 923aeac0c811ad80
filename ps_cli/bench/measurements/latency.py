"""Latency of small calls: push, pull and push_pull of a 4 KB table."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.table import Table as TextTable

from ps_cli.bench.contenders import contenders
from ps_cli.bench.contenders.child import Done
from ps_cli.bench.instruments.sampling import figures_table, rounded, take_turns
from ps_cli.bench.settings import BenchSettings
from ps_core.errors import InvalidConfig

TABLE_BYTES = 4096
CALL_COUNT = 1000
QUICK_CALL_COUNT = 50
_VERBS = ("push_pull", "push", "pull")


def latency(settings: BenchSettings) -> dict[str, Any]:
    """The document of `--json`; takes about half a minute. Each run is many calls, one after the
    other; the contenders' runs take turns.
    """
    if settings.size_mb:
        raise InvalidConfig(
            f"latency is measured on a table of {TABLE_BYTES} bytes; leave the size of "
            f"{settings.size_mb} MB out"
        )
    call_count = QUICK_CALL_COUNT if settings.quick else CALL_COUNT
    with contextlib.ExitStack() as stack:
        commands = contenders.members(1, TABLE_BYTES, call_count=call_count)
        raw, torch_rpc = contenders.enter_all(
            stack,
            [
                contenders.raw_grpc(TABLE_BYTES, call_count),
                contenders.torch_rpc("own", TABLE_BYTES, call_count),
            ],
        )
        clusters = contenders.enter_all(
            stack, [contenders.cluster(lane, commands) for lane in settings.lanes]
        )
        runs = {
            "raw_unary": partial(raw.do, "exchange"),
            "torch_rpc": partial(torch_rpc.do, "exchange"),
            **{
                f"{cluster.lane} {verb}": partial(cluster.workers[0].do, f"sgd {verb} latency")
                for cluster in clusters
                for verb in _VERBS
            },
        }
        samples = take_turns(runs, settings.round_count, settings.on_progress)
    figures = {name: _medians_ms(taken) for name, taken in samples.items()}
    return {
        "environment": {
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


def _medians_ms(samples: Sequence[Done]) -> dict[str, float]:
    return {
        f"{name}_ms": rounded(statistics.median(one.result[f"{name}_s"] for one in samples) * 1000)
        for name in ("p50", "p99")
    }


def latency_view(document: dict[str, Any]) -> TextTable:
    ceilings = document["ceilings"]
    table = figures_table(
        "latency: ms of a call on a 4 KB table",
        *("p50", "p99", "p50 / raw gRPC", "p50 / torch RPC", "p99 / p50"),
    )
    figures = [
        ("raw gRPC, unary", ceilings["raw_unary_p50_ms"], ceilings["raw_unary_p99_ms"]),
        ("torch RPC", ceilings["torch_rpc_p50_ms"], ceilings["torch_rpc_p99_ms"]),
        *(
            (f"{row['lane']} {row['call']}", row["p50_ms"], row["p99_ms"])
            for row in document["rows"]
        ),
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
