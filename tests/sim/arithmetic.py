"""The numbers of a simulation: what servers make of gradients, and what a dumb twin makes of them.

A table of rows has a few ids in each partition: to the twin a row is what a tensor's share of a
block is, and an id that is left out of a push a tensor without a gradient.

Beside the identities that say what is in a block, servers hold real values: `Numbers` runs the real
stores (`ps_server.stores`) on gradients of small whole numbers. `Twin` is one process that
sums in rank order, divides by those who sealed the clock, and steps the optimizer, in plain Python.

Oracles:
    PART   Who took part in an update is who sealed its clock without skip, and lives; of the dead
           some may be in it. With backup workers: some of those who sealed it.
    SUM    The values of a block are the twin's: divided by the right number of contributors, scaled
           by the right scale, with what a tensor's own optimizer state makes of it; tensors that
           nobody had a gradient for are as they were.
    VERSION  A block's version counts the updates that are in it: those of which a worker had a
           push.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from docs import payload_codec
from ps_core.consistency import Consistency, Mode, StalePolicy
from ps_core.keys import Incarnation, RangeId, TableId
from ps_core.rows import mixed_ids, partitions_of, salt_of
from ps_core.sliced_work import Work, at_once
from ps_core.tables.elements import (
    SCALED_GROUP_COUNT,
    Codec,
    Initializer,
    InitializerKind,
    pack_presence,
)
from ps_core.tables.optimizers import Hyperparameters, OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import (
    Eviction,
    Reduction,
    RowsSpec,
    RowStorage,
    TableSpec,
    TensorSpec,
)
from ps_server.lane.lane_socket import SharedLanes
from ps_server.ranges.events import Accumulate, AssignValues, Forget, Record
from ps_server.ranges.server_machine import ShardAdded
from ps_server.rows.row_memory import RowMemory
from ps_server.rows.row_tier import RowTier
from ps_server.stores import Shards
from ps_server.values.contributions import Contribution, elements
from ps_server.values.mutations import Assigned, Dropped, KeptSum, Mutation, Put, SentAccumulator
from ps_server.values.row_gradients import RowGradients, payload_of
from ps_server.values.row_store import RowStore
from ps_server.values.store_copy import StoreCopy
from ps_server.values.update_arithmetic import Accumulator
from tests.deferred_disk import DeferredDisk, FewFrames
from tests.row_audits import read_rows
from tests.sim.grads import FIRST, LAID_VALUES, SECOND, STEP, VALUES, Arrived, Grad

if TYPE_CHECKING:
    from tests.sim.truth import Settings, Truth

ROW_ELEMENTS, ROW_COUNT = 5, 3
"""Of a table of rows: elements of one, and ids of a partition that are pushed."""

ROWS_SHARE = 0.2
"""Of the tables that may be of rows."""

FRAGMENTS_SHARE = 0.5
"""Of the models that may be trained in fragments."""

_WITH_RATE = (OptimizerKind.SGD, OptimizerKind.ADAM, OptimizerKind.ADAGRAD)

TENSOR_ELEMENTS = 48
"""Of a block of 64: tensors begin in one block and end in the next."""
EXACT = 1e-4
"""By so much of it may a number differ: servers calculate in float32."""

ROUNDED = {RowStorage.BFLOAT16: 2.0**-7, RowStorage.INT8: 2.0**-6}
"""By so much of the largest number may an update of rounded rows differ from that."""

_STORAGES = (RowStorage.FULL, RowStorage.FULL, RowStorage.BFLOAT16, RowStorage.INT8)

Contributors = AbstractSet[Incarnation]


def tensors_of(element_count: int) -> tuple[TensorSpec, ...]:
    """The tensors of a table."""
    return tuple(
        TensorSpec(f"t{begin}", (min(TENSOR_ELEMENTS, element_count - begin),), begin)
        for begin in range(0, element_count, TENSOR_ELEMENTS)
    )


def optimizer_of(draw: random.Random, *, may_sum: bool) -> OptimizerSpec:
    """One of many; sums (AGGREGATE) only where all clocks are BSP."""
    other = OptimizerKind.AGGREGATE if may_sum else OptimizerKind.ADD
    kind = draw.choice((*[OptimizerKind.SGD] * 3, OptimizerKind.ADAM, other))
    momentum = draw.choice((0.0, 0.5, 0.5))
    given = {"momentum": momentum} if kind is OptimizerKind.SGD else {}
    return OptimizerSpec(kind, tuple(given.items()))


def is_compensated(spec: TableSpec) -> bool:
    """Whether its gradients are corrected for their delay."""
    return spec.consistency.policy is StalePolicy.COMPENSATE


def of_rows(spec: TableSpec, draw: random.Random) -> TableSpec:
    """One table of six, or so, as one of rows, with as many partitions as it has blocks."""
    if (
        is_compensated(spec)
        or spec.optimizer.kind is OptimizerKind.AGGREGATE
        or draw.random() >= ROWS_SHARE
    ):
        return spec
    return replace(
        spec,
        element_count=ROW_ELEMENTS,
        tensors=(),
        optimizer=OptimizerSpec(draw.choice(_WITH_RATE)),
        initializer=Initializer(InitializerKind.ZEROS),
        rows=retained(-(-spec.element_count // spec.block_elements), draw),
    )


def retained(partition_count: int, draw: random.Random) -> RowsSpec:
    """Most of them evict rows, or admit them late: of the few that a partition has, some soon."""
    seed = draw.getrandbits(64)
    storage = _STORAGES[seed % len(_STORAGES)]
    if draw.random() < 0.3:
        return RowsSpec(partition_count, seed, storage=storage)
    most = draw.choice((0, ROW_COUNT - 1, ROW_COUNT - 1)) * partition_count
    return RowsSpec(
        partition_count,
        seed,
        most,
        draw.choice(list(Eviction)) if most else Eviction.LRU,
        draw.choice((0, 1, 2)),
        draw.choice((1, 2, 3)),
        storage,
    )


def in_fragments(specs: list[TableSpec], draw: random.Random) -> list[TableSpec]:
    """Some models take outer steps, of one fragment after the other."""
    block_count = sum(-(-spec.element_count // spec.block_elements) for spec in specs)
    may_be = not any(
        spec.rows is not None or is_compensated(spec) or spec.consistency.backup_workers
        for spec in specs
    )
    if not may_be or block_count == 1 or draw.random() >= FRAGMENTS_SHARE:
        return specs
    optimizer = OptimizerSpec(
        OptimizerKind.SGD,
        (("momentum", 0.5),),
        nesterov=True,
        inner_steps=1,
        fragment_count=draw.randint(2, min(4, block_count)),
    )
    return [replace(spec, optimizer=optimizer) for spec in specs]


def reduction_of(draw: random.Random) -> Reduction:
    """Mostly the mean."""
    return draw.choice((Reduction.MEAN, Reduction.MEAN, Reduction.MEAN, Reduction.SUM))


def storage_of(table: Table) -> RowStorage:
    """How its servers store values."""
    return RowStorage.FULL if table.spec.rows is None else table.spec.rows.storage


def may_clip(table: Table) -> bool:
    """Whether its workers have gradients that the servers could clip."""
    optimizer = table.spec.optimizer
    is_of_gradients = optimizer.kind not in (OptimizerKind.AGGREGATE, OptimizerKind.ADD)
    return is_of_gradients and not optimizer.inner_steps


def may_be_read_last(table: Table) -> bool:
    """Whether what is in it in the end is what is asked for: sums are asked for by their clock."""
    return table.spec.optimizer.kind is not OptimizerKind.AGGREGATE


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Of torch: blocks here are small, and threads cost a thousand times what they bring."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def numbers_of(table: Table, clock: int) -> Hyperparameters:
    """What all workers' schedules say for a clock."""
    has_rate = table.spec.optimizer.kind in _WITH_RATE
    return (("lr", (1.0, 0.5, 0.25)[clock % 3]),) if has_rate else ()


