"""A store of rows against a dictionary of rows: values, copies, and what is refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core import limits
from ps_core.errors import InvalidKeys, InvalidTensor, InvariantViolation
from ps_core.keys import TableId
from ps_core.rows import first_values, mixed_ids, partition_of, rounding_draws, salt_of
from ps_core.sliced_work import at_once
from ps_core.tables.elements import Codec, DType, Initializer, InitializerKind
from ps_core.tables.optimizers import Hyperparameters, OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Eviction, Reduction, RowsSpec, RowStorage, TableSpec
from ps_server.ranges.events import Compensation
from ps_server.values.mutations import Elements, SentAccumulator
from ps_server.values.row_gradients import payload_of
from ps_server.values.row_store import RowStore
from ps_server.values.update_arithmetic import Terms
from tests.property.rounded_values import rounded
from tests.row_audits import read_rows

LENGTH, PARTITIONS, SEED = 3, 2, 11
KINDS = (OptimizerKind.SGD, OptimizerKind.ADAGRAD, OptimizerKind.ROWWISE_ADAGRAD)
COPIED_KINDS = (*KINDS, OptimizerKind.ADAM, OptimizerKind.FTRL)
DRAWN = Initializer(InitializerKind.UNIFORM, scale=1.0)


def table_of(
    kind: OptimizerKind = OptimizerKind.SGD,
    reduction: Reduction = Reduction.MEAN,
    dtype: DType = DType.FLOAT32,
    start: Initializer = DRAWN,
    more: Hyperparameters = (),
    *,
    maximize: bool = False,
) -> Table:
    spec = TableSpec(
        "rows",
        dtype,
        LENGTH,
        OptimizerSpec(kind, (("lr", 0.5), *more), maximize=maximize),
        initializer=start,
        reduction=reduction,
        rows=RowsSpec(PARTITIONS, SEED),
    )
    return Table(TableId(1), 0, spec.validated())


def with_rows(table: Table, rows: RowsSpec) -> Table:
    return replace(table, spec=replace(table.spec, rows=rows).validated())


def store_of(table: Table) -> RowStore:
    return RowStore(table, range(PARTITIONS))


def first_row(table: Table, row_id: int) -> Any:
    mixed = mixed_ids(np.array([row_id], np.uint64), salt_of(SEED))
    return first_values(mixed, table.spec.initializer, LENGTH, table.spec.dtype.value)[0]


class Retained:
    """Ids in a dictionary: for each, the last update of its partition that it was in, and how many
    these were.
    """

    def __init__(self, rows: RowsSpec) -> None:
        self.rows = rows
        self.seen: dict[int, tuple[int, int]] = {}

    def note(self, row_id: int, version: int) -> int:
        _, count = self.seen.get(row_id, (0, 0))
        self.seen[row_id] = version, count + 1
        return count + 1

    def leaving(self, partition: int, version: int) -> list[int]:
        """The ids that leave a partition; they are forgotten."""
        own = {i: seen for i, seen in self.seen.items() if partition_of(i, self.rows) == partition}
        after, most = (
            self.rows.evict_after,
            -(-self.rows.max_row_count // self.rows.partition_count),
        )
        left: list[int] = []
        if after and version % max(1, after // 8) == 0:
            left = [i for i, (updated, _) in own.items() if version - updated >= after]
        stays = [i for i in own if i not in left]
        if most and len(stays) > most:
            is_by_count = self.rows.eviction is Eviction.LFU

            def wanted(row_id: int) -> tuple[int, int, int]:
                updated, count = own[row_id]
                mixed = mixed_ids(np.array([row_id], np.uint64), salt_of(self.rows.seed))
                return count if is_by_count else 0, updated, int(mixed[0])

            stays.sort(key=wanted)
            left += stays[: len(stays) - (most - most // 8)]
        for row_id in left:
            del self.seen[row_id]
        return left


class Twin:
    """Rows in a dictionary, one by one."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.rows: dict[int, Any] = {}
        self.sums: dict[int, Any] = {}
        assert table.spec.rows is not None
        self.spec = table.spec.rows
        self.versions = [0] * PARTITIONS
        self.retained, self.candidates = Retained(self.spec), Retained(self.spec)
        self.type = np.dtype(table.spec.dtype.value).type

    def row(self, row_id: int) -> Any:
        return self.rows.get(row_id, first_row(self.table, row_id))

    def stored(self, row: Any, draws: list[int] | None) -> Any:
        return np.array(rounded(self.spec.storage, row.tolist(), draws), self.type)

    def step(self, workers: list[list[tuple[int, list[int]]]]) -> None:
        totals: dict[int, Any] = {}
        for given_rows in workers:
            own: dict[int, Any] = {}
            for row_id, values in given_rows:
                row = np.array(values, self.type)
                own[row_id] = own[row_id] + row if row_id in own else row
            for row_id, row in own.items():
                totals[row_id] = totals[row_id] + row if row_id in totals else row
        kind = self.table.spec.optimizer.kind
        touched = {partition_of(row_id, self.spec) for row_id in totals}
        for partition in touched:
            self.versions[partition] += 1
        for row_id, total in totals.items():
            version = self.versions[partition_of(row_id, self.spec)]
            if row_id not in self.rows:
                if self.candidates.note(row_id, version) < self.spec.admit_after:
                    continue
                del self.candidates.seen[row_id]  # CD-1
            self.retained.note(row_id, version)
            if self.table.spec.reduction is Reduction.MEAN and len(workers) > 1:
                total = total * self.type(1.0 / len(workers))
            rate = self.type(-0.5)
            if kind is not OptimizerKind.SGD:
                is_one = kind is OptimizerKind.ROWWISE_ADAGRAD
                square = np.square(total).sum() / self.type(LENGTH) if is_one else np.square(total)
                sums = self.sums[row_id] = self.sums.get(row_id, self.type(0.0)) + square
                roots = np.sqrt(sums) + self.type(1e-10)
                step = total * (self.type(-0.5) / roots) if is_one else total / roots * rate
            else:
                step = total * rate
            if row_id not in self.rows:
                self.rows[row_id] = self.stored(self.row(row_id), None)
            mixed = mixed_ids(np.array([row_id], np.uint64), salt_of(SEED))
            draws = rounding_draws(mixed, version, LENGTH)[0].tolist()
            self.rows[row_id] = self.stored(self.rows[row_id] + step, draws)
        for partition in touched:
            for row_id in self.retained.leaving(partition, self.versions[partition]):
                del self.rows[row_id]
                self.sums.pop(row_id, None)
            self.candidates.leaving(partition, self.versions[partition])
        assert not self.spec.max_row_count or len(self.retained.seen) <= self.most  # RT-1

    @property
    def most(self) -> int:
        return PARTITIONS * -(-self.spec.max_row_count // PARTITIONS)


IDS = st.sampled_from([0, 1, 2, 3, 2**40, 2**63, 2**64 - 1])
ROWS = st.lists(st.tuples(IDS, st.lists(st.integers(-3, 3), min_size=LENGTH, max_size=LENGTH)))
STEPS = st.lists(st.lists(ROWS, min_size=1, max_size=3), max_size=5)
POLICIES = st.builds(
    RowsSpec,
    partition_count=st.just(PARTITIONS),
    seed=st.just(SEED),
    max_row_count=st.integers(1, 6),
    eviction=st.sampled_from(Eviction),
    evict_after=st.integers(0, 3),
    admit_after=st.integers(1, 3),
    storage=st.sampled_from(RowStorage),
)


def by_partition(
    table: Table, given_rows: list[tuple[int, list[int]]]
) -> dict[int, list[tuple[int, list[int]]]]:
    rows = table.spec.rows
    assert rows is not None
    found: dict[int, list[tuple[int, list[int]]]] = {}
    for row_id, values in given_rows:
        found.setdefault(partition_of(row_id, rows), []).append((row_id, values))
    return found


def payload(table: Table, given_rows: list[tuple[int, list[int]]]) -> bytes:
    ids = np.array([row_id for row_id, _ in given_rows], np.uint64)
    values = np.array([values for _, values in given_rows], table.spec.dtype.value)
    return payload_of(ids, values.reshape(len(ids), LENGTH))


def step(
    store: RowStore,
    clock: int,
    workers: list[list[tuple[int, list[int]]]],
    hyperparameters: Hyperparameters = (),
) -> None:
    table, codec = store.table, store.table.spec.arithmetic_codec
    for given_rows in workers:
        parts = [
            (block, store.decode(block, codec, payload(table, some), b""))
            for block, some in by_partition(table, given_rows).items()
        ]
        store.accumulate(clock, parts, 1.0)
    at_once(store.applying(store.take(clock), Terms(clock, hyperparameters, len(workers))))


def rows_of(store: RowStore, ids: list[int]) -> list[bytes]:
    rows = store.table.spec.rows
    assert rows is not None
    return [
        bytes(read_rows(store, partition_of(row_id, rows), np.array([row_id], np.uint64).tobytes()))
        for row_id in ids
    ]


ALL_IDS = [0, 1, 2, 3, 2**40, 2**63, 2**64 - 1, 99]


@pytest.mark.slow
@given(
    steps=STEPS,
    kind=st.sampled_from(KINDS),
    reduction=st.sampled_from(Reduction),
    dtype=st.sampled_from([DType.FLOAT32, DType.FLOAT64]),
)
def test_a_store_has_what_a_dictionary_has(
    steps: list[list[list[tuple[int, list[int]]]]],
    kind: OptimizerKind,
    reduction: Reduction,
    dtype: DType,
) -> None:
    table = table_of(kind, reduction, dtype)
    store, twin = store_of(table), Twin(table)
    for clock, workers in enumerate(steps, 1):
        step(store, clock, workers)
        twin.step(workers)
    assert rows_of(store, ALL_IDS) == [twin.row(row_id).tobytes() for row_id in ALL_IDS]
    assert store.row_count == len(twin.rows)
    touched = [set().union(*[by_partition(table, rows) for rows in each]) for each in steps]
    for block in range(PARTITIONS):
        assert store.version(block) == sum(block in each for each in touched)


@pytest.mark.thorough
@given(
    steps=st.lists(st.lists(ROWS, min_size=1, max_size=2), max_size=12),
    rows=POLICIES,
    kind=st.sampled_from(KINDS),
)
def test_rows_that_leave_are_admitted_and_are_rounded_are_the_twins(
    steps: list[list[list[tuple[int, list[int]]]]], rows: RowsSpec, kind: OptimizerKind
) -> None:
    table = with_rows(table_of(kind), rows)
    store, twin = store_of(table), Twin(table)
    for clock, workers in enumerate(steps, 1):
        step(store, clock, workers)
        twin.step(workers)
        assert rows_of(store, ALL_IDS) == [twin.row(row_id).tobytes() for row_id in ALL_IDS]
        assert store.row_count == len(twin.rows)
        assert store.candidate_count == len(twin.candidates.seen)


def test_each_partition_has_its_share_of_a_bound_below_their_number() -> None:
    store = store_of(with_rows(table_of(), RowsSpec(PARTITIONS, SEED, max_row_count=1)))
    step(store, 1, [[(row_id, [1, 1, 1]) for row_id in ALL_IDS]])
    assert store.row_count == PARTITIONS


class Click:
    """One element of a row by the equations of algorithm 1 in "Ad Click Prediction: a View from the
    Trenches", whose z starts where the closed form of w, without penalties, has the initial value.
    """

    def __init__(self, w: float, alpha: float, l1: float, l2: float, beta: float) -> None:
        self.alpha, self.l1, self.l2, self.beta = alpha, l1, l2, beta
        self.w, self.z, self.n = w, -w * beta / alpha, 0.0

    def step(self, g: float) -> None:
        sigma = (math.sqrt(self.n + g * g) - math.sqrt(self.n)) / self.alpha
        self.z += g - sigma * self.w
        self.n += g * g
        rate = (self.beta + math.sqrt(self.n)) / self.alpha
        if rate > 0.0:
            rest = self.z - math.copysign(self.l1, self.z)
            self.w = 0.0 if abs(self.z) <= self.l1 else -rest / (rate + self.l2)

    @property
    def is_surely_zero(self) -> bool:
        """True if another order of the terms gives no other result."""
        return self.beta + self.n > 0.0 and abs(self.z) < self.l1 - 1e-4


@pytest.mark.slow
@given(
    steps=STEPS,
    more=st.tuples(
        st.sampled_from([0.0, 0.5, 2.0]),
        st.sampled_from([0.0, 0.25]),
        st.sampled_from([0.0, 1.0, 3.0]),
    ).map(lambda drawn: dict(zip(("l1", "l2", "beta"), drawn, strict=True))),
    start=st.sampled_from([DRAWN, Initializer(InitializerKind.ZEROS)]),
    dtype=st.sampled_from([DType.FLOAT32, DType.FLOAT64]),
    maximize=st.booleans(),
)
def test_ftrl_is_the_papers(
    steps: list[list[list[tuple[int, list[int]]]]],
    more: dict[str, float],
    start: Initializer,
    dtype: DType,
    maximize: bool,
) -> None:
    terms = tuple(more.items())
    table = table_of(
        OptimizerKind.FTRL, Reduction.SUM, dtype, start=start, more=terms, maximize=maximize
    )
    store, sign = store_of(table), -1 if maximize else 1
    rows: dict[int, list[Click]] = {}
    for clock, workers in enumerate(steps, 1):
        step(store, clock, workers)
        totals: dict[int, list[int]] = {}
        for row_id, values in itertools.chain.from_iterable(workers):
            so_far = totals.get(row_id, [0] * LENGTH)
            totals[row_id] = [a + b for a, b in zip(so_far, values, strict=True)]
        for row_id, total in totals.items():
            if row_id not in rows:
                first = first_row(table, row_id).tolist()
                rows[row_id] = [Click(w, 0.5, **more) for w in first]
            for element, g in zip(rows[row_id], total, strict=True):
                element.step(sign * g)
    near = 1e-4 if dtype is DType.FLOAT32 else 1e-9
    for row_id, raw in zip(ALL_IDS, rows_of(store, ALL_IDS), strict=True):
        found = np.frombuffer(raw, dtype.value)
        if row_id not in rows:
            assert found.tobytes() == first_row(table, row_id).tobytes()
            continue
        expected = [element.w for element in rows[row_id]]
        assert found.tolist() == pytest.approx(expected, rel=near, abs=near)
        for value, element in zip(found.tolist(), rows[row_id], strict=True):
            assert value == 0.0 or not element.is_surely_zero


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64])
def test_ftrl_without_penalties_is_adagrad_whatever_the_rates_are(dtype: DType) -> None:
    """A schedule does not scale what was learned before, and the initial value stays."""
    store = store_of(table_of(OptimizerKind.FTRL, dtype=dtype))
    draws = np.random.default_rng(3)
    expected = {row_id: first_row(store.table, row_id).astype("f8") for row_id in range(6)}
    squares = {row_id: np.zeros(LENGTH) for row_id in expected}
    for clock in range(1, 25):
        ids = draws.permutation(6)[:3].tolist()
        rows = [(each, draws.integers(-3, 4, LENGTH).tolist()) for each in ids]
        lr, beta = (1.0, 0.25, 0.01)[clock % 3], (1.0, 2.0)[clock % 2]
        step(store, clock, [rows], (("beta", beta), ("lr", lr)))
        for row_id, values in rows:
            gradient = np.array(values, float)
            squares[row_id] += gradient**2
            expected[row_id] -= lr * gradient / (beta + np.sqrt(squares[row_id]))
    near = 1e-5 if dtype is DType.FLOAT32 else 1e-12
    for row_id, raw in zip(expected, rows_of(store, list(expected)), strict=True):
        np.testing.assert_allclose(
            np.frombuffer(raw, dtype.value), expected[row_id], rtol=near, atol=near
        )


