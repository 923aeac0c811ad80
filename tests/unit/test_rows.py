"""Where ids live, what rows begin with, sums by id, and a worker's ids cut by partition."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ps_core.consistency import Consistency, Mode, StalePolicy
from ps_core.errors import InvalidConfig, InvalidKeys, InvalidTensor
from ps_core.keys import TableId
from ps_core.limits import MAX_FLOAT32
from ps_core.rows import (
    Groups,
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
    HYPERPARAMETER_DEFAULTS,
    ONLY_ROW_OPTIMIZERS,
    ROW_OPTIMIZERS,
    Kernels,
    OptimizerKind,
    OptimizerSpec,
    StepHyperparameters,
)
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Eviction, RowsSpec, RowStorage, TableSpec
from ps_runtime.cluster import wire
from ps_worker.embedding.rows import (
    cut_as_given,
    cut_ids,
    gradients_of,
    ids_of,
    payloads_of,
    rows_of,
)
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


def mixed_number(number: int) -> int:
    """splitmix64 in whole numbers of Python, of which no part is numpy's."""
    mixed = (number + 0x9E3779B97F4A7C15) % 2**64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    return mixed ^ (mixed >> 31)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_ids_are_mixed_with_every_bit_of_a_seed(seed: int) -> None:
    salt = mixed_number(seed)
    assert int(salt_of(seed)) == salt
    ids = [0, 1, 12345, 2**63, 2**64 - 1]
    found = mixed_ids(np.array(ids, np.uint64), salt_of(seed))
    assert found.tolist() == [mixed_number(row_id ^ salt) for row_id in ids]


SOME_MIXED = mixed_ids(np.array([0, 3, 2**64 - 1, *range(7, 40)], np.uint64), salt_of(5))


@pytest.mark.parametrize("length", range(1, 7))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_first_values_are_the_pages_number_by_number(dtype: str, length: int) -> None:
    uniform = first_values(
        SOME_MIXED, Initializer(InitializerKind.UNIFORM, scale=0.5), length, dtype
    )
    normal = first_values(SOME_MIXED, Initializer(InitializerKind.NORMAL, scale=2.0), length, dtype)
    assert uniform.shape == normal.shape == (len(SOME_MIXED), length)
    for row, mixed in enumerate(SOME_MIXED.tolist()):
        words = [mixed_number((mixed + k) % 2**64) for k in range(1, length + 1)]
        halves = [half for word in words for half in (word % 2**32, word >> 32)]
        sums = [sum((word >> shift) % 2**16 for shift in (0, 16, 32, 48)) for word in words]
        drawn = [0.5 * ((half >> 8) / 2**23 - 1) for half in halves[:length]]
        factor = 2.0 * 3**0.5
        assert uniform[row].tolist() == np.array(drawn, dtype).tolist()
        assert (
            normal[row].tolist()
            == np.array([factor * ((s + 2) / 2**16 - 2) for s in sums], dtype).tolist()
        )


@pytest.mark.parametrize("length", range(1, 10))
def test_the_draws_of_an_update_are_the_words_of_its_row(length: int) -> None:
    for version in (1, 2, 2**40):
        found = rounding_draws(SOME_MIXED, version, length)
        assert found.shape == (len(SOME_MIXED), length)
        for row, mixed in zip(found.tolist(), SOME_MIXED.tolist(), strict=True):
            state = mixed_number(mixed ^ version)
            words = [mixed_number((state + k) % 2**64) for k in (1, 2, 3)]
            draws = [(word >> shift) % 2**16 for word in words for shift in (0, 16, 32, 48)]
            assert row == draws[:length]


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 10, 300])
@pytest.mark.parametrize("length", [1, 2, 17])
def test_a_sum_is_made_row_by_row_however_often_its_key_comes(length: int, count: int) -> None:
    """Workers that have one id in common are added in rank order, be they two or three hundred."""
    draws = np.random.default_rng(count)
    keys = np.repeat(np.array([3, 9, 12], np.uint64), (count, count + 1, 1))
    draws.shuffle(keys)
    rows = draws.standard_normal((len(keys), length)) * 10.0 ** draws.integers(-3, 4, (1, length))
    rows = rows.astype(np.float32)
    distinct, sums = sums_by_key(keys, rows)
    assert distinct.tolist() == [3, 9, 12]
    for key, found in zip(distinct, sums, strict=True):
        total, *others = rows[keys == key]
        for row in others:
            total = total + row
        assert found.tolist() == total.tolist()


@pytest.mark.parametrize("bit", range(56, 64))
def test_keys_of_any_size_are_grouped_in_the_order_of_their_places(bit: int) -> None:
    """Those that leave room for a place in the same word, and those that leave none."""
    high = 2**bit
    keys = np.array([high, 5, high - 1, 5, high, 0, high - 1], np.uint64)
    groups = Groups.of(keys)
    assert groups.keys.tolist() == [0, 5, high - 1, high]
    assert groups.order.tolist() == [5, 1, 3, 2, 6, 0, 4]
    assert groups.counts.tolist() == [1, 2, 2, 2]


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


