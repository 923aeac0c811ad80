"""Pull and push of rows of an embedding table, in millions of rows a second."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from rich.table import Table as TextTable

from ps_cli.bench.contenders import contenders
from ps_cli.bench.contenders.child import started
from ps_cli.bench.contenders.contenders import Pair
from ps_cli.bench.contenders.rows import BATCH_COUNT, CALL_COUNT, IN_FLIGHT_COUNT, LENGTH
from ps_cli.bench.instruments.sampling import figures_table, rounded, take_turns
from ps_cli.bench.settings import BenchSettings
from ps_core import limits
from ps_core.errors import InvalidConfig
from ps_runtime.system.capacity import memory_bytes

ROW_COUNT = 10_000_000
QUICK_ROW_COUNT = 100_000
VERBS = ("pull", "push")
PARTITION_COUNTS = (1, limits.DEFAULT_PARTITION_COUNT)
"""One for the one server, and what a table has unless its creator says otherwise."""

_CEILINGS = {"pull": "gather", "push": "add"}
_PEERS = {"torch_rpc": "own", "torch_rpc_tcp": "tcp"}
_CALLS = [(verb, count) for verb in VERBS for count in (1, IN_FLIGHT_COUNT)]
_BYTES_PER_ROW = 1.2 * 4 * LENGTH
"""Memory of a contender, with its index and its state."""

_Runs = dict[str, Callable[[], float]]


def sparse(settings: BenchSettings) -> dict[str, Any]:
    """The document of `--json`; takes some minutes, most of them to make the rows."""
    if settings.size_mb:
        raise InvalidConfig(
            f"sparse is measured on {ROW_COUNT} rows of {LENGTH} elements; leave the size of "
            f"{settings.size_mb} MB out"
        )
    row_count = QUICK_ROW_COUNT if settings.quick else ROW_COUNT
    legs = {
        count: _leg(settings.within(f"{count} partitions"), row_count, count)
        for count in PARTITION_COUNTS
    }
    peers = [f"{peer} {verb} {count}" for peer in _PEERS for verb, count in _CALLS]
    return {
        "environment": {
            "row_count": row_count,
            "row_elements": LENGTH,
            "batch_ids": BATCH_COUNT,
            "batches_per_run": CALL_COUNT,
            "round_count": settings.round_count,
        },
        "ceilings": {
            f"{name.replace(' ', '_')}_m_rows_s": rounded(
                statistics.median(rates[name] for rates in legs.values())
            )
            for name in (*_CEILINGS.values(), *peers)
        },
        "rows": [
            _row(rates, partition_count, lane, verb, count)
            for partition_count, rates in legs.items()
            for lane in settings.lanes
            for verb, count in _CALLS
        ],
    }


def _row(
    rates: Mapping[str, float], partition_count: int, lane: str, verb: str, count: int
) -> dict[str, Any]:
    rate = rates[f"{lane} {verb} {count}"]
    return {
        "lane": lane,
        "partitions": partition_count,
        "call": verb,
        "in_flight": count,
        "m_rows_s": rate,
        "of_core": rounded(rate / rates[_CEILINGS[verb]]),
        **{f"over_{peer}": rounded(rate / rates[f"{peer} {verb} {count}"]) for peer in _PEERS},
    }


def _leg(settings: BenchSettings, row_count: int, partition_count: int) -> dict[str, float]:
    """The median rates of all contenders, in millions of rows a second. They take turns; where
    memory does not hold the rows of all, they are measured one after the other.
    """
    contexts: dict[str, contextlib.AbstractContextManager[_Runs]] = {
        "one core": _core(row_count),
        **{f"torch RPC, {lane}": _peer(peer, lane, row_count) for peer, lane in _PEERS.items()},
        **{lane: _lane(lane, row_count, partition_count) for lane in settings.lanes},
    }
    needed_bytes = len(contexts) * row_count * _BYTES_PER_ROW
    groups = [list(contexts)] if 1.3 * needed_bytes < memory_bytes() else [[n] for n in contexts]
    samples: dict[str, list[float]] = {}
    for names in groups:
        with contextlib.ExitStack() as stack:
            runs: _Runs = {}
            for name in names:
                settings.on_progress(f"making the rows of {name}")
                runs |= stack.enter_context(contexts[name])
            samples |= take_turns(runs, settings.round_count, settings.on_progress)
    moved = BATCH_COUNT * CALL_COUNT / 1e6
    return {name: rounded(moved / statistics.median(taken)) for name, taken in samples.items()}


@contextlib.contextmanager
def _core(row_count: int) -> Iterator[_Runs]:
    with started(("rows:core", str(row_count))) as (core,):
        yield {name: core.timed(name) for name in _CEILINGS.values()}


@contextlib.contextmanager
def _peer(peer: str, lane: str, row_count: int) -> Iterator[_Runs]:
    with contenders.torch_rows(lane, row_count) as pair:
        yield {
            f"{peer} {verb} {count}": partial(_result, pair, f"{verb} {count}")
            for verb, count in _CALLS
        }


def _result(pair: Pair, name: str) -> float:
    return float(pair.do(name).result)


@contextlib.contextmanager
def _lane(lane: str, row_count: int, partition_count: int) -> Iterator[_Runs]:
    command = ("rows:member", str(row_count), str(partition_count))
    with contenders.cluster(lane, [command]) as cluster:
        worker = cluster.workers[0]
        yield {f"{lane} {verb} {count}": worker.timed(f"{verb} {count}") for verb, count in _CALLS}


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
        words = f"partitions: {row['partitions']}, {row['in_flight']} at once"
        table.add_row(
            f"{row['lane']} {row['call']}, {words}",
            f"{row['m_rows_s']:.2f}",
            *(f"{row[key]:.2f}" for key in ("of_core", "over_torch_rpc", "over_torch_rpc_tcp")),
        )
    return table