def test_a_gradient_whose_square_is_too_large_leaves_numbers() -> None:
    store = store_of(table_of(OptimizerKind.FTRL, start=Initializer()))
    for clock in range(1, 4):
        huge = np.full((1, LENGTH), 1e30, np.float32)
        payload = payload_of(np.array([one_of(0)], np.uint64), huge)
        store.accumulate(clock, [(0, store.decode(0, Codec.FP32, payload, b""))], 1.0)
        with np.errstate(over="ignore"):
            at_once(store.applying(store.take(clock), Terms(clock, (), 1)))
    assert np.isfinite(np.frombuffer(rows_of(store, [one_of(0)])[0], np.float32)).all()


def test_a_penalty_of_a_step_holds_for_all_that_was_learned() -> None:
    store = store_of(table_of(OptimizerKind.FTRL))
    for clock in range(1, 4):
        step(store, clock, [[(1, [1, -2, 3])]])
    assert all(np.frombuffer(rows_of(store, [1])[0], np.float32))
    step(store, 4, [[(1, [0, 0, 0])]], (("l1", 100.0),))
    assert rows_of(store, [1]) == [np.zeros(LENGTH, np.float32).tobytes()]


@pytest.mark.thorough
@given(
    before=STEPS,
    after=STEPS,
    kind=st.sampled_from(COPIED_KINDS),
    rows=st.one_of(st.just(RowsSpec(PARTITIONS, SEED)), POLICIES),
)
def test_a_copy_and_a_loaded_store_go_on_as_the_one_that_was_copied(
    before: list[list[list[tuple[int, list[int]]]]],
    after: list[list[list[tuple[int, list[int]]]]],
    kind: OptimizerKind,
    rows: RowsSpec,
) -> None:
    more = (("l1", 1.0),) if kind is OptimizerKind.FTRL else ()
    table = with_rows(table_of(kind, more=more), rows)
    store, copied, loaded = store_of(table), store_of(table), store_of(table)
    step(copied, 1, [[(5, [1, 1, 1])]])  # is forgotten
    for clock, workers in enumerate(before, 1):
        step(store, clock, workers)
    at_once(copied.restoring(store.snapshot()))
    for block in range(PARTITIONS):
        saved = store.saved(block)
        memory_of = loaded.load(block, saved.version, saved.steps)
        for name, values in saved.tensors:
            memory_of(name, values.nbytes)[:] = values
        loaded.end_load(block)
    for clock, workers in enumerate(after, len(before) + 1):
        for each in (store, copied, loaded):
            step(each, clock, workers)
    for other in (copied, loaded):
        assert rows_of(other, [*ALL_IDS, 5]) == rows_of(store, [*ALL_IDS, 5])
        assert [other.version(block) for block in range(PARTITIONS)] == [
            store.version(block) for block in range(PARTITIONS)
        ]
        assert other.row_count == store.row_count
        assert other.candidate_count == store.candidate_count


