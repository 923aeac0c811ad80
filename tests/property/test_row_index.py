"""Numbers of ids against a dictionary, and rows that lie in more slabs than one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.rows import mixed_ids, partitions_of, salt_of
from ps_core.sliced_work import at_once
from ps_server.rows import row_kernels, row_loops, row_passes
from ps_server.rows.row_arrays import Column, RowArrays
from ps_server.rows.row_index import RowIndex
from ps_server.rows.row_partition import RowPartition

SEED = 3
IDS = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1)), max_size=40)


@given(st.lists(IDS, max_size=6), IDS)
def test_an_index_has_what_a_dictionary_has(batches: list[list[int]], asked: list[int]) -> None:
    """RI-1; ids that are asked for may come twice."""
    index, twin = RowIndex(salt_of(SEED)), dict[int, int]()
    for batch in batches:
        new = [each for each in dict.fromkeys(batch) if each not in twin]
        numbers = at_once(index.adding(np.array(new, np.uint64)))
        twin |= dict(zip(new, numbers.tolist(), strict=True))
    assert list(twin.values()) == list(range(len(twin)))
    assert index.ids.tolist() == list(twin)
    asked += list(twin)
    found = index.find(np.array(asked, np.uint64))
    assert found.tolist() == [twin.get(each, -1) for each in asked]


@given(IDS, st.integers(1, 9), st.data())
def test_the_first_id_of_another_partition_is_found(
    given_ids: list[int], count: int, data: st.DataObject
) -> None:
    ids = np.array(given_ids, np.uint64)
    places = partitions_of(mixed_ids(ids, salt_of(SEED)), count).tolist()
    partition = data.draw(st.integers(0, count - 1))
    others = [at for at, place in enumerate(places) if place != partition]
    found = row_kernels.elsewhere(ids, salt_of(SEED), count, partition)
    assert found == (others[0] if others else -1)


@given(st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=150), IDS)
def test_passes_and_loops_give_the_same(known: list[int], asked: list[int]) -> None:
    """One server has numba, and its backup has not."""
    ids, salt = np.array(known, np.uint64), salt_of(SEED)
    wanted = np.array([*asked, *known], np.uint64)
    found = []
    for kernels in (row_loops, row_passes):
        slots: Any = np.zeros(256, np.int32)
        kernels.put(slots, 0, ids[:40], salt)
        kernels.put(slots, len(ids[:40]), ids[40:], salt)
        numbers = np.empty(len(wanted), np.int64)
        kernels.find(slots, np.append(ids, np.uint64(0)), wanted, salt, numbers)
        first = kernels.elsewhere(wanted, salt, np.uint64(3), 1)
        found.append((numbers.tolist(), first))
    assert found[0] == found[1]
    places = {each: at for at, each in enumerate(known)}
    assert found[0][0] == [places.get(each, -1) for each in [*asked, *known]]


def test_memory_that_nobody_may_change_can_be_read() -> None:
    ids = np.frombuffer(np.arange(100, dtype=np.uint64).tobytes(), "<u8")
    index = RowIndex(salt_of(SEED))
    at_once(index.adding(ids))
    assert index.find(ids).tolist() == list(range(100))
    assert row_kernels.elsewhere(ids, salt_of(SEED), 1, 0) == -1


class Asked:
    """Pages that were asked for: each byte once, in order, of every array."""

    def __init__(self) -> None:
        self.spans: dict[int, list[tuple[int, int]]] = {}

    def __call__(self, memory: npt.NDArray[np.uint8]) -> None:
        begin, base = memory.ctypes.data, memory.base
        assert isinstance(base, np.ndarray)
        self.spans.setdefault(base.ctypes.data, []).append((begin, begin + memory.nbytes))


def test_pages_are_asked_for_before_rows_come_to_them_and_once() -> None:
    asked = Asked()
    partition = RowPartition(
        salt_of(SEED), RowArrays({"values": Column(256, np.dtype("f4"))}, prefault=asked), asked
    )
    arrays, step = partition.arrays, 1_000
    for begin in range(0, 30_000, step):
        ids = np.arange(begin, begin + step, dtype=np.uint64)
        at_once(partition.adding(ids, {"values": np.ones((step, 256), np.float32)}))
        (place,) = arrays.places(np.arange(begin, begin + step))
        last = arrays.get("values", [place], step)
        assert last.all()
    for spans in asked.spans.values():
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    ends = [spans[-1][1] - spans[0][0] for spans in asked.spans.values()]
    used = 30_000 * 1024
    assert used < max(ends) + (2 << 20) < used + (6 << 20)  # a page beyond the last row, or two


def test_an_array_moves_between_two_turns_and_is_whole_in_both() -> None:
    arrays = RowArrays({"a": Column(256, np.dtype("f4")), "b": Column(1, np.dtype("u4"))})
    arrays.extend(1_024)
    numbers = np.arange(1_024)
    arrays.put("b", arrays.places(numbers), numbers.astype(np.uint32)[:, None])
    turns = 0
    for _ in arrays.extending(1_025):
        turns += 1
        assert arrays.get("b", arrays.places(numbers), 1_024)[:, 0].tolist() == numbers.tolist()
    assert turns == 2
    assert arrays.get("b", arrays.places(numbers), 1_024)[:, 0].tolist() == numbers.tolist()
    assert arrays.capacity > 1_024


@pytest.mark.parametrize("reserved_bytes", [4 << 20, 1 << 40, 1 << 62])
def test_rows_keep_their_values_where_they_move_and_in_further_slabs(reserved_bytes: int) -> None:
    """The last of these has no addresses in any process: fewer are reserved."""
    arrays = RowArrays(
        {"values": Column(256, np.dtype("f4")), "step": Column(1, np.dtype("u4"))}, reserved_bytes
    )
    count = 12_000  # the first MiB has 1,024 rows, a slab of 4 MiB 4,096
    for begin in range(0, count, 1_000):
        arrays.extend(begin + 1_000)
        numbers = np.arange(begin, begin + 1_000)
        places = arrays.places(numbers)
        terms = numbers.astype(np.float32)[:, None]
        arrays.put("step", places, terms)
        arrays.put("values", places, np.repeat(terms, 256, axis=1))
    numbers = np.random.default_rng(0).permutation(count)
    places = arrays.places(numbers)
    for slab, own, _ in places:
        arrays.slab(("values",), slab)["values"][own] += 1.0
    assert np.array_equal(arrays.get("step", places, count)[:, 0], numbers)
    found = np.empty((count, 256), np.float32)
    assert arrays.get("values", places, count, found) is found
    assert np.array_equal(found, np.repeat(numbers[:, None] + 1.0, 256, axis=1))
