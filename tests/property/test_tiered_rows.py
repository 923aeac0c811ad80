"""A store whose rows are mostly on disk, against one with all of them in memory (TA-1, TA-2, RS-4,
RF-1).
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_core.keys import TableId
from ps_core.rows import Ids, mixed_ids, partitions_of, salt_of
from ps_core.sliced_work import Work, at_once
from ps_core.tables.elements import Codec, DType, Initializer, InitializerKind
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Eviction, RowsSpec, RowStorage, TableSpec
from ps_server.rows.reserved_memory import FIRST_BYTES
from ps_server.rows.row_arrays import Column
from ps_server.rows.row_file import Records, RowFile
from ps_server.rows.row_index import Moves
from ps_server.rows.row_kernels import Numbers
from ps_server.rows.row_memory import RowMemory
from ps_server.rows.row_tier import RowTier
from ps_server.rows.tiered_arrays import RowsLost, TieredArrays
from ps_server.values.row_gradients import payload_of
from ps_server.values.row_pieces import PartitionSnapshot
from ps_server.values.row_store import RowStore
from ps_server.values.store_copy import IDS as ROW_IDS
from ps_server.values.store_copy import VALUES
from ps_server.values.update_arithmetic import Terms
from tests.deferred_disk import Deferred, DeferredDisk, DeferredFile, FewFrames
from tests.examples import examples
from tests.row_audits import audit, audit_store

LENGTH, PARTITIONS, SEED = 3, 2, 5
ID_COUNT = 40
IDS = st.lists(st.integers(0, ID_COUNT - 1), min_size=1, max_size=14, unique=True)
POLICIES = st.sampled_from(
    [
        RowsSpec(PARTITIONS, SEED),
        RowsSpec(PARTITIONS, SEED, max_row_count=20),
        RowsSpec(PARTITIONS, SEED, max_row_count=24, eviction=Eviction.LFU, admit_after=2),
        RowsSpec(PARTITIONS, SEED, evict_after=3),
        RowsSpec(PARTITIONS, SEED, max_row_count=20, storage=RowStorage.INT8),
        RowsSpec(PARTITIONS, SEED, storage=RowStorage.BFLOAT16),
    ]
)
KINDS = st.sampled_from(
    [OptimizerKind.SGD, OptimizerKind.ROWWISE_ADAGRAD, OptimizerKind.ADAM, OptimizerKind.FTRL]
)


class Push(NamedTuple):
    ids: list[int]


class Pull(NamedTuple):
    ids: list[int]


class Want(NamedTuple):
    ids: list[int]


ACTIONS = st.lists(
    st.one_of(
        st.builds(Push, IDS),
        st.builds(Push, IDS),
        st.builds(Pull, IDS),
        st.builds(Want, IDS),
        st.sampled_from(["listing", "capture", "taking", "copy", "restore", "measured"]),
    ),
    max_size=24,
)


def table_of(rows: RowsSpec, kind: OptimizerKind) -> Table:
    spec = TableSpec(
        "rows",
        DType.FLOAT32,
        LENGTH,
        OptimizerSpec(kind, (("lr", 0.5),)),
        initializer=Initializer(InitializerKind.UNIFORM, scale=1.0),
        rows=rows,
    )
    return Table(TableId(1), 0, spec.validated())


def tiered(table: Table, disk: DeferredDisk) -> RowStore:
    tier = RowTier(disk, least_frame_count=3)
    return RowStore(table, range(PARTITIONS), FewFrames(tier=tier))


def some_steps(work: Work[object], draws: Random) -> None:
    """Do a work as a server does it: it waits for the disk, or finishes at once."""
    if draws.random() < 0.2:
        at_once(work)
        return
    for waiting in work:
        while waiting is not None and not waiting.done():
            pass


class Both:
    """The same actions for two stores."""

    def __init__(self, table: Table, disk: DeferredDisk, seed: int) -> None:
        self.disk, self.draws = disk, Random(seed)
        self.plain = RowStore(table, range(PARTITIONS))
        self.tiered = tiered(table, disk)
        self.clock = 0
        self.captured: list[PartitionSnapshot] = []

    def by_partition(self, ids: list[int]) -> dict[int, Ids]:
        row_ids = np.array(ids, np.uint64)
        places = partitions_of(mixed_ids(row_ids, salt_of(SEED)), PARTITIONS)
        return {block: row_ids[places == block] for block in sorted(set(places.tolist()))}

    def push(self, ids: list[int]) -> None:
        for store in (self.plain, self.tiered):
            for block, own in self.by_partition(ids).items():
                values = np.full((len(own), LENGTH), 1 + self.clock % 3, np.float32)
                payload = payload_of(own, values)
                part = store.decode(block, Codec.FP32, payload, b"")
                store.accumulate(self.clock, [(block, part)], 1.0)
            some_steps(store.applying(store.take(self.clock), Terms(self.clock, (), 1)), self.draws)
        self.clock += 1

    def pull(self, ids: list[int]) -> None:
        for block, own in self.by_partition(ids).items():
            found = [store.rows(block, own).tobytes() for store in (self.plain, self.tiered)]
            assert found[0] == found[1]

    def do(self, action: object) -> None:
        match action:
            case Push(ids):
                self.push(ids)
            case Pull(ids):
                self.pull(ids)
            case Want(ids):
                for block, wanted in self.by_partition(ids).items():
                    self.tiered.want(block, wanted)
            case "listing":
                for block in range(PARTITIONS):
                    found = [
                        at_once(store.listing(block, 1)) for store in (self.plain, self.tiered)
                    ]
                    assert found[0] == found[1]
            case "capture" if not self.captured:
                stores = self.plain, self.tiered
                self.captured = [store.capture(block) for block in (0, 1) for store in stores]
            case "taking" if self.captured:
                plain, own = self.captured[:2]
                block = PARTITIONS - len(self.captured) // 2
                saved = at_once(self.plain.saving_rows(block, plain))
                assert saved == at_once(self.tiered.saving_rows(block, own))
                if plain.is_done:
                    del self.captured[:2]
            case "copy":
                assert self.plain.snapshot() == self.tiered.snapshot()
            case "restore" if not self.captured:
                copy = self.tiered.snapshot()
                for store in (self.plain, self.tiered):
                    some_steps(store.restoring(copy), self.draws)
            case "measured":
                memory = self.tiered.memory
                assert memory.tier is not None
                memory.measured(self.tiered.memory_use)
        audit_store(self.tiered)


@pytest.mark.thorough
@given(st.lists(IDS, max_size=3), ACTIONS, POLICIES, KINDS, st.integers(0, 999), st.booleans())
@settings(max_examples=examples(300))
def test_rows_on_disk_are_as_rows_in_memory(
    before: list[list[int]],
    actions: list[object],
    rows: RowsSpec,
    kind: OptimizerKind,
    seed: int,
    is_full: bool,
) -> None:
    both = Both(table_of(rows, kind), DeferredDisk(seed, 0.3 if is_full else 0.0), seed)
    for ids in before:
        both.push(ids)
    for action in actions:
        both.do(action)
    both.pull(list(range(ID_COUNT)))
    audit_store(both.tiered)


def test_most_rows_go_to_the_disk_and_come_back() -> None:
    disk = DeferredDisk(1)
    both = Both(table_of(RowsSpec(PARTITIONS, SEED), OptimizerKind.ADAM), disk, seed=1)
    for _ in range(3):
        for begin in range(0, ID_COUNT, 5):
            both.push(list(range(begin, begin + 5)))
    assert both.tiered.row_count == ID_COUNT
    assert disk.read_count > ID_COUNT
    assert disk.write_count > ID_COUNT
    assert both.tiered.memory_use.disk_row_count > 0
    both.pull(list(range(ID_COUNT)))  # nobody waits for the disk, so all find frames
    assert both.tiered.memory_use.disk_row_count == 0
    for _ in range(120):
        both.push([0, 1, 2])
    assert both.tiered.memory_use.disk_row_count == ID_COUNT - 2 * 3


def test_rows_that_the_disk_does_not_give_back_are_lost_with_a_word() -> None:
    disk = DeferredDisk(1)
    table = table_of(RowsSpec(PARTITIONS, SEED), OptimizerKind.SGD)
    both = Both(table, disk, seed=1)
    for begin in range(0, ID_COUNT, 4):
        both.push(list(range(begin, begin + 4)))
    disk.fails_reads = True
    told: list[Exception] = []
    assert both.tiered.memory.tier is not None
    both.tiered.memory.tier.on_loss = told.append
    with pytest.raises(RowsLost, match="Input/output error"):
        both.pull(list(range(ID_COUNT)))
    assert isinstance(told[0], RowsLost)


def test_a_pull_touches_no_rows_that_are_being_loaded() -> None:
    """The thread of the load has them. All partitions of a table share a file."""
    disk = DeferredDisk(1)
    table = table_of(RowsSpec(PARTITIONS, SEED), OptimizerKind.SGD)
    both = Both(table, disk, seed=1)
    own = both.by_partition(list(range(40_000)))
    store = both.tiered
    for block, ids in own.items():
        target = store.load(block, 1, (0,))
        for name, array in ((VALUES, np.ones((len(ids), LENGTH), np.float32)), (ROW_IDS, ids)):
            target(name, array.nbytes)[:] = array.tobytes()
    wanted = {block: ids.tobytes() for block, ids in own.items()}
    first, second = own
    store.end_load(first)
    assert store.memory_use.disk_row_count
    assert store.want_all(wanted) == []
    assert disk.read_count == 0
    store.end_load(second)
    assert store.want_all(wanted)
    assert (store.rows(first, own[first]) == 1).all()
    audit_store(store)


class HoldingDisk(DeferredDisk):
    """Operations end at once, but those that began while it `holds`: these end with `let_go`, or
    when somebody waits for them.
    """

    def __init__(self) -> None:
        super().__init__("held")
        self.holds = False
        self._gate = _Gate()

    def submit(self, operation: Callable[[], OSError | None]) -> Deferred:
        return Deferred(self._gate if self.holds else self, operation)

    def ends_now(self) -> bool:
        return True

    def let_go(self) -> None:
        self._gate.is_open = True


class _Gate(DeferredDisk):
    def __init__(self) -> None:
        super().__init__("gate")
        self.is_open = False

    def ends_now(self) -> bool:
        return self.is_open


def test_a_row_that_comes_from_the_disk_late_is_the_newest() -> None:
    """It was read by another one meanwhile, changed, and written elsewhere."""
    disk = HoldingDisk()
    both = Both(table_of(RowsSpec(PARTITIONS, SEED), OptimizerKind.SGD), disk, seed=1)
    for row_id in range(ID_COUNT):
        both.push([row_id])
    disk.holds = True
    both.do(Want([0]))
    disk.holds = False
    both.pull([0])
    both.push([0])
    for row_id in range(1, ID_COUNT):
        both.push([row_id])
    disk.let_go()
    both.pull([0])
    audit_store(both.tiered)


class SlowDisk(DeferredDisk):
    """Operations end when somebody waits for them, or has the test end them."""

    def __init__(self) -> None:
        super().__init__("slow")
        self.begun: list[Deferred] = []

    def submit(self, operation: Callable[[], OSError | None]) -> Deferred:
        self.begun.append(super().submit(operation))
        return self.begun[-1]

    def ends_now(self) -> bool:
        return False


class SetFrames(RowMemory):
    """So many more frames find memory; below 0: so many are too many."""

    fit_count = 0

    def frames_that_fit(self, count: int, frame_bytes: int) -> int:
        del frame_bytes
        return min(count, self.fit_count)


class OneColumn:
    """Rows of a partition, each with its number, on a disk that is slow."""

    COUNT = 128

    def __init__(self, disk: SlowDisk | None = None) -> None:
        self.disk = disk or SlowDisk()
        tier = RowTier(self.disk, least_frame_count=1)
        self.memory = SetFrames(tier=tier)
        columns = {VALUES: Column(1, np.dtype(np.float32))}
        self.arrays = TieredArrays(columns, (), RowFile(self.disk, 4), tier, self.memory)
        self.memory.fit_count = self.COUNT
        at_once(self.arrays.extending(self.COUNT))
        numbers = np.arange(self.COUNT)
        values = numbers[:, None].astype(np.float32)
        self.arrays.put(VALUES, self.arrays.places(numbers), values)

    def make_space(self, fit_count: int) -> None:
        """Write rows, drop them, or give frames back, as it takes for so many more frames."""
        self.memory.fit_count = fit_count
        at_once(self.arrays.fetching(np.empty(0, np.int64)))

    def values(self, count: int) -> list[float]:
        places = self.arrays.places(np.arange(count))
        found: list[float] = self.arrays.get(VALUES, places, count)[:, 0].tolist()
        return found


def test_a_row_whose_frame_an_earlier_write_had_is_not_dropped_before_its_own_has_ended() -> None:
    """The frame's row was evicted, and the last frame was given back, whose row came there."""
    rows = OneColumn()
    arrays, left_count = rows.arrays, rows.COUNT - 1
    rows.make_space(0)  # writes the rows of the first frames
    (first,) = rows.disk.begun
    at_once(arrays.moving(Moves.where(np.arange(rows.COUNT) == 0)))
    rows.make_space(-1)  # gives the last frame back: its row comes into the first one
    audit(arrays)
    others = np.arange(1, left_count)
    arrays.places(others)  # they are in use
    rows.make_space(-8)
    assert len(rows.disk.begun) == 2
    first.result()
    rows.make_space(0)
    arrays.places(others)
    rows.make_space(-16)  # drops rows that the disk has
    assert rows.values(left_count) == [left_count, *range(1, left_count)]
    for write in rows.disk.begun:
        write.result()
    rows.make_space(0)
    assert rows.values(left_count) == [left_count, *range(1, left_count)]
    audit(arrays)