def test_ids_that_were_admitted_are_no_candidates_of_a_copy() -> None:
    """Of a few among many: they keep their places for a time."""
    table = with_rows(table_of(), RowsSpec(PARTITIONS, SEED, admit_after=2))
    store, copied = store_of(table), store_of(table)
    step(store, 1, [[(each, [1, 1, 1]) for each in range(200)]])
    step(store, 2, [[(each, [1, 1, 1]) for each in range(10)]])
    at_once(copied.restoring(store.snapshot()))
    assert (copied.row_count, copied.candidate_count) == (10, 190)
    for each in (store, copied):
        step(each, 3, [[(row_id, [1, 1, 1]) for row_id in range(100)]])
        assert (each.row_count, each.candidate_count) == (100, 100)


@given(workers=st.lists(ROWS, min_size=1, max_size=3), reduces=st.booleans())
def test_a_backup_makes_of_a_sum_what_its_primary_makes(
    workers: list[list[tuple[int, list[int]]]], reduces: bool
) -> None:
    table = table_of(OptimizerKind.ADAGRAD)
    primary, backup = store_of(table), store_of(table)
    for given_rows in workers:
        parts = [
            (block, primary.decode(block, Codec.FP32, payload(table, some), b""))
            for block, some in by_partition(table, given_rows).items()
        ]
        primary.accumulate(1, parts, 1.0)
    if reduces:
        squares = at_once(primary.reducing(1, len(workers)))
        assert len(squares) == PARTITIONS
        assert all(square >= 0.0 for square in squares)
    accumulator = primary.take(1)
    sent = accumulator.sent()
    received = at_once(backup.receiving(sent))
    for store, sums in ((primary, accumulator), (backup, received)):
        at_once(store.applying(sums, Terms(1, (), len(workers), 0.5)))
    assert rows_of(backup, ALL_IDS) == rows_of(primary, ALL_IDS)


