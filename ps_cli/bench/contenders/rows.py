"""Processes: a worker on an embedding table, and a torch RPC server of the same rows.

Both servers have the same rows, index, arrays and row-wise Adagrad (`ps_server.values.row_store`),
so that what differs is what is around them. At its end each worker and trainer pushes one batch of
new ids several times, and compares the rows with those of a store of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import rpc

import ps_worker as ps
from ps_cli.bench.contenders.child import Actions
from ps_cli.bench.contenders.torch_rpc import SERVER, joined
from ps_cli.bench.contenders.zipf import ZipfIds
from ps_core.errors import Internal
from ps_core.keys import TableId
from ps_core.sliced_work import at_once
from ps_core.tables.elements import DType, Initializer, InitializerKind
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import RowsSpec, TableSpec
from ps_server.values.row_gradients import RowGradients, gradients_of
from ps_server.values.row_store import RowStore
from ps_server.values.update_arithmetic import Terms
from ps_worker.embedding.rows import GivenIds, cut_as_given, ids_of, rows_of

LENGTH, BATCH_COUNT = 64, 8192
"""Elements of a row, and ids of a batch."""

CALL_COUNT = 10
"""Batches of one run."""

IN_FLIGHT_COUNT = 4
CACHE_STEP_COUNT = 16
MAX_CACHED_ROW_COUNT = 100_000
LEARNING_RATE = 0.01
SCALE = 0.1


class Batches:
    """Batches of ids below `row_count`, all drawn before, and a gradient."""

    def __init__(self, row_count: int) -> None:
        draws = np.random.default_rng(0)
        self.row_count = row_count
        self.ids = [draws.integers(0, row_count, BATCH_COUNT) for _ in range(4 * CALL_COUNT)]
        self.gradient = draws.standard_normal((BATCH_COUNT, LENGTH)).astype(np.float32)
        self._at = 0

    def next(self) -> npt.NDArray[np.int64]:
        self._at = (self._at + 1) % len(self.ids)
        return self.ids[self._at]

    def run(self) -> list[npt.NDArray[np.int64]]:
        """The batches of one run."""
        return [self.next() for _ in range(CALL_COUNT)]

    def filling(self) -> Iterator[npt.NDArray[np.int64]]:
        """All ids, so that each row exists."""
        for begin in range(0, self.row_count, BATCH_COUNT):
            yield np.arange(begin, min(begin + BATCH_COUNT, self.row_count))


def _timed(
    start: Callable[[npt.NDArray[np.int64]], Any],
    end: Callable[[Any], object],
    draw: Callable[[], list[npt.NDArray[np.int64]]],
    in_flight_count: int,
) -> Callable[[], float]:
    """A function that does a call for each batch of a run, so many at once, and returns its
    seconds. The run is drawn before.
    """

    def run() -> float:
        batches = draw()
        began_s = time.perf_counter()
        under_way: deque[Any] = deque()
        for ids in batches:
            if len(under_way) == in_flight_count:
                end(under_way.popleft())
            under_way.append(start(ids))
        for call in under_way:
            end(call)
        return time.perf_counter() - began_s

    return run


def _actions(
    pull: tuple[Callable[[Any], Any], Callable[[Any], object]],
    push: tuple[Callable[[Any], Any], Callable[[Any], object]],
    batches: Batches,
) -> dict[str, Callable[[], float]]:
    return {
        f"{name} {count}": _timed(*verb, batches.run, count)
        for name, verb in (("pull", pull), ("push", push))
        for count in (1, IN_FLIGHT_COUNT)
    }


def _check(
    start_push: Callable[[npt.NDArray[np.int64]], Any],
    end_push: Callable[[Any], object],
    pull: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]],
    batches: Batches,
) -> None:
    """Push a batch of new ids, so many pushes at once; raise Internal unless each counts once."""
    ids = np.arange(batches.row_count, batches.row_count + BATCH_COUNT)
    push_count = 2 * IN_FLIGHT_COUNT
    _timed(start_push, end_push, lambda: push_count * [ids], IN_FLIGHT_COUNT)()
    store = _store()
    for _ in range(push_count):
        _update(store, gradients_of(0, ids.view(np.uint64), batches.gradient))
    wrong = (pull(ids) != store.rows(0, ids.view(np.uint64))).any(axis=1)
    if wrong.any():
        raise Internal(
            f"{wrong.sum()} rows of {BATCH_COUNT} are wrong after {push_count} pushes, "
            f"{IN_FLIGHT_COUNT} at once"
        )


def cached_row_count(row_count: int) -> int:
    """The rows that a worker caches: a tenth, and not too many."""
    return min(row_count // 10, MAX_CACHED_ROW_COUNT)


class _Lookups:
    """Lookups of batches that are drawn by Zipf's law, with as many steps."""

    def __init__(self, embedding: ps.Embedding, ids: ZipfIds, earlier_count: int = 0) -> None:
        self._embedding = embedding
        self._ids = ids
        self._earlier_count = earlier_count
        self._batch_count = 0

    def timed(self, in_flight_count: int) -> float:
        """Look CALL_COUNT batches up, so many at once; the seconds without those of the steps, and
        of some batches before, after which a cache has as much as it keeps.
        """
        for _ in range(self._earlier_count):
            self._look_up([self._next()])
        batches = [self._next() for _ in range(CALL_COUNT)]
        return sum(
            self._look_up(batches[begin : begin + in_flight_count])
            for begin in range(0, CALL_COUNT, in_flight_count)
        )

    def _next(self) -> torch.Tensor:
        return torch.from_numpy(self._ids.next(BATCH_COUNT))

    def _look_up(self, batches: list[torch.Tensor]) -> float:
        embedding = self._embedding
        self._batch_count += len(batches)
        began_s = time.perf_counter()
        with torch.no_grad():
            for lookup in [embedding.begin_lookup(ids) for ids in batches]:
                places, rows = embedding.end_lookup(lookup)
                rows.numpy().take(places.numpy(), axis=0)
        taken_s = time.perf_counter() - began_s
        for _ in batches:
            embedding.step()
        return taken_s

    def counts(self) -> tuple[int, int, int]:
        """Hits and misses of the cache so far, and the ids that were looked up."""
        hits, misses = self._embedding.cache_hit_count, self._embedding.cache_miss_count
        return hits, misses, self._batch_count * BATCH_COUNT