class SmallFile(DeferredFile):
    """A file that the disk has space for, up to `COUNT` records."""

    COUNT = 96

    def write(self, records: Records, positions: Numbers) -> None:
        if int(positions[-1]) >= self.COUNT:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(records, positions)


class SmallDisk(SlowDisk):
    def file(self) -> SmallFile:
        return SmallFile(self)


def test_rows_take_the_space_of_others_on_a_disk_that_is_full() -> None:
    rows = OneColumn(SmallDisk())
    arrays, tier = rows.arrays, rows.memory.tier
    assert tier is not None

    def disk_row_count_after(write_count: int) -> int:
        for _ in range(write_count):
            rows.make_space(-8)
            for write in rows.disk.begun:
                write.result()
        rows.make_space(0)
        return arrays.memory_use(rows.COUNT).disk_row_count

    while tier.failure is None:
        before = disk_row_count_after(1)
    assert SmallFile.COUNT // 2 < before <= SmallFile.COUNT
    changed = np.arange(16)
    arrays.put(VALUES, arrays.places(changed), changed[:, None].astype(np.float32))
    tier.measured(0)  # the disk is tried again
    assert disk_row_count_after(16) >= before, "as many as before have left"
    assert tier.failure is not None, "it has not taken more"
    audit(arrays)
    assert rows.values(rows.COUNT) == list(range(rows.COUNT))


class ManyRows(OneColumn):
    """The places of its rows fill their first slab."""

    COUNT = FIRST_BYTES // 4


def test_rows_that_leave_while_places_move_to_a_larger_slab_are_found() -> None:
    """A push that comes between two steps of an update ends the disk's writes."""
    rows = ManyRows()
    arrays = rows.arrays
    while len(rows.disk.begun) < 2:
        rows.make_space(-rows.COUNT // 16)
        for write in rows.disk.begun:
            write.result()
    assert arrays.memory_use(rows.COUNT).disk_row_count, "of the first write; the other's leave now"
    for waiting in arrays.extending(rows.COUNT + 1):
        arrays.want(np.arange(rows.COUNT))
        if waiting is not None:
            waiting.result()
    audit(arrays)
    assert rows.values(rows.COUNT) == list(range(rows.COUNT))
