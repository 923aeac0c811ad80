"""Where ids live, what rows begin with, sums by id, and a worker's ids cut by partition."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ps_core.errors import InvalidConfig, InvalidKeys, InvalidTensor
from ps_core.keys import TableId
from ps_core.rows import (
    first_values,
    mixed_ids,
    partition_of,
    partitions_of,
    rounding_draws,
    salt_of,
    splitmix64,
    sums_by_key,
)
from ps_core.tables.elements import DType, Initializer, InitializerKind
from ps_core.tables.optimizers import (
    ONLY_ROW_OPTIMIZERS,
    Kernels,
    OptimizerKind,
    OptimizerSpec,
    StepHyperparameters,
)
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Eviction, RowsSpec, RowStorage, TableSpec
from ps_runtime.cluster import wire
from ps_worker.spec.rows import cut_ids, gradients_of, ids_of, payloads_of, rows_of
from scheduler.machine import view_size

ROWS = RowsSpec(8, 5)


def table_of(rows: RowsSpec | None = ROWS, length: int = 2) -> Table:
    spec = TableSpec("t", DType.FLOAT32, length, OptimizerSpec(OptimizerKind.SGD), rows=rows)
    return Table(TableId(1), 0, spec.validated())


def test_splitmix64_gives_the_published_sequence() -> None:
    """Of seed 1234567, as Vigna's reference implementation prints it."""
    steps = np.arange(5, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1234567)
    assert splitmix64(steps).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_ids_are_spread_evenly_over_partitions_and_a_table_has_a_salt_of_its_own() -> None:
    """ROW-1: the partition is a function of id, seed and number of partitions alone."""
    ids = np.arange(80_000, dtype=np.uint64)
    found = partitions_of(mixed_ids(ids, salt_of(5)), 8)
    counts = Counter(found.tolist())
    assert sorted(counts) == list(range(8))
    assert max(counts.values()) < 1.05 * min(counts.values())
    assert [partition_of(each, ROWS) for each in range(50)] == found[:50].tolist()
    assert (found != partitions_of(mixed_ids(ids, salt_of(6)), 8)).any()
    assert salt_of(2**64 + 5) == salt_of(5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_first_values_have_the_distribution_that_they_are_drawn_from(dtype: str) -> None:
    mixed = mixed_ids(np.arange(4_000, dtype=np.uint64), salt_of(1))
    uniform = first_values(mixed, Initializer(InitializerKind.UNIFORM, scale=0.5), 7, dtype)
    assert uniform.shape == (4_000, 7)
    assert uniform.dtype == dtype
    assert -0.5 <= uniform.min() < -0.49
    assert 0.49 < uniform.max() < 0.5
    assert abs(uniform.mean()) < 0.01
    assert uniform.std() == pytest.approx(0.5 / 3**0.5, rel=0.02)
    normal = first_values(mixed, Initializer(InitializerKind.NORMAL, scale=2.0), 7, dtype)
    assert abs(normal.mean()) < 0.05
    assert normal.std() == pytest.approx(2.0, rel=0.02)
    assert 5.0 < abs(normal).max() < 2.0 * 3.5
    constant = first_values(mixed, Initializer(InitializerKind.CONSTANT, 3.0), 7, dtype)
    assert constant.dtype == dtype
    assert (constant == 3.0).all()
    assert not first_values(mixed, Initializer(), 7, dtype).any()


def test_the_draws_of_an_update_are_the_words_of_its_row() -> None:
    """Against whole numbers of Python, of which no part is numpy's."""

    def mix(word: int) -> int:
        word = (word + 0x9E3779B97F4A7C15) % 2**64
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % 2**64
        return word ^ (word >> 31)

    mixed = mixed_ids(np.array([0, 3, 2**64 - 1], np.uint64), salt_of(5))
    for version in (1, 2, 2**40):
        found = rounding_draws(mixed, version, 6)
        assert found.shape == (3, 6)
        for row, state in zip(found.tolist(), mixed.tolist(), strict=True):
            words = [mix((mix(state ^ version) + k) % 2**64) for k in (1, 2)]
            draws = [(word >> shift) % 2**16 for word in words for shift in (0, 16, 32, 48)]
            assert row == draws[:6]


def test_sums_are_by_key_in_the_order_of_the_rows() -> None:
    keys = np.array([5, 1, 5, 5], np.uint64)
    rows = np.array([[1e8], [2.0], [1.0], [-1e8]], np.float32)
    distinct, sums = sums_by_key(keys, rows)
    assert distinct.tolist() == [1, 5]
    assert sums.tolist() == [[2.0], [float(np.float32(1e8) + np.float32(1.0)) - 1e8]]
    many = np.random.default_rng(0).integers(0, 40, 900)  # some come often, some seldom
    many[::3] = 7
    terms = np.random.default_rng(1).integers(-5, 5, (900, 3)).astype(np.float64)
    distinct, sums = sums_by_key(many, terms)
    for key, total in zip(distinct.tolist(), sums, strict=True):
        assert total.tolist() == terms[many == key].sum(axis=0).tolist()
    nothing, none = sums_by_key(keys[:0], rows[:0])
    assert (len(nothing), none.shape) == (0, (0, 1))


def test_a_batch_has_each_id_once_in_its_own_partition() -> None:
    """RC-1."""
    ids = np.random.default_rng(0).integers(0, 500, 2_000).astype(np.uint64)
    batch = cut_ids(ids, ROWS)
    assert np.array_equal(batch.ids[batch.places], ids)
    assert len(np.unique(batch.ids)) == len(batch.ids)
    covered = 0
    for block, (begin, end) in batch.spans.items():
        assert begin == covered
        covered = end
        some = batch.ids[begin:end]
        assert (some[1:] > some[:-1]).all()
        assert {partition_of(int(each), ROWS) for each in some[:5]} == {block}
    assert covered == len(batch.ids)
    gradients, counts = np.ones((len(ids), 2), np.float32), Counter(ids.tolist())
    seen: list[int] = []
    for block, payload in payloads_of(table_of(), batch, gradients):
        assert partition_of(int(batch.ids[len(seen)]), ROWS) == block
        split = payload.nbytes // 2  # an id and a row have 8 bytes each
        some = np.frombuffer(payload[:split], "<u8").tolist()
        rows = np.frombuffer(payload[split:], "<f4").reshape(len(some), 2)
        assert rows[:, 1].tolist() == [counts[each] for each in some]
        seen += some
    assert seen == batch.ids.tolist()


def test_gradients_of_ids_that_come_once_are_where_their_ids_are() -> None:
    ids = np.random.default_rng(1).permutation(1_000).astype(np.uint64)
    gradients = np.stack([ids, ids + 1], axis=1).astype(np.float32)
    for _, payload in payloads_of(table_of(), cut_ids(ids, ROWS), gradients):
        split = payload.nbytes // 2
        some = np.frombuffer(payload[:split], "<u8")
        rows = np.frombuffer(payload[split:], "<f4").reshape(len(some), 2)
        assert np.array_equal(rows[:, 0], some)
        assert np.array_equal(rows[:, 1], some + 1)


def test_a_batch_comes_in_pieces_of_at_most_so_many_ids() -> None:
    batch = cut_ids(np.arange(100, dtype=np.uint64), ROWS)
    pieces = list(batch.pieces(33))
    assert [len(piece.ids) for piece in pieces] == [33, 33, 33, 1]
    assert np.array_equal(np.concatenate([piece.ids for piece in pieces]), batch.ids)
    named: Counter[int] = Counter()
    for piece in pieces:
        for block, (begin, end) in piece.spans.items():
            assert 0 <= begin < end <= len(piece.ids)
            some = np.frombuffer(piece.bytes_of(block), "<u8")
            assert {partition_of(int(each), ROWS) for each in some} == {block}
            named[block] += len(some)
    assert named == {block: end - begin for block, (begin, end) in batch.spans.items()}
    assert list(cut_ids(np.zeros(0, np.uint64), ROWS).pieces(33)) == []


IDS: list[tuple[Any, bool, list[int]]] = [
    ([3, 1], False, [3, 1]),
    (7, False, [7]),
    ([], False, []),
    (np.array([[2**64 - 1]], np.uint64), False, [2**64 - 1]),
    (np.array([5], np.int32), False, [5]),
    (np.array([200], np.uint8), False, [200]),
    ([-1, 0], True, [2**64 - 1, 0]),
]


@pytest.mark.parametrize(("given", "hashed", "expected"), IDS)
def test_ids_are_unsigned_numbers(given: Any, hashed: bool, expected: list[int]) -> None:
    found = ids_of(given, hashed_ids=hashed)
    assert found.dtype == np.uint64
    assert found.tolist() == expected


def test_what_is_no_id_or_no_gradient_is_refused() -> None:
    with pytest.raises(InvalidKeys, match="-2 is negative"):
        ids_of([1, -2])
    with pytest.raises(InvalidTensor, match="float64; expected whole numbers"):
        ids_of([0.5])
    with pytest.raises(InvalidConfig, match="create_embedding"):
        rows_of(table_of(rows=None))
    ids = ids_of([1, 2])
    for wrong in (np.ones((2, 3), np.float32), np.ones((3, 2), np.float32), np.ones((2, 2))):
        with pytest.raises(InvalidTensor):
            gradients_of(table_of(), ids, wrong)


def test_a_step_has_at_most_a_messages_rows_of_a_partition() -> None:
    table = table_of(RowsSpec(1), length=1024)
    for count, is_good in ((1022, True), (1023, False)):  # of 4 KiB and 8 bytes each
        batch = cut_ids(np.arange(count, dtype=np.uint64), RowsSpec(1))
        rows = np.zeros((count, 1024), np.float32)
        if is_good:
            ((block, payload),) = payloads_of(table, batch, rows)
            assert (block, payload.nbytes) == (0, count * 4104)
            continue
        with pytest.raises(InvalidConfig, match="more partitions than 1"):
            list(payloads_of(table, batch, rows))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rows": RowsSpec(0)}, "partition_count is 0"),
    ({"rows": RowsSpec(4097)}, "expected 1 to 4096"),
    ({"rows": RowsSpec(1, 2**64)}, "seed is"),
    ({"rows": RowsSpec(1, -1)}, "seed is -1"),
    ({"rows": RowsSpec(max_row_count=-1)}, "max_row_count is -1"),
    ({"rows": RowsSpec(evict_after=2**31 + 1)}, "evict_after is 2147483649; expected 0 to"),
    ({"rows": RowsSpec(admit_after=0)}, "admit_after is 0; expected 1 to 2147483648"),
    ({"rows": RowsSpec(eviction=Eviction.LFU)}, "eviction is lfu without max_rows"),
    (
        {"rows": RowsSpec(storage=RowStorage.INT8), "dtype": DType.FLOAT64},
        "storage is int8; expected full, or a table of finite float32",
    ),
    ({"rows": RowsSpec(storage=RowStorage.FLOAT16), "allow_non_finite": True}, "is float16"),
    ({"element_count": 65_537}, "at most 65536"),
    ({"dtype": DType.FLOAT16}, "float16"),
    ({"optimizer": OptimizerSpec(OptimizerKind.ADAMW)}, "optimizer is adamw"),
    ({"optimizer": OptimizerSpec(OptimizerKind.ADAM, amsgrad=True)}, "without amsgrad"),
    ({"optimizer": OptimizerSpec(OptimizerKind.SGD, kernels=Kernels.EXACT)}, "fast kernels"),
    (
        {"optimizer": OptimizerSpec(OptimizerKind.ADAGRAD, (("lr_decay", 0.1),))},
        "'lr_decay' of adagrad is 0.1",
    ),
    ({"initializer": Initializer(InitializerKind.FROM_RANK_ZERO)}, "from_rank_zero"),
    ({"initializer": Initializer(InitializerKind.NORMAL, scale=-1.0)}, "scale is -1.0"),
    ({"initializer": Initializer(InitializerKind.NORMAL, scale=float("inf"))}, "scale is inf"),
]