@contextlib.contextmanager
def member(scheduler: str, lane: str, row_count: str, partition_count: str) -> Iterator[Actions]:
    """A worker of a cluster, whose table has `row_count` rows when it is ready. "counts" has what
    its cache found.
    """
    batches, zipf = Batches(int(row_count)), ZipfIds(int(row_count))
    with ps.connect(scheduler, rank=0, lane=lane) as client:

        def opened(cache_rows: int = 0, cache_steps: int = 0) -> ps.Embedding:
            return ps.Embedding(
                client,
                "rows",
                LENGTH,
                optimizer=ps.RowwiseAdagrad(lr=LEARNING_RATE),
                init=ps.Uniform(SCALE),
                partitions=int(partition_count),
                consistency=ps.ASP(),
                cache_rows=cache_rows,
                cache_steps=cache_steps,
            )

        table = opened().table
        for ids in batches.filling():
            client.wait(client.push_rows(table, ids, batches.gradient[: len(ids)]))
        spec = rows_of(table.table)

        def start_pull(ids: npt.NDArray[np.int64]) -> tuple[GivenIds, ps.PullTicket[Any]]:
            cut = cut_as_given(ids_of(ids), spec)
            return cut, client.pulls.start_rows(table, cut)

        def end_pull(started: tuple[GivenIds, ps.PullTicket[Any]]) -> None:
            cut, ticket = started
            cut.as_given(client.wait(ticket))

        def pulled(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
            return client.pull_rows(table, ids)

        def start_push(ids: npt.NDArray[np.int64]) -> ps.PushTicket:
            return client.push_rows(table, ids, batches.gradient)

        def zipf_run() -> list[npt.NDArray[np.int64]]:
            return [zipf.next(BATCH_COUNT) for _ in range(CALL_COUNT)]

        plain = _Lookups(opened(), zipf)
        with_cache = opened(cached_row_count(int(row_count)), CACHE_STEP_COUNT)
        cached = _Lookups(with_cache, zipf, CACHE_STEP_COUNT)
        yield {
            **_actions((start_pull, end_pull), (start_push, client.wait), batches),
            **{f"zipf {count}": partial(plain.timed, count) for count in (1, IN_FLIGHT_COUNT)},
            "zipf_push 1": _timed(start_push, client.wait, zipf_run, 1),
            **{f"cached {count}": partial(cached.timed, count) for count in (1, IN_FLIGHT_COUNT)},
            "counts": cached.counts,
            "check": lambda: _check(start_push, client.wait, pulled, batches),
        }


# --- torch RPC

_stores: list[RowStore] = []
_updating = threading.Lock()
"""A store knows one update at a time, and torch RPC answers calls in several threads."""


def _store() -> RowStore:
    optimizer = OptimizerSpec(OptimizerKind.ROWWISE_ADAGRAD, (("lr", LEARNING_RATE),))
    spec = TableSpec(
        "rows",
        DType.FLOAT32,
        LENGTH,
        optimizer,
        initializer=Initializer(InitializerKind.UNIFORM, scale=SCALE),
        rows=RowsSpec(1),
    )
    return RowStore(Table(TableId(1), 0, spec.validated()), (0,))


def _update(store: RowStore, gradients: RowGradients) -> None:
    store.accumulate(1, [(0, gradients)], 1.0)
    at_once(store.applying(store.take(1), Terms(1, (), 1)))


def fetch(ids: torch.Tensor) -> torch.Tensor:
    """On the server: the rows of these ids."""
    return torch.from_numpy(_stores[0].rows(0, ids.numpy().view(np.uint64)))


def update(ids: torch.Tensor, gradients: torch.Tensor) -> None:
    """On the server: one step of the rows of these ids."""
    found = gradients_of(0, ids.numpy().view(np.uint64), gradients.numpy())
    with _updating:
        _update(_stores[0], found)


@contextlib.contextmanager
def rpc_server(lane: str, store: str) -> Iterator[Actions]:
    _stores.append(_store())
    with joined(SERVER, 0, lane, store):
        yield {}


@contextlib.contextmanager
def rpc_client(lane: str, store: str, row_count: str) -> Iterator[Actions]:
    batches = Batches(int(row_count))
    gradient = torch.from_numpy(batches.gradient)

    def start_push(ids: npt.NDArray[np.int64]) -> Any:
        return rpc.rpc_async(SERVER, update, args=(torch.from_numpy(ids), gradient))

    def start_pull(ids: npt.NDArray[np.int64]) -> Any:
        return rpc.rpc_async(SERVER, fetch, args=(torch.from_numpy(ids),))

    with joined("trainer", 1, lane, store):
        for ids in batches.filling():
            given = torch.from_numpy(ids), torch.from_numpy(batches.gradient[: len(ids)])
            rpc.rpc_sync(SERVER, update, args=given)
        pull = start_pull, lambda call: call.wait()
        push = start_push, lambda call: call.wait()
        yield {
            **_actions(pull, push, batches),
            "check": lambda: _check(*push, lambda ids: start_pull(ids).wait().numpy(), batches),
        }


# --- the ceiling


@contextlib.contextmanager
def core(row_count: str) -> Iterator[Actions]:
    """One core: rows gathered from a plain array, and added to it, in batches."""
    torch.set_num_threads(1)
    batches = Batches(int(row_count))
    rows = torch.full((int(row_count), LENGTH), 0.1)
    gradient = torch.from_numpy(batches.gradient)

    def gather() -> float:
        began_s = time.perf_counter()
        for _ in range(CALL_COUNT):
            torch.index_select(rows, 0, torch.from_numpy(batches.next()))
        return time.perf_counter() - began_s

    def add() -> float:
        began_s = time.perf_counter()
        for _ in range(CALL_COUNT):
            rows.index_add_(0, torch.from_numpy(batches.next()), gradient)
        return time.perf_counter() - began_s

    yield {"gather": gather, "add": add}