@pytest.mark.parametrize("partition_count", [1, 7])
@pytest.mark.parametrize(("most", "is_given"), [(0, True), (1, False), (500, False), (10**6, True)])
def test_a_pull_asks_for_ids_as_given_unless_many_come_twice(
    partition_count: int, most: int, is_given: bool
) -> None:
    """RC-1."""
    rows = RowsSpec(partition_count)
    ids = np.random.default_rng(0).integers(0, max(most, 1), 2_000 if most else 0).astype(np.uint64)
    cut = cut_as_given(ids, rows)
    assert np.array_equal(cut.as_given(cut.ids), ids)
    assert (len(cut.ids) == len(ids)) == is_given
    assert (cut.places is None) == (is_given and partition_count == 1)
    ends = [end for _, end in cut.spans.values()]
    assert [begin for begin, _ in cut.spans.values()] == [0, *ends[:-1]][: len(ends)]
    assert ends[-1:] == ([len(cut.ids)] if most else [])
    for block, (begin, end) in cut.spans.items():
        assert {partition_of(int(each), rows) for each in cut.ids[begin:end]} == {block}


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
    ({"rows": RowsSpec(-1)}, "partition_count is -1"),
    ({"rows": RowsSpec(4097)}, "expected 0 to 4096"),
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
    ({"initializer": Initializer(InitializerKind.NORMAL, scale=1e39)}, r"scale is 1e\+39"),
    (
        {"consistency": Consistency(Mode.ASP, policy=StalePolicy.COMPENSATE, strength=1.0)},
        "keeps no reader's values; expected no compensation",
    ),
]
GOOD: list[dict[str, Any]] = [
    {"element_count": 65_536},
    {"optimizer": OptimizerSpec(OptimizerKind.ADAM)},
    {"dtype": DType.FLOAT64},
    {"allow_non_finite": True},
    {"rows": RowsSpec(storage=RowStorage.INT8)},
    {"initializer": Initializer(InitializerKind.NORMAL, scale=MAX_FLOAT32)},
]


def changed_spec(changed: dict[str, Any]) -> TableSpec:
    fields: dict[str, Any] = {
        "name": "t",
        "dtype": DType.FLOAT32,
        "element_count": 4,
        "optimizer": OptimizerSpec(OptimizerKind.SGD),
        "rows": RowsSpec(16),
        **changed,
    }
    return TableSpec(**fields)


@pytest.mark.parametrize(("changed", "words"), WRONG)
def test_a_setting_that_rows_cannot_have_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        changed_spec(changed).validated()


@pytest.mark.parametrize("changed", GOOD)
def test_a_setting_that_is_just_within_is_taken(changed: dict[str, Any]) -> None:
    assert changed_spec(changed).validated().rows is not None


def test_rows_are_drawn_from_0_admitted_at_once_and_kept_unless_it_is_said_otherwise() -> None:
    plain = RowsSpec(16)
    assert (plain.seed, plain.admit_after) == (0, 1)
    assert (plain.max_row_count, plain.evict_after) == (0, 0)


def test_a_script_names_storage_and_eviction_by_these_words() -> None:
    assert [each.value for each in RowStorage] == ["full", "float16", "bfloat16", "int8"]
    assert [each.value for each in Eviction] == ["lru", "lfu"]


@pytest.mark.parametrize("kind", sorted(ROW_OPTIMIZERS, key=str))
def test_an_update_of_rows_has_every_hyperparameter_but_those_that_change_all_rows(
    kind: OptimizerKind,
) -> None:
    step = StepHyperparameters(OptimizerSpec(kind), has_rows=True)
    for name in HYPERPARAMETER_DEFAULTS[kind]:
        if name in ("weight_decay", "lr_decay", "momentum", "dampening", "nesterov"):
            continue
        assert dict(step.merged(((name, 0.25),)))[name] == 0.25


def test_the_optimizers_that_torch_lacks_begin_with_the_numbers_of_their_papers() -> None:
    """Row-wise Adagrad as Adagrad does; FTRL without penalties."""
    rowwise, ftrl = (
        HYPERPARAMETER_DEFAULTS[kind]
        for kind in (OptimizerKind.ROWWISE_ADAGRAD, OptimizerKind.FTRL)
    )
    adagrad = HYPERPARAMETER_DEFAULTS[OptimizerKind.ADAGRAD]
    assert rowwise == {name: adagrad[name] for name in rowwise}
    assert ftrl == {"lr": 0.1, "l1": 0.0, "l2": 0.0, "beta": 1.0}


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


@pytest.mark.parametrize("seed", range(20))
def test_no_more_keys_are_added_one_by_one_than_rows_of_the_others(seed: int) -> None:
    """The fewest turns: with a row less of the others there were more such keys than that."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(1, draw.choice((9, 12, 60)), draw.integers(1, 80))
    few = Groups.of(np.repeat(np.arange(len(counts)), counts)).few_count
    assert (counts > few).sum() <= few
    assert few == 8 or (counts > few - 1).sum() > few - 1


@pytest.mark.parametrize("count", [7, 8, 9, 30])
def test_rows_of_many_keys_are_added_in_as_many_turns_as_a_key_has(count: int) -> None:
    assert Groups.of(np.tile(np.arange(50), count)).few_count == max(count, 8)
