"""A captured partition of rows that goes on changing, against one that was copied whole (CW-1)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_core.keys import RangeId, TableId
from ps_core.sliced_work import at_once
from ps_core.tables.elements import Codec, DType, Initializer, InitializerKind
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Eviction, RowsSpec, RowStorage, TableSpec
from ps_server.values.copy_on_write import RangeSnapshots
from ps_server.values.row_gradients import payload_of
from ps_server.values.row_store import RowStore
from ps_server.values.store_copy import CANDIDATES, IDS, RowSpan, SavedBlock
from ps_server.values.update_arithmetic import Terms
from tests.examples import examples

LENGTH = 1 << 15
"""Elements of a row: a piece of a copy has eight of them."""

KEY = TableId(1), RangeId(0)
IDS_OF_A_STEP = st.lists(st.integers(0, 20), min_size=1, max_size=12, unique=True)
ACTIONS = st.lists(
    st.one_of(IDS_OF_A_STEP, st.sampled_from(["next", "next", "end", "capture"])), max_size=10
)


POLICIES = st.sampled_from(
    [
        RowsSpec(1),
        RowsSpec(1, max_row_count=9),
        RowsSpec(1, max_row_count=4, eviction=Eviction.LFU, admit_after=2),
        RowsSpec(1, evict_after=2, admit_after=3),
        RowsSpec(1, max_row_count=9, storage=RowStorage.INT8),
        RowsSpec(1, storage=RowStorage.BFLOAT16),
    ]
)


def store_of(rows: RowsSpec) -> RowStore:
    spec = TableSpec(
        "rows",
        DType.FLOAT32,
        LENGTH,
        OptimizerSpec(OptimizerKind.ROWWISE_ADAGRAD),
        initializer=Initializer(InitializerKind.UNIFORM, scale=1.0),
        rows=rows,
    )
    return RowStore(Table(TableId(1), 0, spec.validated()), (0,))


def step(store: RowStore, clock: int, ids: list[int]) -> None:
    values = np.full((len(ids), LENGTH), clock, np.float32)
    payload = payload_of(np.array(ids, np.uint64), values)
    store.accumulate(clock, [(0, store.decode(0, Codec.FP32, payload, b""))], 1.0)
    at_once(store.applying(store.take(clock), Terms(clock, (), 1)))


def check(expected: SavedBlock, pieces: list[SavedBlock]) -> None:
    """The pieces together are what was there, each row and candidate once, in order."""
    whole, found = dict(expected.tensors), dict[str, bytes]()
    begins = {name: 0 for name in (IDS, CANDIDATES) if name in whole}
    for piece in pieces:
        own = dict(piece.tensors)
        (ids,) = begins.keys() & own
        assert piece.rows == RowSpan(begins[ids], len(whole[ids]) // 8)
        assert (piece.block, piece.version) == (0, expected.version)
        begins[ids] += len(own[ids]) // 8
        assert ids == CANDIDATES or len(own[ids]) // 8 <= 8
        for name, payload in own.items():
            found[name] = found.get(name, b"") + payload
    assert found == whole


@pytest.mark.thorough
@given(st.lists(IDS_OF_A_STEP, max_size=3), ACTIONS, POLICIES)
@settings(max_examples=examples(240))
def test_all_rows_are_given_as_they_were(
    before: list[list[int]], actions: list[list[int] | str], rows: RowsSpec
) -> None:
    store, clock = store_of(rows), 0
    snapshots = RangeSnapshots(lambda _key, _block: None)  # rows are never handed over early
    expected: SavedBlock | None = None
    pieces: list[SavedBlock] = []
    for action in [*before, "capture", *actions]:
        if isinstance(action, list):
            clock += 1
            snapshots.before_change(KEY, (0,))
            step(store, clock, action)
        elif action == "capture" and expected is None:
            expected = store.saved(0)
            assert store.copy_bytes == expected.byte_count
            snapshots.add(KEY, store, [0])
        elif action == "next" and (found := at_once(snapshots.taking([KEY]))) is not None:
            pieces.append(found[1])
        elif action == "end":
            snapshots.end()
            expected, pieces = None, []
        if expected is not None and not snapshots.has_more:
            check(expected, pieces)
            expected, pieces = None, []
    while expected is not None and (found := at_once(snapshots.taking([KEY]))) is not None:
        pieces.append(found[1])
    if expected is not None:
        check(expected, pieces)
    assert not snapshots.has_more
    assert store.saved(0).version == clock  # nothing holds the partition any more
