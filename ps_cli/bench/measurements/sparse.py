"""Pull and push of rows of an embedding table, in millions of rows a second.

Ids are uniform, except where a cache at the worker is measured, or rows on a server's disk: these
follow Zipf's law. A row counts each time that an id comes, in both.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from rich.console import Group
from rich.table import Table as TextTable

from ps_cli.bench.contenders import contenders
from ps_cli.bench.contenders.child import Child, started
from ps_cli.bench.contenders.contenders import Pair
from ps_cli.bench.contenders.rows import (
    BATCH_COUNT,
    CACHE_STEP_COUNT,
    CALL_COUNT,
    IN_FLIGHT_COUNT,
    LENGTH,
    cached_row_count,
)
from ps_cli.bench.contenders.zipf import EXPONENT
from ps_cli.bench.instruments.sampling import MIB, figures_table, rounded, take_turns
from ps_cli.bench.measurements import disk_rows
from ps_cli.bench.settings import BenchSettings
from ps_core import limits
from ps_core.errors import InvalidConfig
from ps_runtime.system.capacity import memory_bytes

ROW_COUNT = 10_000_000
QUICK_ROW_COUNT = 100_000
VERBS = ("pull", "push")
PARTITION_COUNTS = (1, limits.default_partition_count(1))
"""One for the one server, and what a table has unless its creator says otherwise."""

_CEILINGS = {"pull": "gather", "push": "add"}
_PEERS = {"torch_rpc": "own", "torch_rpc_tcp": "tcp"}
_ZIPF_CALLS = [(name, count) for name in ("zipf", "cached") for count in (1, IN_FLIGHT_COUNT)]
_SHARES: dict[str, Callable[[int, int, int], float]] = {
    "hit_rate": lambda hits, misses, _: hits / max(hits + misses, 1),
    "asked_share": lambda hits, misses, ids: (hits + misses) / ids,
    "cached_asked_share": lambda _, misses, ids: misses / ids,
}
"""Shares by the hits and misses of a worker's cache, of distinct rows, and the ids looked up."""

_ENDS = (*_SHARES, *disk_rows.ENDS)
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
    disk_rows.check_space(row_count, len(settings.lanes))
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
            "zipf_exponent": EXPONENT,
            "cache_rows": cached_row_count(row_count),
            "cache_steps": CACHE_STEP_COUNT,
            **disk_rows.disk_environment(row_count),
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
        "zipf": [
            _zipf_row(rates, partition_count, lane, count)
            for partition_count, rates in legs.items()
            for lane in settings.lanes
            for count in (1, IN_FLIGHT_COUNT)
        ],
        "disk": [
            disk_rows.disk_row(rates, row_count, partition_count, lane, action)
            for partition_count, rates in legs.items()
            if disk_rows.is_measured(row_count, partition_count)
            for lane in settings.lanes
            for action in disk_rows.ACTIONS
        ],
    }


def _zipf_row(
    rates: Mapping[str, float], partition_count: int, lane: str, count: int
) -> dict[str, Any]:
    """Pulls of ids by Zipf's law, without a cache and with one, beside those of uniform ids."""
    uniform = rates[f"{lane} pull {count}"]
    plain, cached = (rates[f"{lane} {name} {count}"] for name in ("zipf", "cached"))
    return {
        "lane": lane,
        "partitions": partition_count,
        "in_flight": count,
        "m_rows_s": plain,
        "cached_m_rows_s": cached,
        "uniform_m_rows_s": uniform,
        "over_uniform": rounded(plain / uniform),
        "cached_over_uniform": rounded(cached / uniform),
        **{name: rates[f"{lane} {name}"] for name in _SHARES},
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
    """The median rates of all contenders, in millions of rows a second, and the figures at their
    ends. They take turns; where memory does not hold the rows of all, they are measured one after
    the other, but a lane's cluster with rows on disk always beside that without.
    """
    contexts: dict[str, contextlib.AbstractContextManager[_Runs]] = {
        "one core": _core(row_count),
        **{f"torch RPC, {lane}": _peer(peer, lane, row_count) for peer, lane in _PEERS.items()},
        **{lane: _lane(lane, row_count, partition_count) for lane in settings.lanes},
    }
    needed_bytes = len(contexts) * row_count * _BYTES_PER_ROW
    if disk_rows.is_measured(row_count, partition_count):
        needed_bytes += len(settings.lanes) * disk_rows.memory_mb(row_count, partition_count) * MIB
    groups = [list(contexts)] if 1.3 * needed_bytes < memory_bytes() else [[n] for n in contexts]
    samples: dict[str, list[float]] = {}
    figures: dict[str, float] = {}
    for names in groups:
        with contextlib.ExitStack() as stack:
            runs: _Runs = {}
            for name in names:
                settings.on_progress(f"making the rows of {name}")
                runs |= stack.enter_context(contexts[name])
            ends = {name: runs.pop(name) for name in list(runs) if name.endswith(_ENDS)}
            samples |= take_turns(runs, settings.round_count, settings.on_progress)
            figures |= {name: end() for name, end in ends.items()}
    moved = BATCH_COUNT * CALL_COUNT / 1e6
    rates = {name: rounded(moved / statistics.median(taken)) for name, taken in samples.items()}
    return rates | figures


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
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(contenders.cluster(lane, [command]))
        worker = cluster.workers[0]
        calls = [f"{name} {count}" for name, count in (*_CALLS, *_ZIPF_CALLS)]
        runs: _Runs = {
            **{f"{lane} {call}": worker.timed(call) for call in calls},
            **{f"{lane} {name}": partial(_share, worker, name) for name in _SHARES},
        }
        if disk_rows.is_measured(row_count, partition_count):
            disk = disk_rows.disk_cluster(lane, command, row_count, partition_count)
            runs |= disk_rows.disk_runs(lane, stack.enter_context(disk), cluster)
        yield runs
        worker.do("check")


def _share(worker: Child, name: str) -> float:
    return rounded(_SHARES[name](*map(int, worker.do("counts").result)))


def sparse_view(document: dict[str, Any]) -> Group:
    return Group(_uniform_view(document), _zipf_view(document), disk_rows.disk_view(document))


def _uniform_view(document: dict[str, Any]) -> TextTable:
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


def _zipf_view(document: dict[str, Any]) -> TextTable:
    environment = document["environment"]
    asked, cached = (document["zipf"][0][key] for key in ("asked_share", "cached_asked_share"))
    table = figures_table(
        f"pulls of ids by Zipf's law, exponent {environment['zipf_exponent']}",
        *("uniform", "Zipf", "/ uniform", "cached", "/ uniform", "hits"),
        names="lane, partitions, at once",
        caption=f"cached: up to {environment['cache_rows']:,} rows at the worker, which may be "
        f"{environment['cache_steps']} steps old (ASP); hits: of distinct rows. Rows were asked "
        f"for {asked:.0%} of the ids, with the cache for {cached:.0%}",
    )
    for row in document["zipf"]:
        table.add_row(
            f"{row['lane']}, {row['partitions']}, {row['in_flight']}",
            f"{row['uniform_m_rows_s']:.2f}",
            *(f"{row[key]:.2f}" for key in ("m_rows_s", "over_uniform")),
            *(f"{row[f'cached_{key}']:.2f}" for key in ("m_rows_s", "over_uniform")),
            f"{row['hit_rate']:.0%}",
        )
    return table
