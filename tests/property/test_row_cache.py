"""A worker's cache of rows against a dictionary for each of its sets, and the rule of its age."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.change import Join, TableChange
from ps_core.consistency import Consistency, parsed
from ps_core.errors import InvalidConfig
from ps_core.keys import Incarnation, TableId
from ps_core.rows import partition_of
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import RowsSpec, TableSpec
from ps_worker.embedding import row_cache_loops, row_cache_passes
from ps_worker.embedding.row_cache import (
    WAY_COUNT,
    RowCache,
    cached_row_bytes,
    check_cache,
    may_lag,
    oldest_clock,
)
from ps_worker.embedding.row_cache_passes import sets_of
from ps_worker.embedding.rows import cut_ids

LENGTH = 3
ID = st.one_of(st.integers(0, 30), st.integers(0, 2**64 - 1))
IDS = st.lists(ID, unique=True, max_size=30)


class Get(NamedTuple):
    ids: list[int]
    since: int


class Put(NamedTuple):
    ids: list[int]
    clock: int


CLOCK = st.integers(0, 6)
CALLS = st.lists(st.one_of(st.builds(Get, IDS, CLOCK), st.builds(Put, IDS, CLOCK)), max_size=12)


@dataclass
class Kept:
    """A row of the twin's."""

    clock: int
    use: int
    value: float