def gradient_of(grad: Grad, segment_count: int) -> tuple[float | None, ...]:
    """Of each tensor of the block, what every element is; None where there is no gradient."""
    found: list[float | None] = []
    rank = 0 if grad.is_edit else grad.rank
    for segment in range(segment_count):
        seed = grad.clock * 7919 + rank * 104729 + grad.block * 1299709 + grad.revision * 31
        seed = (seed + segment * 15485863) * 2654435761 % 4294967296 >> 7
        is_absent = grad.clock and segment != seed % segment_count and seed // 64 % 8 == 0
        value = float(seed % 7 - 3 or 4)
        if grad.is_edit and grad.array == STEP:
            value = abs(value) - 1.0
        elif grad.is_edit and grad.array == SECOND:
            value = abs(value)
        found.append(None if is_absent else value)
    return tuple(found)


@lru_cache(maxsize=1024)
def _lengths(element_count: int, block_elements: int, block: int) -> tuple[int, ...]:
    """Elements of each tensor's share of a block."""
    begin, end = block * block_elements, min((block + 1) * block_elements, element_count)
    cuts = [begin, *(c for c in range(0, end, TENSOR_ELEMENTS) if begin < c), end]
    return tuple(b - a for a, b in itertools.pairwise(cuts))


@lru_cache(maxsize=1024)
def ids_of(rows: RowsSpec, block: int) -> tuple[int, ...]:
    """The first few ids that live in a partition."""
    ids = np.arange(ROW_COUNT * 8 * rows.partition_count, dtype=np.uint64)
    places = partitions_of(mixed_ids(ids, salt_of(rows.seed)), rows.partition_count)
    return tuple(ids[places == block][:ROW_COUNT].tolist())


