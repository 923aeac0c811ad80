"""The largest legal pushes, updates, pulls and copies of rows take short turns of the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ps_core import limits
from ps_core.keys import TableId
from ps_core.sliced_work import Work, at_once
from ps_core.tables.elements import Codec, DType, Initializer, InitializerKind
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Eviction, RowsSpec, RowStorage, TableSpec
from ps_runtime.system.prefault import Prefaulting
from ps_server.rows.row_memory import RowMemory
from ps_server.values.row_gradients import payload_of
from ps_server.values.row_store import RowStore
from ps_server.values.update_arithmetic import Terms
from tests.row_audits import read_rows
from tests.unit.measured_loop import most_turn_s

pytestmark = pytest.mark.slow

LENGTHS = [1, 64, limits.MAX_ROW_ELEMENTS]
MANY = 600_000


def store_of(
    length: int,
    kind: OptimizerKind = OptimizerKind.ADAM,
    rows: RowsSpec = RowsSpec(1),  # noqa: B008 - frozen
) -> RowStore:
    spec = TableSpec(
        "rows",
        DType.FLOAT32,
        length,
        OptimizerSpec(kind),
        initializer=Initializer(InitializerKind.NORMAL, scale=1.0),
        rows=rows,
    )
    memory = RowMemory(prefault=Prefaulting().begin)  # as in a server
    return RowStore(Table(TableId(1), 0, spec.validated()), (0,), memory)


def largest_push(length: int) -> bytes:
    """Ids in no order, half of them twice."""
    row_bytes = limits.ROW_ID_BYTES + 4 * length
    count = min(limits.MAX_ROW_COUNT, limits.FOREIGN_MAX_MESSAGE_BYTES // row_bytes)
    ids = np.random.default_rng(0).permutation(count) // 2
    return payload_of(ids.astype(np.uint64), np.ones((count, length), np.float32))


def taken_s(work: Callable[[], object]) -> float:
    """Processor time of the best of three times."""
    found = []
    for _ in range(3):
        begun_s = time.thread_time()
        work()
        found.append(time.thread_time() - begun_s)
    return min(found)


def longest_piece_s(work: Work[object]) -> float:
    """Processor time of the longest stretch between two turns of others."""
    longest_s = 0.0
    pieces: Iterator[None] = iter(work)
    while True:
        begun_s = time.thread_time()
        has_more = next(pieces, StopIteration) is not StopIteration
        longest_s = max(longest_s, time.thread_time() - begun_s)
        if not has_more:
            return longest_s


@pytest.mark.thorough
@pytest.mark.parametrize("length", LENGTHS)
def test_a_push_is_checked_in_one_turn(length: int) -> None:
    store, payload = store_of(length), largest_push(length)
    assert taken_s(lambda: store.decode(0, Codec.FP32, payload, b"")) < most_turn_s()


@pytest.mark.thorough
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_that_no_update_has_made_are_read_in_one_turn(length: int) -> None:
    store = store_of(length)
    count = min(limits.MAX_ROW_COUNT, limits.MAX_PULLED_ROW_BYTES // (4 * length))
    ids = np.arange(count, dtype=np.uint64).tobytes()
    assert read_rows(store, 0, ids).nbytes == count * 4 * length
    assert taken_s(lambda: read_rows(store, 0, ids)) < most_turn_s()


@pytest.mark.thorough
@pytest.mark.parametrize("storage", [RowStorage.FULL, RowStorage.FLOAT16, RowStorage.INT8])
@pytest.mark.parametrize("length", LENGTHS)
def test_an_update_of_the_largest_push_takes_short_turns(length: int, storage: RowStorage) -> None:
    def once(_: int) -> float:
        store = store_of(length, rows=RowsSpec(1, storage=storage))
        payload = largest_push(length)
        store.accumulate(1, [(0, store.decode(0, Codec.FP32, payload, b""))], 1.0)
        if not store.is_brief(1, 1):
            return longest_piece_s(store.applying(store.take(1), Terms(1, (), 1)))
        begun_s = time.thread_time()
        at_once(store.applying(store.take(1), Terms(1, (), 1)))
        return time.thread_time() - begun_s

    assert min(map(once, range(3))) < most_turn_s()


@pytest.mark.thorough
@pytest.mark.parametrize("storage", [RowStorage.FULL, RowStorage.INT8])
def test_a_table_grows_and_is_copied_in_short_turns(storage: RowStorage) -> None:
    """Measured: 3 ms while the index of 600,000 rows grows, 2 ms for a piece of a copy."""
    store = store_of(8, OptimizerKind.ROWWISE_ADAGRAD, RowsSpec(1, storage=storage))
    longest_s = []
    for first in range(0, MANY, limits.MAX_ROW_COUNT):
        ids = np.arange(first, first + limits.MAX_ROW_COUNT, dtype=np.uint64)
        payload = payload_of(ids, np.ones((len(ids), 8), np.float32))
        store.accumulate(1, [(0, store.decode(0, Codec.FP32, payload, b""))], 1.0)
        longest_s.append(longest_piece_s(store.applying(store.take(1), Terms(1, (), 1))))
    assert sorted(longest_s)[-2] < most_turn_s(), longest_s  # one may be the machine's
    assert longest_piece_s(store.copying()) < most_turn_s()


def test_a_store_says_when_its_next_update_may_take_long() -> None:
    """Its ids get a larger array beyond 32,000 rows; its slots beyond 39,321 and 78,643, which are
    3 of 5. An index that is smaller takes short turns anyway.
    """
    store, said = store_of(1, OptimizerKind.SGD), []
    for first in range(0, 80_000, 4_000):
        ids = np.arange(first, first + 4_000, dtype=np.uint64)
        payload = payload_of(ids, np.ones((len(ids), 1), np.float32))
        store.accumulate(1, [(0, store.decode(0, Codec.FP32, payload, b""))], 1.0)
        at_once(store.applying(store.take(1), Terms(1, (), 1)))
        said.append((first + 4_000, store.has_space))
    without = [count for count, has_space in said if not has_space]
    assert without == [24_000, 28_000, 32_000, 36_000, 72_000, 76_000]


@pytest.mark.thorough
@pytest.mark.parametrize("eviction", Eviction)
def test_many_rows_are_admitted_and_evicted_in_short_turns(eviction: Eviction) -> None:
    rows = RowsSpec(1, max_row_count=MANY // 2, eviction=eviction, evict_after=80, admit_after=2)
    store, longest_s = store_of(8, OptimizerKind.ROWWISE_ADAGRAD, rows), []
    for first in range(0, MANY, limits.MAX_ROW_COUNT):
        ids = np.arange(first, first + limits.MAX_ROW_COUNT, dtype=np.uint64)
        payload = payload_of(ids, np.ones((len(ids), 8), np.float32))
        for _ in range(2):
            store.accumulate(1, [(0, store.decode(0, Codec.FP32, payload, b""))], 1.0)
            longest_s.append(longest_piece_s(store.applying(store.take(1), Terms(1, (), 1))))
    assert store.row_count <= MANY // 2
    assert sorted(longest_s)[-2] < most_turn_s(), longest_s  # one may be the machine's


def test_a_captured_partition_is_copied_and_changes_in_short_turns() -> None:
    store = store_of(64)
    payload = largest_push(64)
    store.accumulate(1, [(0, store.decode(0, Codec.FP32, payload, b""))], 1.0)
    at_once(store.applying(store.take(1), Terms(1, (), 1)))
    snapshot, longest_s = store.capture(0), []
    for clock in range(2, 6):
        store.accumulate(clock, [(0, store.decode(0, Codec.FP32, payload, b""))], 1.0)
        longest_s.append(longest_piece_s(store.applying(store.take(clock), Terms(clock, (), 1))))
        begun_s = time.thread_time()
        saved = at_once(store.saving_rows(0, snapshot))
        saved.copied_to(memoryview(bytearray(saved.byte_count)))
        longest_s.append(time.thread_time() - begun_s)
    assert sorted(longest_s)[-2] < most_turn_s(), longest_s  # one may be the machine's


@pytest.mark.thorough
@pytest.mark.parametrize("are_same", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_sum_of_many_workers_is_reduced_and_applied_in_short_turns(
    length: int, are_same: bool
) -> None:
    worker_count = 12

    def once(_: int) -> float:
        store, longest_s = store_of(length), 0.0
        for worker in range(worker_count):
            found = store.decode(0, Codec.FP32, largest_push(length), b"")
            ids = found.ids if are_same else found.ids * np.uint64(worker_count) + np.uint64(worker)
            store.accumulate(1, [(0, found._replace(ids=ids))], 1.0)
        longest_s = longest_piece_s(store.reducing(1, worker_count))
        return max(
            longest_s, longest_piece_s(store.applying(store.take(1), Terms(1, (), worker_count)))
        )

    assert min(map(once, range(3))) < most_turn_s()