def one_of(partition: int) -> int:
    rows = RowsSpec(PARTITIONS, SEED)
    return next(row_id for row_id in range(100) if partition_of(row_id, rows) == partition)


def test_what_is_wrong_with_a_payload_is_refused_and_changes_nothing() -> None:
    """RS-1, among others: an id of another partition never comes in."""
    table = table_of()
    store = RowStore(table, [0])
    good = payload(table, [(one_of(0), [1, 2, 3])])
    nan = np.array([[1.0, np.nan, 0.0]], np.float32)
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (InvalidKeys, "is not in this range", {"block": 1}),
        (InvalidKeys, "presence", {"presence": b"\x01"}),
        (InvalidTensor, "fp64; expected fp32", {"codec": Codec.FP64}),
        (InvalidTensor, "expected a multiple of 20", {"payload": good[:-1]}),
        (
            InvalidKeys,
            "lives in partition 1",
            {"payload": payload(table, [(one_of(1), [1, 2, 3])])},
        ),
        (
            InvalidTensor,
            f"gradient of id {one_of(0)} is not finite",
            {"payload": payload_of(np.array([one_of(0)], np.uint64), nan)},
        ),
    ]
    for error, words, changed in wrong:
        fields = {"block": 0, "codec": Codec.FP32, "payload": good, "presence": b"", **changed}
        with pytest.raises(error, match=words):
            store.decode(**fields)
    assert store.row_count == 0


