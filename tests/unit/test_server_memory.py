"""A table that does not fit into its servers' memory is refused; what fits is counted."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ps_core import limits
from ps_core.cluster_view import Role
from ps_core.errors import InvalidConfig
from ps_core.keys import TableId
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.system.capacity import memory_bytes, memory_pool, table_bytes
from scheduler.machine import view_size
from scheduler.machine.cluster import Created
from scheduler.machine.server_memory import needed_by_range
from scheduler.machine.state import ServerMemory
from tests.unit.cluster_harness import SPEC, Harness

MIB = 2**20
BLOCK = 4096
BLOCKS = 64  # 1 MiB of values


def spec(name: str = "model", blocks: int = BLOCKS, **fields: object) -> TableSpec:
    changed = replace(SPEC, name=name, element_count=blocks * BLOCK, block_elements=BLOCK)
    return replace(changed, **fields)  # type: ignore[arg-type]


def with_servers(*memories: ServerMemory, **settings: int) -> Harness:
    cluster = Harness(**{"server_count": len(memories), "range_count": 16, **settings})
    for memory in memories:
        cluster.join(Role.SERVER, memory=memory)
    return cluster


def needed(table_spec: TableSpec) -> int:
    """Of all ranges, held once."""
    table = Table(TableId(1), 0, table_spec.validated())
    return sum(each.total for each in needed_by_range(table, 16).values())


@pytest.mark.parametrize(
    ("optimizer", "tensors"),
    [
        (OptimizerSpec(OptimizerKind.SGD), 0),
        (OptimizerSpec(OptimizerKind.SGD, (("momentum", 0.9),)), 1),
        (OptimizerSpec(OptimizerKind.ADAM), 2),
        (OptimizerSpec(OptimizerKind.ADAM, amsgrad=True), 3),
        (OptimizerSpec(OptimizerKind.RMSPROP, (("momentum", 0.9),), centered=True), 3),
        (OptimizerSpec(OptimizerKind.ADAGRAD), 1),
    ],
)
def test_a_table_takes_its_values_its_state_two_steps_and_its_blocks(
    optimizer: OptimizerSpec, tensors: int
) -> None:
    found = needed(spec(optimizer=optimizer))
    assert found == (3 + tensors) * MIB + BLOCKS * limits.BLOCK_OVERHEAD_BYTES
    small_gate = needed(spec(optimizer=optimizer, gate_bytes=1))
    assert found - 2 * MIB <= small_gate < found - MIB


def test_a_table_that_does_not_fit_is_refused_with_the_figures_and_leaves_nothing() -> None:
    size = needed(spec())
    cluster = with_servers(ServerMemory(2 * size))
    worker = cluster.join(Role.WORKER)
    before = cluster.cluster.view
    huge = replace(SPEC, name="huge", element_count=2**35, block_elements=2**19)
    with pytest.raises(InvalidConfig, match=f"'huge' needs .* may take {2 * size} and 0 of these"):
        cluster.create(worker, huge)
    assert cluster.cluster.view == before
    for name in "ab":
        assert isinstance(cluster.create(worker, spec(name)), Created)
    with pytest.raises(InvalidConfig, match=f"and {2 * size} of these are taken"):
        cluster.create(worker, spec("c"))
    assert isinstance(cluster.create(worker, spec("a")), Created), "it is there"


def test_servers_that_share_a_machine_share_its_memory_and_replicas_count() -> None:
    size = needed(spec())
    shared = ServerMemory(2 * size, "boot/host")
    for memory, replicas, fits in (
        (shared, 2, True),
        (ServerMemory(2 * size - 1, "boot/host"), 2, False),
        (ServerMemory(2 * size - 1), 2, True),
        (ServerMemory(size - 1), 2, False),
        (ServerMemory(), 2, True),  # nothing is said
    ):
        cluster = with_servers(memory, memory, replica_count=replicas)
        worker = cluster.join(Role.WORKER)
        if fits:
            assert isinstance(cluster.create(worker, spec()), Created)
        else:
            with pytest.raises(InvalidConfig, match="more servers, fewer replicas"):
                cluster.create(worker, spec())


def test_all_copies_of_ranges_that_are_placed_anew_count() -> None:
    """Their backups join them: a server that cannot hold them ends as one out of memory."""
    size = needed(spec())
    for memory, fits in ((size, True), (size - 1, False)):
        cluster = with_servers(ServerMemory(size), ServerMemory(size), replica_count=2)
        worker = cluster.join(Role.WORKER, run="a", world_size=1)
        assert isinstance(cluster.create(worker, spec()), Created)
        cluster.leave(worker)
        cluster.cluster.remove_run(cluster.join(Role.OPERATOR), "a")
        for node in cluster.cluster.view.nodes[:2]:
            cluster.leave(cluster.cluster.members.session(node))
        assert all(each.primary is None for each in cluster.cluster.view.ranges)
        for _ in range(2):
            cluster.join(Role.SERVER, memory=ServerMemory(memory))
        worker, before = cluster.join(Role.WORKER), cluster.cluster.view
        if fits:
            assert isinstance(cluster.create(worker, spec()), Created)
            continue
        with pytest.raises(InvalidConfig, match=f"may take {memory} and 0 of these"):
            cluster.create(worker, spec())
        assert cluster.cluster.view == before


def test_what_a_server_held_that_has_died_counts_where_it_is_now() -> None:
    size = needed(spec())
    small, large = ServerMemory(size), ServerMemory(5 * size)
    cluster = with_servers(large, large, replica_count=2)
    worker = cluster.join(Role.WORKER)
    cluster.create(worker, spec("a"))
    new = cluster.join(Role.SERVER, memory=small, address="h9:70")
    ranges = cluster.cluster._state.ranges  # as the new one is when it has joined them
    ranges[:] = [replace(each, backups=(new.node_id,)) for each in ranges]
    with pytest.raises(InvalidConfig, match=f"may take {size} and {size} of these"):
        cluster.create(worker, spec("b"))


def test_a_table_of_more_blocks_than_a_server_can_make_is_refused_with_the_remedy() -> None:
    cluster = with_servers(ServerMemory())
    worker = cluster.join(Role.WORKER)
    most = limits.MAX_TABLE_BLOCK_COUNT
    with pytest.raises(InvalidConfig, match=f"at most {most}: block_elements of 128 or more"):
        cluster.create(worker, replace(SPEC, element_count=64 * most + 1, block_elements=64))


def test_tables_leave_room_in_the_view_for_nodes_that_come_back() -> None:
    cluster = with_servers(ServerMemory())
    worker = cluster.join(Role.WORKER)
    state = cluster.cluster._state
    room = view_size.free_bytes(cluster.cluster.settings, state)
    small = view_size.table_bytes(spec("t").validated())
    state.view_bytes += room - limits.VIEW_RESERVED_BYTES - small
    assert isinstance(cluster.create(worker, spec("t")), Created)
    with pytest.raises(InvalidConfig, match="bytes of the cluster's view"):
        cluster.create(worker, spec("u"))
    for _ in range(100):
        cluster.join(Role.SERVER)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], None]:
    """Writes a file as the kernel would show it."""

    def one(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    return one


@pytest.mark.parametrize(
    ("limit", "pool"),
    [
        (None, "boot"),
        ("max", "boot"),
        ("1024000", "boot"),  # as much as the machine has
        ("500000", f"boot/{os.uname().nodename}"),
    ],
)
def test_containers_share_the_machine_s_memory_unless_they_have_a_limit(
    write: Callable[[str, str], None], tmp_path: Path, limit: str | None, pool: str
) -> None:
    """Each container of a machine has a host name of its own."""
    write("proc/sys/kernel/random/boot_id", "boot\n")
    write("proc/meminfo", "MemTotal:       1000 kB\n")
    write("proc/self/cgroup", "0::/\n")
    if limit is not None:
        write("sys/fs/cgroup/memory.max", f"{limit}\n")
    assert memory_pool(tmp_path) == pool


def test_the_least_of_machine_and_control_groups_counts(
    write: Callable[[str, str], None], tmp_path: Path
) -> None:
    assert memory_bytes(tmp_path) == 0
    write("proc/meminfo", "MemTotal:       1000 kB\nMemFree:  1 kB\n")
    assert memory_bytes(tmp_path) == 1_024_000
    write("proc/self/cgroup", "0::/pods/one\n")
    write("sys/fs/cgroup/pods/one/memory.max", "max\n")
    assert memory_bytes(tmp_path) == 1_024_000
    write("sys/fs/cgroup/pods/memory.max", "500000\n")
    assert memory_bytes(tmp_path) == 500_000
    write("proc/self/cgroup", "9:memory:/docker/x\n8:cpu,cpuacct:/y\n")
    write("sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "9223372036854771712\n")
    assert memory_bytes(tmp_path) == 1_024_000
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "400000\n")
    assert memory_bytes(tmp_path) == 400_000


def test_tables_have_nine_tenths_of_what_the_server_s_process_leaves(
    write: Callable[[str, str], None], tmp_path: Path
) -> None:
    """A container was killed for memory with a table that had been accepted."""
    assert table_bytes(tmp_path) == 0
    write("proc/meminfo", f"MemTotal: {2**30 // 1024} kB\n")
    assert table_bytes(tmp_path) == int(0.9 * 0.75 * 2**30)
    write("proc/self/cgroup", "0::/\n")
    write("sys/fs/cgroup/memory.max", f"{200 * 2**20}\n")
    assert table_bytes(tmp_path) == 1, "0 would mean that nothing is known"
