"""Slices to blocks, and the payloads of pushes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.errors import InvalidKeys, InvalidTensor
from ps_core.keys import TableId
from ps_core.tables.elements import DType, unpack_presence
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_worker.spec.settings import tensors_of
from ps_worker.spec.values import blocks_of, cut, merged, region_of, runs_of


def table(layout: Any, block_elements: int = 64, dtype: DType = DType.FLOAT32) -> Table:
    tensors = tensors_of("t", layout)
    spec = TableSpec(
        name="t",
        dtype=dtype,
        element_count=sum(tensor.element_count for tensor in tensors),
        optimizer=OptimizerSpec(OptimizerKind.SGD),
        block_elements=block_elements,
        tensors=tensors,
    )
    return Table(TableId(1), 0, spec.validated())


def floats(count: int, start: float = 1.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(start, start + count, dtype=np.float32)


@given(st.data())
def test_the_blocks_of_a_region_are_those_that_hold_its_elements(data: st.DataObject) -> None:
    """CUT-1."""
    found = table(data.draw(st.integers(1, 1000)))
    begin = data.draw(st.integers(0, found.spec.element_count - 1))
    end = data.draw(st.integers(begin + 1, found.spec.element_count))
    region = region_of(found, slice(begin, end))
    assert list(blocks_of(found, region)) == sorted({e // 64 for e in range(begin, end)})


@given(st.lists(st.integers(0, 150), min_size=1, max_size=6), st.data())
def test_parts_of_a_mapping_give_exactly_the_named_tensors(
    sizes: list[int], data: st.DataObject
) -> None:
    if not any(sizes):
        sizes = [*sizes, 1]
    layout = [(f"p{index}", (size,)) for index, size in enumerate(sizes)]
    found = table(layout)
    named = data.draw(st.sets(st.sampled_from([name for name, _ in layout])))
    whole = floats(found.spec.element_count)
    given_values = {
        tensor.name: whole[tensor.offset : tensor.offset + tensor.element_count]
        for tensor in found.spec.tensors
        if tensor.name in named
    }
    seen = np.zeros(found.spec.element_count, dtype=np.float32)
    for part in cut(found, runs_of(found, given_values, None)):
        payload = np.frombuffer(part.payload, np.float32)
        assert payload.size == found.block_length(part.block)
        segments = found.segments(part.block)
        present = unpack_presence(part.presence, len(segments))
        for segment, is_present in zip(segments, present, strict=True):
            name = found.spec.tensors[segment.tensor].name
            assert is_present == (name in named)
            if is_present:
                start = part.block * 64
                seen[start + segment.begin : start + segment.end] = payload[
                    segment.begin : segment.end
                ]
    for tensor in found.spec.tensors:
        span = slice(tensor.offset, tensor.offset + tensor.element_count)
        expected = whole[span] if tensor.name in named else 0.0
        assert np.array_equal(seen[span], np.broadcast_to(expected, tensor.element_count))


def test_whole_blocks_are_views_of_what_was_given() -> None:
    """CUT-2."""
    found = table(200)
    values = floats(200)
    parts = list(cut(found, runs_of(found, values, None)))
    assert [part.block for part in parts] == [0, 1, 2, 3]
    assert all(np.shares_memory(part.payload, values) for part in parts)
    assert all(part.presence == b"" for part in parts)


def test_a_slice_at_block_edges_gives_those_blocks() -> None:
    found = table(200)
    parts = list(cut(found, runs_of(found, floats(64), slice(64, 128))))
    assert [part.block for part in parts] == [1]


def test_a_slice_that_cuts_a_tensor_inside_a_block_is_refused() -> None:
    found = table(200)
    with pytest.raises(InvalidKeys, match=r"cuts tensor 't' inside block 0 .* \[0, 10\)"):
        list(cut(found, runs_of(found, floats(10), slice(0, 10))))


def test_a_second_push_of_a_block_joins_the_first() -> None:
    found = table([("a", (3,)), ("b", (5,))])
    (first,) = cut(found, runs_of(found, {"a": floats(3)}, None))
    (second,) = cut(found, runs_of(found, {"b": floats(5, 10.0)}, None))
    both = merged(found, first, second)
    assert both.presence == b""
    assert np.frombuffer(both.payload, np.float32).tolist() == [1, 2, 3, 10, 11, 12, 13, 14]
    assert unpack_presence(first.presence, 2) == (True, False)
    assert np.frombuffer(first.payload, np.float32).tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (slice(0, 201), r"slice is \[0, 201\); table 't' has elements \[0, 200\)"),
        (slice(-1, 5), r"slice is \[-1, 5\)"),
        (slice(7, 7), r"slice is \[7, 7\)"),
        (slice(0, 10, 2), "step 2"),
        ("x", "no tensor 'x'; it has 't'"),
        (3, "slice is 3"),
    ],
)
def test_a_region_outside_the_table_is_refused(part: Any, message: str) -> None:
    with pytest.raises(InvalidKeys, match=message):
        region_of(table(200), part)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros(199, np.float32), r"shape \(199,\); expected \(20, 10\) or \(200,\)"),
        (np.zeros((10, 20), np.float32), r"shape \(10, 20\)"),
        (np.zeros((20, 10), np.float64), "dtype float64; expected float32"),
        (np.zeros((20, 10), ">f4"), "dtype >f4; expected float32"),
        (np.zeros((20, 10), np.int32), "dtype int32"),
    ],
)
def test_another_shape_or_dtype_is_refused(values: Any, message: str) -> None:
    with pytest.raises(InvalidTensor, match=message):
        runs_of(table((20, 10)), values, None)


def test_a_mapping_with_a_slice_is_refused() -> None:
    with pytest.raises(InvalidKeys, match="mapping"):
        runs_of(table(10), {"t": floats(10)}, slice(0, 10))