@pytest.mark.parametrize(("changed", "words"), WRONG)
def test_a_setting_that_rows_cannot_have_is_refused(changed: dict[str, Any], words: str) -> None:
    fields: dict[str, Any] = {
        "name": "t",
        "dtype": DType.FLOAT32,
        "element_count": 4,
        "optimizer": OptimizerSpec(OptimizerKind.SGD),
        "rows": RowsSpec(),
        **changed,
    }
    with pytest.raises(InvalidConfig, match=words):
        TableSpec(**fields).validated()


@pytest.mark.parametrize("storage", RowStorage)
@pytest.mark.parametrize("eviction", Eviction)
def test_a_spec_of_rows_comes_over_the_wire_as_it_was(
    eviction: Eviction, storage: RowStorage
) -> None:
    rows = RowsSpec(8, 2**64 - 1, 2**40, eviction, 2**31, 2**31, storage)
    spec = replace(table_of().spec, rows=rows)
    message = wire.spec_to_proto(spec)
    assert wire.spec_from_proto(message) == spec
    assert message.ByteSize() + 40 <= view_size.table_bytes(spec)


def test_what_is_for_rows_is_refused_in_other_tables() -> None:
    for kind in ONLY_ROW_OPTIMIZERS:
        with pytest.raises(InvalidConfig, match=f"'t': {kind.value} is for tables of rows"):
            TableSpec("t", DType.FLOAT32, 4, OptimizerSpec(kind)).validated()
    sgd, drawn = OptimizerSpec(OptimizerKind.SGD), Initializer(InitializerKind.UNIFORM, scale=1.0)
    with pytest.raises(InvalidConfig, match="for tables of rows"):
        TableSpec("t", DType.FLOAT32, 4, sgd, initializer=drawn).validated()


def test_a_steps_hyperparameters_are_checked_too() -> None:
    step = table_of().step_hyperparameters
    assert dict(step.merged((("lr", 0.5),)))["lr"] == 0.5
    with pytest.raises(InvalidConfig, match="'weight_decay' of sgd is"):
        step.merged((("weight_decay", 0.1),))
    of_ftrl = StepHyperparameters(OptimizerSpec(OptimizerKind.FTRL), has_rows=True)
    changed = {"lr": 0.5, "l1": 1.0, "l2": 2.0, "beta": 3.0}
    assert dict(of_ftrl.merged(tuple(sorted(changed.items())))) == changed
    with pytest.raises(InvalidConfig, match=r"'lr' is 0\.0; expected at least 1e-18"):
        of_ftrl.merged((("lr", 0.0),))


def test_the_layout_is_that_of_a_row_and_the_partitions_are_blocks() -> None:
    table = table_of()
    assert table.block_count == 8
    assert table.block_length(7) == 2
    assert [segment.end for segment in table.segments(3)] == [2]
    assert sum(map(len, table.blocks_by_range(4).values())) == 8
    assert table.spec.size_words == "rows of 2 elements of float32"
