"""Rows in fewer bits: which numbers are stored, how they are rounded, and what stays as it was."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.errors import TableFull
from ps_core.keys import TableId
from ps_core.rows import mixed_ids, partitions_of, rounding_draws, salt_of
from ps_core.sliced_work import at_once
from ps_core.tables.elements import Codec, DType, Initializer, InitializerKind
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import RowsSpec, RowStorage, TableSpec
from ps_server.rows.row_memory import INDEX_BYTES, RowMemory
from ps_server.rows.row_storage import row_storage
from ps_server.values.row_gradients import payload_of
from ps_server.values.row_store import RowStore
from ps_server.values.update_arithmetic import Terms
from ps_worker.spec.optimizers import SGD
from ps_worker.spec.settings import RowsOptions
from ps_worker.spec.settings import table_spec as table_of
from tests.property.rounded_values import rounded

PACKED = [storage for storage in RowStorage if storage is not RowStorage.FULL]
BYTES = {RowStorage.FLOAT16: 2, RowStorage.BFLOAT16: 2, RowStorage.INT8: 1}
VALUES = st.floats(allow_nan=False, allow_infinity=False, width=32)
DRAWS = st.integers(0, 2**16 - 1)


def bits_of(values: npt.NDArray[Any]) -> list[int]:
    found: list[int] = values.view(np.uint32).ravel().tolist()
    return found


@pytest.mark.parametrize("storage", PACKED)
@given(row=st.lists(st.tuples(VALUES, DRAWS), min_size=1, max_size=9), are_drawn=st.booleans())
def test_a_row_is_rounded_like_the_twins(
    storage: RowStorage, row: list[tuple[float, int]], are_drawn: bool
) -> None:
    values = np.array([[value for value, _ in row]], np.float32)
    draws = np.array([[draw for _, draw in row]], np.uint16) if are_drawn else None
    store = row_storage(storage, len(row), np.dtype(np.float32))
    packed = store.packed(values, draws)
    assert packed.shape == (1, store.column.width)
    assert packed.dtype == store.column.dtype
    found = store.unpacked(packed)
    assert found.dtype == np.float32
    expected = rounded(storage, values[0].tolist(), None if draws is None else draws[0].tolist())
    assert found[0].tolist() == expected
    for again in (draws, None, np.full_like(values, 2**16 - 1, np.uint16)):  # ST-1
        assert bits_of(store.unpacked(store.packed(found, again))) == bits_of(found)


@pytest.mark.parametrize("storage", PACKED)
def test_the_mean_of_what_is_stored_is_the_value(storage: RowStorage) -> None:
    values = np.array([0.1, -0.033, 1e-3, 3e-6, -0.0999, 0.0], np.float32)
    store = row_storage(storage, len(values), np.dtype(np.float32))
    mixed = mixed_ids(np.arange(40_000, dtype=np.uint64), salt_of(0))
    draws = rounding_draws(mixed, 7, len(values))
    found = store.unpacked(store.packed(np.tile(values, (len(mixed), 1)), draws))
    for at, value in enumerate(values.tolist()):
        neighbours = np.unique(found[:, at])
        assert len(neighbours) == (1 if not value else 2)
        step = neighbours[-1] - neighbours[0]
        assert neighbours[0] <= value <= neighbours[-1]
        deviation = abs(found[:, at].mean(dtype=np.float64) - value)
        assert deviation < 4 * step / 2 / math.sqrt(len(mixed)) + 1e-12


@pytest.mark.parametrize("storage", PACKED)
def test_what_is_no_number_stays_none_and_what_is_too_large_is_the_largest(
    storage: RowStorage,
) -> None:
    store = row_storage(storage, 4, np.dtype(np.float32))
    rows = np.array([[1.0, np.nan, -2.0, 0.5], [np.inf, 1.0, -np.inf, 0.0]], np.float32)
    found = store.unpacked(store.packed(rows, np.full((2, 4), 9, np.uint16)))
    assert found[0].tolist() == pytest.approx([1.0, np.nan, -2.0, 0.5], nan_ok=True)
    assert np.isfinite(found[1]).all()
    assert found[1, 0] == -found[1, 2]
    largest = 65504.0 if storage is RowStorage.FLOAT16 else 3.4e38
    assert found[1, 0] == pytest.approx(largest, rel=0.01)
    assert np.isnan(store.unpacked(store.packed(found[:1]))[0, 1])
    assert np.isnan(rows[0, 1])  # only read


def test_rows_take_the_bytes_that_the_page_says() -> None:
    for storage in PACKED:
        column = row_storage(storage, 64, np.dtype(np.float32)).column
        assert column.row_bytes == 64 * BYTES[storage] + (storage is RowStorage.INT8)
        assert column.most_bytes == 256
    full = row_storage(RowStorage.FULL, 64, np.dtype(np.float64))
    rows = np.ones((2, 64))
    assert full.packed(rows) is full.unpacked(rows) is rows
    assert full.column.row_bytes == 512


@pytest.mark.parametrize("storage", RowStorage)
def test_a_new_row_needs_the_memory_of_what_is_stored(storage: RowStorage) -> None:
    memory = RowMemory(limit_bytes=100)
    options: RowsOptions = {"storage": storage.value, "partitions": 16}
    table = table_of("rows", 64, SGD(), options, has_rows=True)
    store = RowStore(Table(TableId(1), 0, table), range(16), memory)
    ids = np.arange(100, dtype=np.uint64)
    own = ids[partitions_of(mixed_ids(ids, salt_of(0)), 16) == 3]
    payload = payload_of(own, np.ones((len(own), 64), np.float32))
    bytes_of_a_row = 64 * BYTES.get(storage, 4) + (storage is RowStorage.INT8) + INDEX_BYTES
    with pytest.raises(TableFull, match=f"{len(own)} new rows of {bytes_of_a_row} bytes"):
        store.check_space(store.decode(3, Codec.FP32, payload, b""))


@pytest.mark.parametrize("storage", PACKED)
def test_steps_that_are_too_small_for_a_stored_number_add_up(storage: RowStorage) -> None:
    """Rounded to the nearest, no row would ever move."""
    spec = TableSpec(
        "rows",
        DType.FLOAT32,
        8,
        OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0),)),
        initializer=Initializer(InitializerKind.CONSTANT, constant=1.0),
        rows=RowsSpec(1, storage=storage),
    )
    store = RowStore(Table(TableId(1), 0, spec.validated()), (0,))
    ids, step_of = np.arange(400, dtype=np.uint64), {RowStorage.FLOAT16: 2.0**-14}
    small = step_of.get(storage, 2.0**-10)  # less than a half of a stored step
    payload = payload_of(ids, np.full((len(ids), 8), -small, np.float32))
    for clock in range(1, 51):
        store.accumulate(clock, [(0, store.decode(0, Codec.FP32, payload, b""))], 1.0)
        at_once(store.applying(store.take(clock), Terms(clock, (), 1)))
    grown = store.rows(0, ids).mean(dtype=np.float64) - 1.0
    assert grown == pytest.approx(50 * small, rel=0.05)