@lru_cache(maxsize=1024)
def _sent_ids(rows: RowsSpec, block: int) -> bytes:
    """As a pull of these ids has them."""
    return np.array(ids_of(rows, block), np.uint64).tobytes()


def lengths_of(table: Table, block: int) -> tuple[int, ...]:
    """Elements of each tensor's share of a block; of each row of a partition."""
    if table.spec.rows is not None:
        return (ROW_ELEMENTS,) * len(ids_of(table.spec.rows, block))
    return _lengths(table.spec.element_count, table.spec.block_elements, block)


_CODECS = (
    *(Codec.FP32, Codec.INT8, Codec.BF16, Codec.SPARSE, Codec.INT8, Codec.FP16, Codec.LOW_RANK),
)
"""Each push comes in one of them; all of them hold the numbers of the simulation exactly."""


def _payload(table: Table, grad: Grad) -> tuple[Codec, bytes, bytes]:
    """The codec of a gradient's elements, these, and which tensors have any."""
    lengths = lengths_of(table, grad.block)
    found = gradient_of(grad, len(lengths))
    rows = table.spec.rows
    if rows is not None:
        pairs = zip(ids_of(rows, grad.block), found, strict=True)
        given = [(row_id, value) for row_id, value in pairs if value is not None]
        some = np.array([[value] * ROW_ELEMENTS for _, value in given], np.float32)
        ids = np.array([row_id for row_id, _ in given], np.uint64)
        return Codec.FP32, payload_of(ids, some), b""
    values = np.repeat(np.array([value or 0.0 for value in found], np.float32), lengths)
    presence = pack_presence(tuple(value is not None for value in found))
    codec = _CODECS[(grad.clock + 2 * grad.rank + grad.block) % len(_CODECS)]
    if codec is Codec.SPARSE:
        places = np.flatnonzero(values) if values.any() else np.zeros(1, np.intp)
        return codec, payload_codec.encode_sparse(values[places], places), presence
    if codec is Codec.LOW_RANK:
        begin = grad.block * table.spec.block_elements
        factors = _factors(values, begin % _COLUMNS)
        if len(factors) <= codec.payload_bytes(len(values)):
            return codec, factors, presence
        codec = Codec.FP32
    if codec is not Codec.INT8:
        return codec, payload_codec.encode(values, codec), presence
    numbers = {value for value in found if value is not None}
    if len(numbers) == 1:  # elements of absent tensors may be anything
        (value,) = numbers
        scales = np.full(-(-len(values) // SCALED_GROUP_COUNT), abs(value), "<f4")
        bits = np.packbits(np.full(len(values), value >= 0), bitorder="little")
        return Codec.SIGN, scales.tobytes() + bits.tobytes(), presence
    scales = np.full(-(-len(values) // SCALED_GROUP_COUNT), 0.5, "<f4")
    return codec, scales.tobytes() + (2 * values).astype(np.int8).tobytes(), presence


_COLUMNS = TENSOR_ELEMENTS // 4


def _factors(values: npt.NDArray[np.float32], first: int) -> bytes:
    """A LOW_RANK payload of values that are the same in each row of the matrix."""
    starts = np.arange(0, first + len(values), _COLUMNS) - first
    left = values[np.maximum(starts, 0)] / 2
    return payload_codec.encode_low_rank(left[:, None], np.full((1, _COLUMNS), 2.0), first)


TIER_SHARE = 0.5
"""Of servers, those that have a disk for rows, and memory for one or a few."""


class Sum(NamedTuple):
    """What was summed for an update: the identities, and the numbers here and as they are sent."""

    grads: tuple[Grad, ...]
    accumulator: Accumulator | None
    sent: SentAccumulator


class Numbers:
    """The values of one server. Most of its rows are on a disk, for some seeds."""

    def __init__(self, seed: object, lanes: SharedLanes | None = None) -> None:
        draws = Random(f"rows of {seed}")
        memory = RowMemory()
        if draws.random() < TIER_SHARE:
            disk = DeferredDisk(seed, draws.choice((0.0, 0.0, 0.3)))
            tier = RowTier(disk, least_frame_count=draws.randint(1, 3))
            memory = FewFrames(tier=tier)
        self.shards = Shards(lanes or SharedLanes(), {}, memory)

    def hold(self, table: Table, range_id: RangeId, blocks: Sequence[int]) -> None:
        """There is room for them, from now on."""
        if (table.table_id, range_id) not in self.shards.stores:
            self.shards.add([ShardAdded(table, range_id, tuple(blocks))])

    def forget(self, range_id: RangeId) -> None:
        """Nothing of the range is here any more."""
        self.shards.remove(range_id)

    def arrived(self, table: Table, range_id: RangeId, grad: Grad) -> Arrived:
        """A gradient came by memory that is its worker's, and its worker's again at once."""
        codec, payload, presence = _payload(table, grad)
        shared = np.frombuffer(payload, np.uint8).copy()
        lent = shared.data.toreadonly()
        store = self.shards.stores[table.table_id, range_id]
        found = Arrived(*grad)
        found.part = store.decode(grad.block, codec, lent, presence, is_shared=True)
        shared[:] = 0x7F  # numbers of 3e38
        return found

    def _decoded(self, table: Table, range_id: RangeId, grad: Grad) -> Contribution | RowGradients:
        store = self.shards.stores[table.table_id, range_id]
        codec, payload, presence = _payload(table, grad)
        return store.decode(grad.block, codec, payload, presence)

    def accumulate(self, effect: Accumulate) -> None:
        """One worker's step goes into the sum of its clock."""
        parts = tuple((block, grad.part) for block, grad in effect.parts)  # type: ignore[attr-defined]
        self.shards.accumulate(effect._replace(parts=parts))

    def give(self, key: tuple[TableId, RangeId], reader: Incarnation, block: int) -> None:
        """A reader is given the block as it is now, which is remembered."""
        self.shards.stores[key].keep(reader, block)

    def forget_given(self, effect: Forget) -> None:
        """What was remembered for a reader is of no use any more."""
        self.shards.forget(effect)

    def assign(self, table: Table, record: Record, grads: Sequence[Grad]) -> None:
        """Initial values, or an edit's."""
        parts = tuple((g.block, self._decoded(table, record.range_id, g)) for g in grads)
        at_once(self.shards.assigning(AssignValues(record, parts)))

    def taken(self, record: Record, grads: Sequence[Grad]) -> Sum:
        """The sum of the record's clock, detached."""
        accumulator = self.shards.take(record)
        return Sum(tuple(grads), accumulator, accumulator.sent().fixed())

    def kept(self, record: Record, grads: Sequence[Grad]) -> Sum:
        """The sum that was reduced; it stays."""
        return Sum(tuple(grads), None, self.shards.kept(record).sent().fixed())

    def putting(self, record: Record, accumulator: Sum) -> Work[None]:
        """A sum of this server's own becomes values."""
        assert (yield from self.shards.applying(record, accumulator.accumulator)) is None

    def make(self, table: Table, change: Mutation) -> None:
        """`making`, at once."""
        at_once(self.making(table, change))

    def making(self, table: Table, change: Mutation) -> Work[None]:
        """As a backup does what its primary decided."""
        match change:
            case Put(record, Sum() as accumulator) | KeptSum(record, Sum() as accumulator):
                change = change._replace(accumulator=accumulator.sent)
            case Assigned(record, parts):
                found = [self._decoded(table, record.range_id, grad) for _, grad in parts]
                dense = [elements(each) for each in found if isinstance(each, Contribution)]
                change = Assigned(record, tuple(dense))
            case Put() | Dropped():
                pass
        assert (yield from self.shards.making(change)) is None

    def copies(self, range_id: RangeId) -> dict[TableId, StoreCopy]:
        """All of a range."""
        stores = self.shards.stores.items()
        return {table_id: store.snapshot() for (table_id, at), store in stores if at == range_id}

    def restore(self, range_id: RangeId, copies: dict[TableId, StoreCopy]) -> None:
        """Make the range what was copied; there is room for it."""
        for table_id, copy in copies.items():
            at_once(self.shards.stores[table_id, range_id].restoring(copy))

    def read(
        self, table: Table, range_id: RangeId, block: int, clock: int | None
    ) -> tuple[float, ...]:
        """What every element of each tensor of the block is."""
        store, rows = self.shards.stores[table.table_id, range_id], table.spec.rows
        payload: bytes | memoryview
        if rows is None:
            payload, _ = store.read(block, None, clock)
        else:
            assert isinstance(store, RowStore)
            payload = read_rows(store, block, _sent_ids(rows, block))
        values, found, begin = np.frombuffer(payload, np.float32).tolist(), [], 0
        for length in lengths_of(table, block):
            first, end = values[begin], begin + length
            is_even = first == values[begin + length // 2] == values[end - 1]
            assert is_even or storage_of(table) in ROUNDED, (
                f"SUM: block {block}: {values[begin:end]}"
            )
            found.append(first)
            begin = end
        return tuple(found)


class Reading(NamedTuple):
    """A block, as it was read at a clock: its numbers, who took part in its updates, and its
    version, where that was told.
    """

    clock: int
    numbers: tuple[float, ...]
    updates: tuple[Contributors, ...]
    version: int | None = None


@dataclass(slots=True)
class _Update:
    """One update of a block: what of it is in the block, and its place among all."""

    clock: int
    grads: list[Grad]
    index: int


@dataclass(slots=True)
class Retained:
    """The rows of a partition that there are, and its candidates: by the place of their ids, the
    last update with a gradient of each, and how many these were.
    """

    version: int = 0
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    candidates: dict[int, tuple[int, int]] = field(default_factory=dict)

    def admitted(self, spec: RowsSpec, reduced: list[float | None]) -> list[float | None]:
        """An update: what of it reaches a row."""
        self.version += 1
        found = list(reduced)
        for at, value in enumerate(reduced):
            if value is None:
                continue
            if at not in self.rows:
                count = self.candidates.pop(at, (0, 0))[1] + 1
                if count < spec.admit_after:
                    self.candidates[at] = self.version, count
                    found[at] = None
                    continue
            self.rows[at] = self.version, self.rows.get(at, (0, 0))[1] + 1
        return found

    def evicted(self, spec: RowsSpec, ids: tuple[int, ...]) -> list[int]:
        """The places of the rows that leave after the newest update."""
        self._leave(spec, ids, self.candidates)
        return self._leave(spec, ids, self.rows)

    def _leave(
        self, spec: RowsSpec, ids: tuple[int, ...], among: dict[int, tuple[int, int]]
    ) -> list[int]:
        after, most = spec.evict_after, -(-spec.max_row_count // spec.partition_count)
        left = [at for at, (seen, _) in among.items() if after and self.version - seen >= after]
        stays = [at for at in among if at not in left]
        mixed = mixed_ids(np.array(ids, np.uint64), salt_of(spec.seed)).tolist()
        is_by_count = spec.eviction is Eviction.LFU
        stays.sort(key=lambda at: (among[at][1] * is_by_count, among[at][0], mixed[at]))
        if most:
            left += stays[: max(0, len(stays) - most)]
        for at in left:
            del among[at]
        return left


@dataclass(slots=True)
class BlockState:
    """One block, after some updates; a number for each of its tensors."""

    values: list[float]
    first: list[float]
    second: list[float]
    steps: list[int]
    means: list[float]
    """Of the squares of the gradients that were corrected, as adaptive compensation has it."""
    done: list[Grad] = field(default_factory=list)
    laid: dict[int, list[float]] = field(default_factory=dict)
    """What is laid beside, by what it is of, under the name `laid_as`; no checkpoint has it."""
    laid_as: int = 0
    past: dict[int, list[float]] = field(default_factory=dict)
    """The values, by how many gradients were in them."""
    updates: list[Contributors] = field(default_factory=list)
    rows: Retained = field(default_factory=Retained)
    """Of a table of rows: those that are there, and the candidates."""

    @classmethod
    def fresh(cls, count: int) -> BlockState:
        """Nothing has happened."""
        return cls([0.0] * count, [0.0] * count, [0.0] * count, [0] * count, [0.0] * count)


class Twin:
    """What every block must be, by what is in it.

    Args:
        settings: which clocks have which setting, and what updates were scaled by.
        truth: who sealed what.
    """

    def __init__(self, settings: Settings, truth: Truth) -> None:
        self._settings, self._truth = settings, truth
        self._states: dict[tuple[TableId, int], BlockState] = {}
        self._restored: dict[tuple[TableId, int], BlockState] = {}
        self._last: dict[tuple[TableId, int], tuple[list[Grad], Reading]] = {}
        self.count = 0
        """Of blocks that it has looked at."""
        self.evicted_count = 0
        """Of rows."""
        self.candidate_count = 0
        """Of gradients of rows that were not admitted yet."""

    def check(self, table: Table, block: int, found: Sequence[Grad], read: Reading) -> None:
        """The block was read."""
        expected = self._values(table, block, list(found), read.updates)
        self.count += 1
        is_sum = table.spec.optimizer.kind is OptimizerKind.AGGREGATE
        if is_sum and (not found or found[-1].clock < read.clock):  # nobody had anything for it
            expected = [0.0] * len(expected)
        if not is_sum:
            version = len(self._states[table.table_id, block].updates)
            words = f"block {block} of table {table.table_id} has version {read.version}"
            assert read.version in (None, version), f"VERSION: {words}; expected {version}"
        self._check_same_bits(table, block, list(found), read)
        near, updates = EXACT, len(read.updates)
        if (rounding := ROUNDED.get(storage_of(table))) is not None:
            past = self._states[table.table_id, block].past.values()
            largest = max((abs(number) for numbers in past for number in numbers), default=0.0)
            near += 2 * rounding * (1 + updates) * largest
        for ours, theirs in zip(expected, read.numbers, strict=True):
            assert math.isclose(ours, theirs, rel_tol=EXACT, abs_tol=near), (
                f"SUM: block {block} of table {table.table_id} ({table.spec.optimizer.kind.value}) "
                f"is {read.numbers}; expected {expected}, of {found[-4:]}, by {read.updates[-4:]}"
            )

    def _check_same_bits(self, table: Table, block: int, found: list[Grad], read: Reading) -> None:
        """Whoever has the same updates of a block has the same numbers (S8)."""
        key = table.table_id, block
        known, last = self._last.get(key, (found, read))
        if known == found and last.updates == read.updates:
            if last.numbers == read.numbers:
                return
            raise AssertionError(f"S8: {key} is {read.numbers}, was {last.numbers}")
        self._last[key] = found, read

    def _values(
        self, table: Table, block: int, found: list[Grad], updates: tuple[Contributors, ...]
    ) -> list[float]:
        key = table.table_id, block
        count = len(lengths_of(table, block))
        state = self._states.get(key)
        done = 0 if state is None else len(state.done)
        known = [] if state is None else state.updates
        if state is None or state.done != found[:done] or known != list(updates[: len(known)]):
            state = self._begin(key, count, found)
        for update in self._split(table, found, len(state.done), len(state.updates)):
            if not update.clock:
                grad = gradient_of(update.grads[-1], count)
                state.values = [value or 0.0 for value in grad]
            elif update.grads[0].is_edit:
                _edit(update, state)
            else:
                assert len(updates) > update.index, f"PART: nobody made {update.grads}"
                self._update(table, update, updates, state)
                state.updates.append(updates[update.index])
            state.done += update.grads
            state.past[len(state.done)] = list(state.values)
        self._states[key] = state
        return state.values

    def state(self, table: Table, block: int, found: Sequence[Grad], read: Reading) -> BlockState:
        """The block was read: all that it is. Sums are no part of it."""
        if may_be_read_last(table):
            self.check(table, block, found, read)
        else:
            self._values(table, block, list(found), read.updates)
        saved = deepcopy(self._states[table.table_id, block])
        saved.laid = {}
        return saved

    def restore(self, table_id: TableId, block: int, state: BlockState) -> None:
        """What the block begins with."""
        self._restored[table_id, block] = state

    def _begin(self, key: tuple[TableId, int], count: int, found: list[Grad]) -> BlockState:
        state = self._restored.get(key)
        if state is None:
            return BlockState.fresh(count)
        begun = found[: len(state.done)]
        assert begun == state.done, f"S10: {key} has {begun}; its checkpoint has {state.done}"
        return deepcopy(state)

    def _split(self, table: Table, found: list[Grad], done: int, index: int) -> Sequence[_Update]:
        """The updates after the first `done` gradients: of BSP one a clock, else one a gradient."""
        splits: list[_Update] = []
        for grad in found[done:]:
            is_bsp = self._settings.at(table, grad.clock).mode is Mode.BSP
            if is_bsp and splits and splits[-1].clock == grad.clock:
                splits[-1].grads.append(grad)
                continue
            splits.append(_Update(grad.clock, [grad], index))
            index += grad.clock > 0 and not grad.is_edit
        return splits

    def _update(
        self, table: Table, update: _Update, updates: tuple[Contributors, ...], state: BlockState
    ) -> None:
        settings, clock, count = self._settings, update.clock, len(state.values)
        took_part = updates[update.index]
        setting = settings.at(table, clock)
        self._check_part(table, update, took_part)
        sums: list[float | None] = [None] * count
        for grad in update.grads:
            scale = settings.contribution_scale(table, grad.incarnation, clock)
            if setting.mode is not Mode.BSP:
                scale *= self._own_scale(table, grad, updates[: update.index])
            for at, value in enumerate(gradient_of(grad, count)):
                if value is not None:
                    corrected = _corrected(value * scale, grad, state, at, setting)
                    sums[at] = (sums[at] or 0.0) + corrected
        scale = 1.0 / len(took_part) if table.spec.reduction is Reduction.MEAN else 1.0
        if setting.mode is Mode.BSP:
            scale *= settings.scales.get((table.table_id, clock), 1.0)
        reduced = [None if value is None else value * scale for value in sums]
        key = table.table_id, update.grads[0].incarnation, clock
        numbers = settings.rates.get(key, numbers_of(table, clock))  # eager: not sealed yet
        rows = table.spec.rows
        if rows is not None:
            admitted = state.rows.admitted(rows, reduced)
            self.candidate_count += admitted.count(None) - reduced.count(None)
            reduced = admitted
        _step(table, dict(table.step_hyperparameters.merged(numbers)), reduced, state)
        if rows is not None:
            for at in state.rows.evicted(rows, ids_of(rows, update.grads[0].block)):
                state.values[at] = state.first[at] = state.second[at] = 0.0
                state.steps[at] = 0
                self.evicted_count += 1

    def _check_part(self, table: Table, update: _Update, took_part: Contributors) -> None:
        """PART."""
        words = f"update {update.clock} of table {table.table_id} by {sorted(took_part)}"
        inside = {grad.incarnation for grad in update.grads}
        setting = self._settings.at(table, update.clock)
        if setting.mode is not Mode.BSP:
            assert inside == took_part, f"PART: {words}; expected {inside}"
            return
        sealed = self._truth.took_part[table.table_id, update.clock]
        assert inside <= took_part <= sealed, f"PART: {words}: {inside}, {sealed}"
        if not setting.backup_workers:
            missing = sealed - took_part - self._truth.gone
            assert not missing, f"PART: {words}, without {missing}"

    def _own_scale(self, table: Table, grad: Grad, before: tuple[Contributors, ...]) -> float:
        """What a step that is an update of its own is scaled by."""
        settings = self._settings
        others = sum(1 for workers in before if grad.incarnation not in workers)
        tau = 0 if grad.pulled is None else max(0, others - grad.pulled)
        setting = settings.at(table, grad.clock)
        scale = settings.clip_scale(table, grad.clock)
        if setting.policy is StalePolicy.DAMP:
            scale /= 1 + setting.alpha * tau
        elif setting.policy is StalePolicy.DIVIDE:
            scale /= max(1, tau)
        return scale


def _edit(update: _Update, state: BlockState) -> None:
    """What was changed has its new value, and all else of the block is as it was."""
    (item,) = update.grads  # EDIT
    arrays = {FIRST: state.first, SECOND: state.second, LAID_VALUES: state.values}
    if item.array != VALUES and state.laid_as != item.name:
        state.laid, state.laid_as = {}, item.name
    target = state.values
    if item.array == STEP:
        for array, laid in state.laid.items():
            arrays[array][:] = laid
        state.laid, target = {}, list(map(float, state.steps))
    elif item.array in arrays:
        target = state.laid.setdefault(item.array, list(arrays[item.array]))
    for at, value in enumerate(gradient_of(item, len(state.values))):
        if value is not None:
            target[at] = value
    if item.array == STEP:
        state.steps = list(map(int, target))


def _corrected(value: float, grad: Grad, state: BlockState, at: int, setting: Consistency) -> float:
    """For what has changed since its worker was given the values."""
    if not isinstance(grad, Arrived) or grad.delay is None:
        return value
    given, now = (state.past[count][at] for count in grad.delay)
    strength = setting.strength
    if setting.adaptive:
        state.means[at] = 0.95 * state.means[at] + 0.05 * value * value
        strength /= math.sqrt(state.means[at] + 1e-7)
    return value + strength * value * value * (now - given)


def _step(
    table: Table, numbers: dict[str, float], reduced: list[float | None], state: BlockState
) -> None:
    """One step of the optimizer; sums are the values of the newest clock that has any."""
    kind, values = table.spec.optimizer.kind, state.values
    if kind is OptimizerKind.AGGREGATE:
        state.values = [value or 0.0 for value in reduced]
        return
    for at, value in enumerate(reduced):
        if value is None:
            continue
        match kind:
            case OptimizerKind.ADD:
                values[at] += value
            case OptimizerKind.SGD:
                moved = value
                if numbers["momentum"]:  # else the servers have no buffer, and count nothing
                    if state.steps[at]:  # the first gradient is the buffer
                        moved += numbers["momentum"] * state.first[at]
                    state.first[at], state.steps[at] = moved, 1
                    if table.spec.optimizer.nesterov:
                        moved = value + numbers["momentum"] * moved
                values[at] -= numbers["lr"] * moved
            case OptimizerKind.ADAGRAD:
                state.second[at] += value * value
                values[at] -= numbers["lr"] * value / (math.sqrt(state.second[at]) + numbers["eps"])
            case _:
                beta1, beta2 = numbers["beta1"], numbers["beta2"]
                state.steps[at] += 1
                state.first[at] += (1 - beta1) * (value - state.first[at])
                state.second[at] = beta2 * state.second[at] + (1 - beta2) * value * value
                mean = state.first[at] / (1 - beta1 ** state.steps[at])
                size = math.sqrt(state.second[at] / (1 - beta2 ** state.steps[at]))
                values[at] -= numbers["lr"] * mean / (size + numbers["eps"])