def test_what_is_wrong_with_a_pull_is_refused() -> None:
    store = store_of(table_of())
    assert not read_rows(store, 0, b"").nbytes
    here = np.array([one_of(0)], np.uint64).tobytes()
    most = limits.MAX_ROW_COUNT
    for ids in (here[:-1], np.array([one_of(1)], np.uint64).tobytes(), here * (most + 1)):
        with pytest.raises(InvalidKeys):
            read_rows(store, 0, ids)
    with pytest.raises(InvalidKeys, match="expected the ids"):
        store.read(0, None, None)
    with pytest.raises(InvalidKeys, match="cannot be pulled"):
        store.read_array(0, "sum")


def test_what_is_wrong_with_a_copy_or_a_sum_is_refused() -> None:
    table = table_of(OptimizerKind.ADAGRAD)
    store, other = store_of(table), store_of(table)
    step(store, 1, [[(one_of(0), [1, 2, 3])]])
    copy = store.snapshot()
    first = copy.blocks[0]
    broken = [
        copy._replace(blocks=copy.blocks[1:]),
        copy._replace(blocks=(first._replace(values=first.values[:-1]), *copy.blocks[1:])),
        copy._replace(blocks=(first._replace(slots=first.slots[:1]), *copy.blocks[1:])),
        copy._replace(blocks=(first._replace(block=1), *copy.blocks[1:])),
    ]
    for each in broken:
        with pytest.raises((InvalidKeys, InvalidTensor)):
            at_once(other.restoring(each))
    mean = SentAccumulator((), means=(Elements(0, b"", b""),))
    with pytest.raises(InvalidKeys, match="running means"):
        at_once(store.receiving(mean))
    assert other.row_count == 0


def test_rows_have_no_delay_compensation() -> None:
    with pytest.raises(InvariantViolation, match="RS-2"):
        store_of(table_of()).accumulate(1, [], 1.0, Compensation(0, 0.1, adaptive=False))  # type: ignore[arg-type]


@pytest.mark.thorough
def test_thousands_of_rows_keep_their_values_while_the_index_grows() -> None:
    table = table_of()
    store = RowStore(table, range(PARTITIONS))
    draws = np.random.default_rng(0)
    expected: dict[int, int] = {}
    for clock in range(1, 11):
        ids = np.unique(draws.integers(0, 100_000, 5_000))
        step(store, clock, [[(int(each), [1, 0, -1]) for each in ids]])
        for each in ids.tolist():
            expected[each] = expected.get(each, 0) + 1
    assert store.row_count == len(expected)
    some = list(expected)[::97]
    for row_id, raw in zip(some, rows_of(store, some), strict=True):
        row = first_row(table, row_id)
        for _ in range(expected[row_id]):
            row = row + np.array([1, 0, -1], np.float32) * np.float32(-0.5)
        assert np.frombuffer(raw, np.float32).tobytes() == row.tobytes()
