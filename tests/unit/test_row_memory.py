"""New rows are refused where a server has no memory for them, and nothing else is."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from ps_core.errors import TableFull
from ps_core.keys import RangeId, TableId
from ps_core.sliced_work import at_once
from ps_core.tables.elements import Codec, DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import RowsSpec, TableSpec
from ps_runtime.system.capacity import available_bytes, memory_bytes
from ps_server.lane.lane_socket import SharedLanes
from ps_server.ranges.events import PushEvent, SealEvent, SealTerms
from ps_server.ranges.range_machine import RangeMachine
from ps_server.ranges.range_state import RangeState
from ps_server.ranges.staging_memory import TableStaging
from ps_server.rows.row_arrays import MemoryUse
from ps_server.rows.row_memory import INDEX_BYTES, RowMemory
from ps_server.rows.row_tier import RowTier
from ps_server.stores import Shards
from ps_server.values.row_gradients import payload_of
from ps_server.values.row_store import RowStore
from ps_server.values.update_arithmetic import Terms
from tests.deferred_disk import DeferredDisk
from tests.row_audits import audit_store, read_rows
from tests.unit.machine_harness import PLACE, Bench
from tests.unit.test_machine_cores import a_system

LENGTH = 16
ROW_BYTES = 4 * (LENGTH + 1) + INDEX_BYTES


def store_of(memory: RowMemory) -> RowStore:
    optimizer = OptimizerSpec(OptimizerKind.ROWWISE_ADAGRAD)
    spec = TableSpec("rows", DType.FLOAT32, LENGTH, optimizer, rows=RowsSpec(1))
    return RowStore(Table(TableId(1), 0, spec.validated()), (0,), memory)


def push(store: RowStore, ids: range) -> None:
    values = np.ones((len(ids), LENGTH), np.float32)
    payload = payload_of(np.array(ids, np.uint64), values)
    part = store.decode(0, Codec.FP32, payload, b"")
    store.check_space(part)
    store.accumulate(1, [(0, part)], 1.0)
    at_once(store.applying(store.take(1), Terms(1, (), 1)))


def push_for_ever(store: RowStore) -> None:
    """Rows that are new, ten in each push."""
    for begin in itertools.count(step=10):
        push(store, range(begin, begin + 10))


def test_a_server_takes_as_many_rows_as_it_may() -> None:
    memory = RowMemory(100 * ROW_BYTES)
    store = store_of(memory)
    push(store, range(60))
    push(store, range(30, 100))  # 40 of them are new
    with pytest.raises(TableFull, match=r"for 1 new rows .* tables take 0 MiB .*\(memory_mb\)"):
        push(store, range(50, 101))
    memory.measured(MemoryUse(120 * ROW_BYTES))  # other tables have grown
    push(store, range(100))  # none is new
    assert store.row_count == 100
    memory.measured(MemoryUse(99 * ROW_BYTES))  # something has left
    push(store, range(100, 101))
    memory.measured(MemoryUse(store.state_bytes))
    assert store.state_bytes <= 101 * ROW_BYTES + 4096
    assert read_rows(store, 0, np.array([500], np.uint64).tobytes()).nbytes == 4 * LENGTH


def test_new_rows_are_taken_again_when_the_disk_has_space_again() -> None:
    """Nobody pulls or pushes the rows that are there: the server tries the disk by itself."""
    disk = DeferredDisk("space again")
    memory = RowMemory(100 * ROW_BYTES, tier=RowTier(disk, least_frame_count=8))
    shards = Shards(SharedLanes(), {}, memory)
    store = store_of(memory)
    shards.stores[TableId(1), RangeId(0)] = store
    shards.look_at_memory()
    disk.full_share = 1.0
    with pytest.raises(TableFull, match=r"its disk takes no rows .*; expected space on"):
        push_for_ever(store)
    new = store.row_count
    for _ in range(5):
        shards.look_at_memory()
        with pytest.raises(TableFull, match="its disk takes no rows"):
            push(store, range(new, new + 10))
    disk.full_share = 0.0
    ids = np.arange(new, dtype=np.uint64).tobytes()
    before = bytes(read_rows(store, 0, ids))
    for _ in range(10):  # its operations end late
        shards.look_at_memory()
    push(store, range(new, new + 10))
    assert store.row_count == new + 10
    assert bytes(read_rows(store, 0, ids)) == before
    audit_store(store)


def test_a_backup_makes_what_its_primary_has_made() -> None:
    primary, backup = store_of(RowMemory()), store_of(RowMemory(10 * ROW_BYTES))
    values = np.ones((50, LENGTH), np.float32)
    payload = payload_of(np.arange(50, dtype=np.uint64), values)
    primary.accumulate(1, [(0, primary.decode(0, Codec.FP32, payload, b""))], 1.0)
    sent = primary.kept_accumulator(1).sent().fixed()
    at_once(backup.applying(at_once(backup.receiving(sent)), Terms(1, (), 1)))
    assert backup.row_count == 50
    at_once(backup.restoring(backup.snapshot()))
    assert backup.row_count == 50


def test_the_machines_memory_is_a_bound_whoever_has_taken_it() -> None:
    machine_bytes = 1000 * ROW_BYTES
    memory = RowMemory(0, machine_bytes)
    store = store_of(memory)
    push(store, range(10))
    memory.measured_left(70 * ROW_BYTES)  # of which 50 are for others
    push(store, range(10, 30))
    with pytest.raises(TableFull, match=r"machine has 0 MiB of memory left"):
        push(store, range(29, 31))
    memory.measured_left(-1)
    push(store, range(29, 31))


def test_what_is_left_is_read_from_the_system(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal:  1000 kB\nMemAvailable:   400 kB\n",
        "sys/fs/cgroup/pod/memory.max": "600000\n",
        "sys/fs/cgroup/pod/memory.current": "500000\n",
        "sys/fs/cgroup/pod/memory.stat": "anon 7\ninactive_file 50000\n",
    }
    root = a_system(tmp_path, "0::/pod\n", files)
    assert available_bytes(root) == 150_000
    assert memory_bytes(root) == 600_000
    (root / "sys/fs/cgroup/pod/memory.current").write_text("700000\n", encoding="ascii")
    assert available_bytes(root) == 0
    (root / "sys/fs/cgroup/pod/memory.max").write_text("max\n", encoding="ascii")
    assert available_bytes(root) == 400 * 1024
    assert available_bytes(tmp_path / "nothing") == -1
    if Path("/proc/meminfo").exists():
        assert 0 < available_bytes() <= memory_bytes()


def test_the_gate_tells_the_rows_of_every_worker_until_the_update_forms() -> None:
    spec = TableSpec("rows", DType.FLOAT32, 4, OptimizerSpec(OptimizerKind.SGD), rows=RowsSpec(1))
    table = Table(TableId(1), 0, spec.validated())
    staging, store = TableStaging(table), RowStore(table, (0,))
    machine = RangeMachine(RangeState(table, RangeId(0), (0,), 3, staging))
    staging.add(machine)
    sizes = []
    for rank in range(3):
        ids = np.arange(10 * rank, 10 * rank + 10, dtype=np.uint64)
        part = store.decode(0, Codec.FP32, payload_of(ids, np.ones((10, 4), np.float32)), b"")
        sender = Bench.sender(rank)
        staging.heard(sender)
        machine.entry(PushEvent(PLACE, sender, 1, 1, 0, part.byte_count, part), 1.0)
        machine.entry(SealEvent(PLACE, sender, 2, SealTerms(1)), 1.0)
        sizes.append(staging.held_bytes // part.byte_count)
    assert sizes[:2] == [1, 2]
