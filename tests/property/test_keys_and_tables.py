"""Slots, ranges, blocks, segments, presence and codecs: everything is covered exactly once."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from docs import payload_codec as codec
from ps_core.errors import InvalidConfig, InvalidKeys, InvalidTensor
from ps_core.keys import Slot, TableId, key_ranges, range_of_slot, slot_of_ordinal
from ps_core.limits import SLOT_COUNT
from ps_core.tables.elements import Codec, DType, check_length, pack_presence, unpack_presence
from ps_core.tables.optimizers import (
    Hyperparameters,
    OptimizerKind,
    OptimizerSpec,
    StepHyperparameters,
)
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec, TensorSpec


@given(st.integers(1, 5_000))
def test_ranges_cover_every_slot_once(count: int) -> None:
    """KEY-1."""
    ranges = key_ranges(count)
    assert ranges[0].begin == 0
    assert ranges[-1].end == SLOT_COUNT
    assert all(a.end == b.begin for a, b in pairwise(ranges))
    sizes = {r.end - r.begin for r in ranges}
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 5_000), st.integers(0, SLOT_COUNT - 1))
def test_range_of_slot_contains_it(count: int, slot: int) -> None:
    """KEY-2."""
    assert slot in key_ranges(count)[range_of_slot(Slot(slot), count)]


@pytest.mark.parametrize("count", [0, -1, SLOT_COUNT + 1])
def test_an_impossible_number_of_ranges_is_refused(count: int) -> None:
    with pytest.raises(InvalidKeys, match=str(count)):
        key_ranges(count)


def test_there_may_be_a_range_for_every_slot() -> None:
    ranges = key_ranges(SLOT_COUNT)
    assert len(ranges) == SLOT_COUNT
    assert all(range_of_slot(Slot(n), SLOT_COUNT) == n for n in (0, 1, 40_503, SLOT_COUNT - 1))


def test_consecutive_ordinals_take_every_slot_once() -> None:
    assert len({slot_of_ordinal(n) for n in range(12_345, 12_345 + SLOT_COUNT)}) == SLOT_COUNT


@st.composite
def _tables(draw: st.DrawFn) -> Table:
    sizes = draw(st.lists(st.integers(0, 400), min_size=1, max_size=12).filter(any))
    tensors, offset = [], 0
    for index, size in enumerate(sizes):
        tensors.append(TensorSpec(f"t{index}", (size,), offset))
        offset += size
    spec = TableSpec(
        "table",
        DType.FLOAT32,
        offset,
        OptimizerSpec(OptimizerKind.SGD),
        block_elements=64 * draw(st.integers(1, 4)),
        tensors=tuple(tensors),
    )
    return Table(TableId(1), draw(st.integers(0, 10**9)), spec.validated())


@given(_tables(), st.integers(1, 300))
def test_blocks_and_segments_cover_every_element_once(table: Table, range_count: int) -> None:
    """TAB-1."""
    owner = np.full(table.spec.element_count, -1)
    blocks = [b for found in table.blocks_by_range(range_count).values() for b in found]
    assert sorted(blocks) == list(range(table.block_count))
    for block in blocks:
        start = block * table.spec.block_elements
        for segment in table.segments(block):
            view = owner[start + segment.begin : start + segment.end]
            assert (view == -1).all()
            view[:] = segment.tensor
    for index, tensor in enumerate(table.spec.tensors):
        assert (owner[tensor.offset : tensor.offset + tensor.element_count] == index).all()


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_presence_survives_the_wire(present: list[bool]) -> None:
    bitmap = pack_presence(tuple(present))
    assert unpack_presence(bitmap, len(present)) == tuple(present)
    if bitmap:
        with pytest.raises(InvalidKeys, match="presence has"):
            unpack_presence(bitmap + b"\0", len(present))


@given(st.sampled_from(codec.RAW_CODECS), st.binary(min_size=1, max_size=64))
def test_decode_then_encode_gives_the_same_bytes(kind: Codec, raw: bytes) -> None:
    """Every bit pattern that is a number survives; a NaN stays a NaN."""
    payload = raw[: len(raw) // kind.element_bytes * kind.element_bytes]
    values = codec.decode(payload, kind)
    again = codec.encode(values, kind)
    back = codec.decode(again, kind)
    assert np.array_equal(values, back, equal_nan=True)
    finite = np.isfinite(values)
    size = kind.element_bytes
    for index in np.flatnonzero(finite):
        assert again[index * size : (index + 1) * size] == payload[index * size :][:size]


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_bfloat16_rounds_to_nearest_even_as_torch_does(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    ours = codec.decode(codec.encode(values, Codec.BF16), Codec.BF16)
    theirs = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    assert np.array_equal(ours, theirs, equal_nan=True)


_NEAR_TIES = st.sampled_from((0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF))


@given(st.lists(st.tuples(st.integers(0, 0xFFFF), _NEAR_TIES), min_size=1, max_size=50))
def test_bfloat16_rounds_what_lies_between_two_as_torch_does(halves: list[tuple[int, int]]) -> None:
    """What lies in the middle goes to the even one."""
    values = np.array([upper << 16 | lower for upper, lower in halves], np.uint32).view(np.float32)
    ours = codec.raw_view(codec.encode(values, Codec.BF16), Codec.BF16)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(ours[~np.isnan(values)], theirs[~np.isnan(values)])


@pytest.mark.parametrize(
    ("bits", "carried"),
    [
        (0x7F800001, 0x7FC0), (0xFF800001, 0xFFC0), (0x7FC00000, 0x7FC0), (0x7FFFFFFF, 0x7FFF),
        (0xFFA10000, 0xFFE1),
    ],
)  # fmt: skip
def test_a_nan_stays_one_with_its_sign_and_its_upper_bits(bits: int, carried: int) -> None:
    """Cut off, the first would be infinite; rounded, the fourth would be -0."""
    payload = codec.encode(np.array([bits], np.uint32).view(np.float32), Codec.BF16)
    assert int.from_bytes(payload, "little") == carried


@pytest.mark.parametrize("kind", codec.RAW_CODECS)
def test_a_vector_of_another_order_is_read_as_people_write_it(kind: Codec) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert codec.encode(values.T, kind) == codec.encode(values.T.copy(), kind)
    assert codec.decode(codec.encode(values.T, kind), kind).tolist() == [0, 3, 1, 4, 2, 5]


@given(
    st.integers(0, 100),
    st.integers(0, 100),
    st.sampled_from([kind for kind in Codec if kind not in (Codec.SPARSE, Codec.LOW_RANK)]),
)
def test_a_length_that_lies_is_refused(elements: int, extra: int, kind: Codec) -> None:
    size = kind.payload_bytes(elements)
    check_length(size, kind, elements)
    for wrong in {size + extra, size - extra} - {size}:
        with pytest.raises(InvalidTensor, match=f"expected {size}"):
            check_length(wrong, kind, elements)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": ""}, "name has 0 bytes"),
        ({"element_count": 0}, "element_count"),
        ({"block_elements": 100}, "multiple of 64"),
        ({"tensors": (TensorSpec("a", (9,), 0),)}, "have 9 elements"),
        ({"tensors": (TensorSpec("a", (10,), 1),)}, "starts at 1"),
        ({"tensors": (TensorSpec("a", (5,), 0), TensorSpec("a", (5,), 5))}, "two tensors"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(change: dict[str, object], words: str) -> None:
    settings: dict[str, object] = {
        "name": "t",
        "dtype": DType.FLOAT32,
        "element_count": 10,
        "optimizer": OptimizerSpec(OptimizerKind.SGD),
        **change,
    }
    with pytest.raises(InvalidConfig, match=words):
        TableSpec(**settings).validated()  # type: ignore[arg-type]


_GIVEN = st.lists(
    st.tuples(
        st.sampled_from(("lr", "momentum", "weight_decay", "beta1")),
        st.sampled_from((0.0, -0.0, 0.5, 1.0, -1.0, math.nan, 1e300)),
    ),
    max_size=2,
    unique_by=lambda pair: pair[0],
).map(lambda pairs: tuple(sorted(pairs)))


def _merged(numbers: OptimizerSpec | StepHyperparameters, given_numbers: Hyperparameters) -> str:
    try:
        return str(numbers.merged(given_numbers))
    except InvalidConfig as error:
        return str(error)


@given(st.lists(_GIVEN, max_size=6), st.booleans())
def test_what_is_remembered_of_merged_numbers_changes_nothing(
    course: list[Hyperparameters], fed_back: bool
) -> None:
    spec = OptimizerSpec(OptimizerKind.SGD, (("lr", 0.25),))
    numbers = StepHyperparameters(spec)
    for given_numbers in course:
        assert _merged(numbers, given_numbers) == _merged(spec, given_numbers)
        if fed_back and _merged(spec, given_numbers).startswith("("):
            assert numbers.merged(spec.merged(given_numbers)) == spec.merged(given_numbers)


def test_numbers_are_merged_once_for_all_that_have_the_same() -> None:
    """Whose steps come with what was merged already get that very tuple: a comparison by identity
    is all that it costs then.
    """
    numbers = StepHyperparameters(OptimizerSpec(OptimizerKind.SGD, (("lr", 0.25),)))
    plain = numbers.merged(())
    assert numbers.merged(()) is plain
    assert numbers.merged((*plain[:1], *plain[1:])) is plain
    other = numbers.merged((("lr", 0.5),))
    assert dict(other)["lr"] == 0.5
    assert numbers.merged((("lr", 0.5),)) is other
    assert numbers.merged((*other[:1], *other[1:])) is other
    assert numbers.merged(()) == plain
