"""Pull and push of rows of an embedding table, in millions of rows a second."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table as TextTable

from ps_cli.bench.contenders import contenders
from ps_cli.bench.contenders.child import started
from ps_cli.bench.contenders.contenders import Pair
from ps_cli.bench.contenders.rows import BATCH_COUNT, CALL_COUNT, IN_FLIGHT_COUNT, LENGTH
from ps_cli.bench.instruments.sampling import figures_table, rounded, take_turns
from ps_cli.bench.settings import BenchSettings
from ps_core.errors import InvalidConfig

ROW_COUNT = 10_000_000
QUICK_ROW_COUNT = 100_000
VERBS = ("pull", "push")
_CEILINGS = {"pull": "gather", "push": "add"}
_PEERS = {"torch_rpc": "own", "torch_rpc_tcp": "tcp"}


def sparse(settings: BenchSettings) -> dict[str, Any]:
    """The document of `--json`; takes some minutes, most of them to make the rows."""
    if settings.size_mb:
        raise InvalidConfig(
            f"sparse is measured on {ROW_COUNT} rows of {LENGTH} elements; leave the size of "
            f"{settings.size_mb} MB out"
        )
    row_count = QUICK_ROW_COUNT if settings.quick else ROW_COUNT
    names = {f"{verb} {count}" for verb in VERBS for count in (1, IN_FLIGHT_COUNT)}
    rates: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        (core,) = stack.enter_context(started(("rows:core", str(row_count))))
        runs = {name: core.timed(name) for name in _CEILINGS.values()}
        rates |= _rates(runs, settings.within("one core"))
    # One contender at a time: each has all rows in memory.
    for peer, lane in _PEERS.items():
        with contenders.torch_rows(lane, row_count) as pair:
            runs = {f"{peer} {name}": _timed(pair, name) for name in sorted(names)}
            rates |= _rates(runs, settings.within(f"torch RPC, {lane}"))
    for lane in settings.lanes:
        with contenders.cluster(lane, [("rows:member", str(row_count))]) as cluster:
            worker = cluster.workers[0]
            runs = {f"{lane} {name}": worker.timed(name) for name in sorted(names)}
            rates |= _rates(runs, settings.within(lane))
    return {
        "environment": {
            "row_count": row_count,
            "row_elements": LENGTH,
            "batch_ids": BATCH_COUNT,
            "batches_per_run": CALL_COUNT,
            "round_count": settings.round_count,
        },
        "ceilings": {
            **{f"{name}_m_rows_s": rates[name] for name in _CEILINGS.values()},
            **{
                f"{peer}_{verb}_{count}_m_rows_s": rates[f"{peer} {verb} {count}"]
                for peer in _PEERS
                for verb in VERBS
                for count in (1, IN_FLIGHT_COUNT)
            },
        },
        "rows": [
            {
                "lane": lane,
                "call": verb,
                "in_flight": count,
                "m_rows_s": rates[f"{lane} {verb} {count}"],
                "of_core": rounded(rates[f"{lane} {verb} {count}"] / rates[_CEILINGS[verb]]),
                **{
                    f"over_{peer}": rounded(
                        rates[f"{lane} {verb} {count}"] / rates[f"{peer} {verb} {count}"]
                    )
                    for peer in _PEERS
                },
            }
            for lane in settings.lanes
            for verb in VERBS
            for count in (1, IN_FLIGHT_COUNT)
        ],
    }


def _timed(pair: Pair, name: str) -> Callable[[], float]:
    return lambda: float(pair.do(name).result)


def _rates(runs: Mapping[str, Callable[[], float]], settings: BenchSettings) -> dict[str, float]:
    """The median rates, in millions of rows a second."""
    samples = take_turns(runs, settings.round_count, settings.on_progress)
    moved = BATCH_COUNT * CALL_COUNT / 1e6
    return {name: rounded(moved / statistics.median(taken)) for name, taken in samples.items()}


def sparse_view(document: dict[str, Any]) -> TextTable:
    ceilings = document["ceilings"]
    table = figures_table(
        f"sparse: millions of rows a second, {document['environment']['row_count']:,} rows",
        *("M rows/s", "of one core", "/ torch RPC", "/ torch RPC/TCP"),
        caption="one core: gather and index_add on a plain array",
    )
    for verb, name in _CEILINGS.items():
        table.add_row(f"one core, {verb}", f"{ceilings[f'{name}_m_rows_s']:.2f}")
    for row in document["rows"]:
        table.add_row(
            f"{row['lane']} {row['call']}, {row['in_flight']} in flight",
            f"{row['m_rows_s']:.2f}",
            *(f"{row[key]:.2f}" for key in ("of_core", "over_torch_rpc", "over_torch_rpc_tcp")),
        )
    return table