class Twin:
    """A dictionary for each set, whose keys are the numbers of places, row by row."""

    def __init__(self, most: int) -> None:
        self.way_count = min(WAY_COUNT, most)
        self.sets: list[dict[int, tuple[int, Kept]]] = [{} for _ in range(most // self.way_count)]
        self.use = 0

    def set_of(self, row_id: int) -> dict[int, tuple[int, Kept]]:
        return self.sets[int(sets_of(np.array([row_id], np.uint64), len(self.sets))[0])]

    def find(self, row_id: int) -> Kept | None:
        return next((kept for known, kept in self.set_of(row_id).values() if known == row_id), None)

    def get(self, ids: list[int], since: int) -> list[tuple[int, float] | None]:
        self.use += 1
        found: list[tuple[int, float] | None] = []
        for each in ids:
            kept = self.find(each)
            if kept is None or kept.clock < since:
                found.append(None)
            else:
                kept.use = self.use
                found.append((kept.clock, kept.value))
        return found

    def put(self, ids: list[int], values: list[float], clock: int) -> None:
        self.use += 1
        new: dict[int, list[tuple[int, float]]] = {}
        for each, value in zip(ids, values, strict=True):
            kept = self.find(each)
            if kept is None:
                new.setdefault(id(self.set_of(each)), []).append((each, value))
            elif kept.clock <= clock:
                kept.clock, kept.use, kept.value = clock, self.use, value
        for some in new.values():
            places = self.set_of(some[0][0])

            def last_use(way: int, of: dict[int, tuple[int, Kept]] = places) -> int:
                return of[way][1].use if way in of else 0

            free = [way for way in range(self.way_count) if last_use(way) < self.use]
            ways = sorted(free, key=last_use)
            for way, (each, value) in zip(ways, some, strict=False):
                places[way] = each, Kept(clock, self.use, value)


KERNELS = pytest.mark.parametrize("kernels", [row_cache_loops, row_cache_passes])


@KERNELS
@given(st.integers(1, 40), CALLS)
def test_a_cache_has_what_dictionaries_have(
    kernels: ModuleType, most: int, calls: list[Get | Put]
) -> None:
    """CA-1, CA-2, CA-3: what was put last, while it was used more lately than others of its set."""
    cache, twin, number = RowCache(most, LENGTH, "f4", kernels), Twin(most), 0
    assert cache.row_count == len(twin.sets) * twin.way_count <= most
    for call in [*calls, Get(list(range(31)), 0)]:
        ids = np.array(call.ids, np.uint64)
        if isinstance(call, Get):
            out = np.empty((len(ids), LENGTH), "f4")
            clocks = cache.get(ids, call.since, out)
            found = twin.get(call.ids, call.since)
            assert clocks.tolist() == [-1 if each is None else each[0] for each in found]
            for row, each in zip(out.tolist(), found, strict=True):
                assert each is None or row == [each[1]] * LENGTH
        else:
            values = np.arange(number, number + len(ids), dtype="f4")
            number += len(ids)
            rows: Any = np.repeat(values[:, None], LENGTH, axis=1)
            cache.put(ids, rows, call.clock)
            rows[:] = np.nan  # the caller's, who may change them
            twin.put(call.ids, values.tolist(), call.clock)


@KERNELS
def test_a_full_cache_has_as_many_rows_as_it_was_made_for(kernels: ModuleType) -> None:
    cache = RowCache(1000, 1, "f8", kernels)
    ids = np.arange(20_000, dtype=np.uint64)
    for begin in range(0, len(ids), 100):
        cache.put(ids[begin : begin + 100], np.ones((100, 1)), begin // 100)
        newest = cache.get(ids[begin : begin + 10], 0, np.empty((10, 1)))
        assert (newest == begin // 100).sum() >= 9, "few of a batch fall to one set"
    assert (cache.get(ids, 0, np.empty((len(ids), 1))) >= 0).sum() == 1000 == cache.row_count


@given(st.lists(ID, max_size=60), st.integers(1, 5), st.data())
def test_some_ids_of_a_batch_are_cut_as_all_are(
    ids: list[int], partition_count: int, data: st.DataObject
) -> None:
    """RC-1."""
    rows = RowsSpec(partition_count, 7)
    batch = cut_ids(np.array(ids, np.uint64), rows)
    is_wanted = data.draw(st.lists(st.booleans(), min_size=len(batch.ids), max_size=len(batch.ids)))
    which = np.flatnonzero(np.array(is_wanted, bool))
    some = batch.only(which)
    assert some.ids.tolist() == batch.ids[which].tolist()
    spans = [some.ids[begin:end].tolist() for begin, end in some.spans.values()]
    assert [each for span in spans for each in span] == some.ids.tolist()
    for partition, span in zip(some.spans, spans, strict=True):
        assert span
        assert {partition_of(each, rows) for each in span} == {partition}


# --- the rule of age


def table_of(setting: str, **fields: Any) -> Table:
    spec = TableSpec(
        "rows", DType.FLOAT32, 8, OptimizerSpec(OptimizerKind.SGD, (("lr", 0.1),)),
        consistency=parsed(setting), rows=RowsSpec(2),
    )  # fmt: skip
    return replace(Table(TableId(1), 0, spec), **fields)


def change(setting: str, after_clock: int, **fields: Any) -> TableChange:
    return TableChange(1, after_clock, parsed(setting), **fields)


NONE = 11
"""One more than the worker's clock, 10: no row is of such a clock."""

AGES: list[tuple[str, Table, int]] = [
    ("bsp", table_of("bsp"), 10),
    ("ssp", table_of("ssp:4"), 10),
    ("asp", table_of("asp"), 7),
    ("asp:divide", table_of("asp:divide"), NONE),
    ("bsp since step 11", table_of("asp", change=change("bsp", 10)), 10),
    ("bsp since long ago", table_of("asp", change=change("bsp", 3)), 10),
    ("bsp from step 12 on", table_of("asp", change=change("bsp", 11)), NONE),
    ("asp since step 11", table_of("bsp", change=change("asp", 10)), 7),
    ("asp from step 12 on", table_of("bsp", change=change("asp", 11)), NONE),
    ("bsp is proposed", table_of("asp", proposed=change("bsp", 0)), NONE),
    ("bsp is decided", table_of("asp", proposed=change("bsp", 10, is_decided=True)), NONE),
    ("asp is proposed", table_of("bsp", proposed=change("asp", 0)), NONE),
    ("asp:divide is proposed", table_of("asp", proposed=change("asp:divide", 0)), NONE),
    ("a cut is proposed", table_of("asp", proposed=change("asp", 12, checkpoint=3)), 7),
    (
        "a worker joins",
        table_of("asp", proposed=change("asp", 12, join=Join(1, Incarnation(9)))),
        7,
    ),
]


@pytest.mark.parametrize(
    ("table", "expected"), [each[1:] for each in AGES], ids=[each[0] for each in AGES]
)
def test_a_row_is_as_old_as_the_setting_of_the_step_allows(table: Table, expected: int) -> None:
    assert oldest_clock(table, 10, 3) == expected
    assert oldest_clock(table, 10, 0) == max(expected, 10)
    assert oldest_clock(table_of("asp"), 2, 3) == 0
    assert may_lag(table, 10) == (expected == 7)


REFUSED: list[tuple[Any, Any, str, str]] = [
    (-1, 0, "asp", r"cache_rows is -1; expected a whole number from 0"),
    (1e6, 0, "asp", r"cache_rows is 1000000.0; expected a whole number"),
    (2**31, 0, "asp", "expected a whole number from 0 to 2147483647"),
    (5, -1, "asp", r"cache_steps is -1; expected"),
    (0, 2, "asp", r"cache_steps is 2 without a cache; expected cache_rows, too"),
    (5, 2, "bsp", r"under bsp, .* expected 0, or consistency='asp'"),
    (5, 1, "ssp:4", r"under ssp:4, .* expected 0, or consistency='asp'"),
    (5, 0, "asp:reject=4", r"under asp:reject=4: servers judge a step by when"),
]


@pytest.mark.parametrize(("row_count", "step_count", "setting", "words"), REFUSED)
def test_a_cache_that_a_table_may_not_have_is_refused(
    row_count: Any, step_count: Any, setting: str, words: str
) -> None:
    with pytest.raises(InvalidConfig, match=words):
        check_cache("rows", row_count, step_count, parsed(setting))


@pytest.mark.parametrize("setting", ["bsp", "ssp:4", "asp"])
def test_a_cache_of_one_step_is_for_each_setting(setting: str) -> None:
    check_cache("rows", 5, 0, parsed(setting))
    check_cache("rows", 0, 0, parsed("asp:divide"))
    check_cache("rows", 5, 9, Consistency(parsed("asp").mode))


def test_a_cached_row_takes_its_elements_and_24_bytes() -> None:
    assert cached_row_bytes(table_of("asp")) == 8 * 4 + 24
