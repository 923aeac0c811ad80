"""Files of records on a real disk, with the compiled loops and with the plain ones."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from ps_core.errors import InvalidConfig, TableFull
from ps_core.keys import TableId
from ps_core.sliced_work import at_once
from ps_core.tables.elements import Codec, DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import RowsSpec, TableSpec
from ps_runtime.system import record_disk, record_loops
from ps_runtime.system.record_disk import RecordDisk, RecordFile
from ps_server.rows.row_memory import RowMemory
from ps_server.rows.row_tier import RowTier
from ps_server.values.row_gradients import payload_of
from ps_server.values.row_store import RowStore
from ps_server.values.update_arithmetic import Terms
from tests.deferred_disk import DeferredDisk
from tests.file_limits import no_file_above
from tests.row_audits import audit_store

SIZE = 24
SCATTERED = np.array([0, 1, 2, 7, 9, 10, 40, 1000, 1001, 5000])
"""Ascending, some of them in stretches."""


@pytest.fixture(params=[record_loops, record_disk], ids=["compiled", "plain"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> RecordFile:
    """One that is read and written with these loops."""
    return RecordFile(tmp_path, request.param)


def drawn(count: int) -> record_disk.Records:
    return np.random.default_rng(count).integers(0, 256, (count, SIZE), np.uint8)


def read(file: RecordFile, positions: np.ndarray, count: int) -> record_disk.Records:
    """In the order of the positions; the places are those of a reader that wants them reversed."""
    records = np.zeros((count, SIZE), np.uint8)
    file.read(records, positions, np.arange(count)[::-1].copy())
    return records[::-1]


def test_scattered_records_are_read_as_they_were_written(file: RecordFile, tmp_path: Path) -> None:
    written = drawn(len(SCATTERED))
    file.write(written, SCATTERED)
    order = np.random.default_rng(1).permutation(len(SCATTERED))
    assert np.array_equal(read(file, SCATTERED[order], len(order)), written[order])
    again = drawn(3)
    file.write(again, SCATTERED[[1, 4, 5]])  # in place
    written[[1, 4, 5]] = again
    assert np.array_equal(read(file, SCATTERED, len(SCATTERED)), written)
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_a_read_beyond_the_end_says_how_much_there_was(file: RecordFile) -> None:
    file.write(drawn(2), np.array([3, 4]))
    with pytest.raises(OSError, match=f"read 0 of {SIZE} bytes"):
        read(file, np.array([4, 5]), 2)
    wide = np.zeros((1, 2 * SIZE - 1), np.uint8)
    with pytest.raises(OSError, match="read 26 of 47 bytes"):
        file.read(wide, np.array([2]), np.array([0]))


def test_a_write_to_a_full_disk_raises_what_the_system_says(file: RecordFile) -> None:
    """The records that were written before are read as before."""
    written = drawn(40)
    file.write(written, np.arange(40))
    with no_file_above(1000):
        for positions in (np.array([41]), np.arange(30, 60), np.array([30, 900])):
            with pytest.raises(OSError, match="File too large") as raised:
                file.write(drawn(len(positions)), positions)
            assert raised.value.errno == errno.EFBIG
    assert np.array_equal(read(file, np.arange(30), 30), written[:30])


def test_a_directory_is_made_and_one_that_cannot_be_is_named(tmp_path: Path) -> None:
    RecordDisk(tmp_path / "a" / "b").check()
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_bytes(b"")
    words = f"rows_dir is '{tmp_path}/file/rows', where no file can be made: Not a directory"
    with pytest.raises(InvalidConfig, match=words):
        RecordDisk(tmp_path / "file" / "rows").check()


# --- a server whose disk is full

LENGTH, COUNT, LEAST = 16, 60, 8
LIMIT_BYTES = 4096


def push(store: RowStore, clock: int, ids: list[int]) -> None:
    values = np.ones((len(ids), LENGTH), np.float32)
    part = store.decode(0, Codec.FP32, payload_of(np.array(ids, np.uint64), values), b"")
    store.check_space(part)
    store.accumulate(clock, [(0, part)], 1.0)
    at_once(store.applying(store.take(clock), Terms(clock, (), 1)))


def test_a_full_disk_refuses_new_rows_and_serves_those_that_are_there() -> None:
    """When the disk has space again, new rows are made."""
    disk = DeferredDisk(1)
    memory = RowMemory(LIMIT_BYTES, tier=RowTier(disk, least_frame_count=LEAST))
    spec = TableSpec(
        "rows", DType.FLOAT32, LENGTH, OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0),)),
        rows=RowsSpec(1),
    )  # fmt: skip
    store = RowStore(Table(TableId(1), 0, spec.validated()), (0,), memory)
    for clock in range(1, COUNT + 1):
        push(store, clock, [clock])
    assert store.memory_use.disk_row_count > COUNT // 3
    disk.full_share = 1.0

    def fill() -> None:
        for row_id in range(COUNT + 1, 4 * COUNT):
            push(store, row_id, [row_id])

    with pytest.raises(TableFull, match=r"its disk takes no rows \(\[Errno 28\] No space left"):
        fill()
    made = store.row_count
    clock = made + 2  # that of the refused one is over
    assert COUNT < made < 2 * COUNT
    audit_store(store)
    before = store.rows(0, np.arange(1, made + 1, dtype=np.uint64))
    push(store, clock, list(range(1, made + 1)))
    found = store.rows(0, np.arange(1, made + 2, dtype=np.uint64))
    assert np.array_equal(found[:made], before - 1)
    assert not found[made].any(), "the row that was refused is not there"
    audit_store(store)
    disk.full_share = 0.0
    for _ in range(30):
        memory.measured(store.memory_use)
        clock += 1
        push(store, clock, [1])
    assert memory.tier is not None
    assert memory.tier.failure is None
    push(store, clock + 1, [made + 1])
    assert store.row_count == made + 1
    audit_store(store)
