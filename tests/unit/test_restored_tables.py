"""Tables that a cluster takes over from a checkpoint, as the scheduler's machine makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ps_core.change import Join, TableChange
from ps_core.cluster_view import Role
from ps_core.consistency import Consistency, parsed
from ps_core.errors import InvalidCheckpoint
from ps_core.keys import TableId
from ps_core.tables.elements import DType, Initializer, InitializerKind
from ps_core.tables.optimizers import Kernels, OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Reduction, RowsSpec, TableSpec, TensorSpec
from scheduler.machine import view_size
from scheduler.machine.cluster import Created, Parked
from scheduler.machine.state import Restored, RestoredTable
from scheduler.machine.tables import comparable, restored_as
from tests.unit.cluster_harness import SPEC, Harness, refused

URL = "file:///tmp/checkpoints/00000007-c-1"
ADAM = replace(SPEC, optimizer=OptimizerSpec(OptimizerKind.ADAM)).validated()


def from_checkpoint(
    spec: TableSpec = SPEC, now_is: str = "bsp", clock: int = 41, **settings: int
) -> Harness:
    table = RestoredTable(spec.validated(), parsed(now_is), clock)
    return Harness(restored=Restored(URL, {spec.name: table}), **settings)


def created(cluster: Harness, spec: TableSpec = SPEC) -> Table:
    worker = cluster.join(Role.WORKER)
    made = cluster.create(worker, spec)
    assert isinstance(made, Created)
    return made.table


def with_servers(cluster: Harness) -> Harness:
    for _ in range(2):
        cluster.join(Role.SERVER)
    return cluster


# --- where it goes on


def test_a_table_goes_on_at_the_checkpoints_clock_and_a_new_one_begins() -> None:
    cluster = with_servers(from_checkpoint())
    assert cluster.cluster.view.restored_from == URL
    worker = cluster.join(Role.WORKER)
    restored = cluster.create(worker)
    other = cluster.create(worker, replace(SPEC, name="other"))
    assert isinstance(restored, Created)
    assert isinstance(other, Created)
    assert (restored.table.restored_clock, restored.table.change) == (41, None)
    assert other.table.restored_clock is None
    assert cluster.create(worker) == Created(restored.table, cluster.cluster.view.view_number)


def test_rows_without_a_number_of_partitions_have_the_checkpoints() -> None:
    """Of a table of the same run: one of another run begins with its own."""
    rows = replace(SPEC, rows=RowsSpec(20), element_count=10, tensors=())
    cluster = with_servers(from_checkpoint(rows))
    unnumbered = replace(rows, rows=RowsSpec())
    assert created(cluster, unnumbered).block_count == 20
    of_a_run = cluster.join(Role.WORKER, run="nightly")
    other = cluster.create(of_a_run, unnumbered)
    assert isinstance(other, Created)
    assert other.table.block_count == 8


def test_a_checkpoint_of_clock_zero_is_one_too() -> None:
    assert created(with_servers(from_checkpoint(clock=0))).restored_clock == 0


def table_of(setting: str) -> Table:
    return Table(TableId(1), 0, replace(SPEC, consistency=parsed(setting)).validated())


@pytest.mark.parametrize(
    ("wanted", "saved", "had_come_to", "goes_on_as"),
    [
        ("bsp", "bsp", "bsp", None),
        ("bsp", "bsp", "ssp:3", "ssp:3"),
        ("ssp:2..8", "ssp:2..8", "ssp:2..8@5", "ssp:2..8@5"),
        ("asp", "bsp", "ssp:3", None),  # what its script says now
        ("ssp:3", "bsp", "ssp:3", None),
    ],
)
def test_it_has_the_setting_that_it_had_come_to_have_unless_it_is_created_with_another(
    wanted: str, saved: str, had_come_to: str, goes_on_as: str | None
) -> None:
    spec = replace(SPEC, consistency=parsed(saved)).validated()
    table = restored_as(table_of(wanted), RestoredTable(spec, parsed(had_come_to), 41))
    expected = None if goes_on_as is None else TableChange(1, 41, parsed(goes_on_as))
    assert (table.change, table.restored_clock) == (expected, 41)


def test_what_it_had_come_to_have_takes_its_room_once_however_long_it_waits_for_servers() -> None:
    cluster = from_checkpoint(now_is="ssp:3")
    state, worker = cluster.cluster._state, cluster.join(Role.WORKER)
    before_bytes = state.view_bytes
    for _ in range(3):
        assert isinstance(cluster.create(worker), Parked)
    assert state.view_bytes == before_bytes
    assert not state.change_counts
    servers_bytes = state.view_bytes
    with_servers(cluster)
    servers_bytes = state.view_bytes
    cluster.create(worker)
    needed_bytes = view_size.table_bytes(SPEC.validated()) + view_size.CHANGE_BYTES
    assert state.view_bytes == servers_bytes + needed_bytes
    assert state.change_counts == {1: 1}


def test_who_has_a_rank_beyond_the_first_begins_where_all_do() -> None:
    """At 0 the clock of an SSP or ASP table, its slowest worker's, would go back there."""
    cluster = with_servers(from_checkpoint(worker_count=1, max_workers=2))
    worker, newcomer = (cluster.join(Role.WORKER) for _ in range(2))
    made = cluster.create(worker)
    assert isinstance(made, Created)
    assert made.table.joins == (Join(1, newcomer.incarnation, 41),)


# --- what it must have in common

DIFFERENT: dict[str, Callable[[TableSpec], TableSpec]] = {
    "element_count": lambda s: replace(s, element_count=2_000),
    "block_elements": lambda s: replace(s, block_elements=128),
    "dtype": lambda s: replace(s, dtype=DType.FLOAT64),
    "optimizer": lambda s: replace(s, optimizer=OptimizerSpec(OptimizerKind.ADAM)),
    "tensors": lambda s: replace(s, tensors=(TensorSpec("w", (1_000,), 0),)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_another_table_of_that_name_is_refused(what: str) -> None:
    cluster = with_servers(from_checkpoint())
    worker = cluster.join(Role.WORKER)
    refused(
        InvalidCheckpoint, "'model' is another one in checkpoint", URL, what,
        by=lambda: cluster.create(worker, DIFFERENT[what](SPEC)), of=cluster,
    )  # fmt: skip


ALIKE: dict[str, Callable[[TableSpec], TableSpec]] = {
    "learning rate": lambda s: replace(
        s, optimizer=replace(s.optimizer, hyperparameters=(("lr", 0.5),))
    ),
    "maximize": lambda s: replace(s, optimizer=replace(s.optimizer, maximize=True)),
    "kernels": lambda s: replace(s, optimizer=replace(s.optimizer, kernels=Kernels.EXACT)),
    "consistency": lambda s: replace(s, consistency=parsed("ssp:3")),
    "initial values": lambda s: replace(s, initializer=Initializer(InitializerKind.FROM_RANK_ZERO)),
    "reduction": lambda s: replace(s, reduction=Reduction.SUM),
    "non-finite": lambda s: replace(s, allow_non_finite=True),
    "gate": lambda s: replace(s, gate_bytes=1 << 20),
}


@pytest.mark.parametrize("what", ALIKE)
@pytest.mark.parametrize("saved", [SPEC.validated(), ADAM], ids=["sgd", "adam"])
def test_a_script_may_change_what_does_not_change_the_state(what: str, saved: TableSpec) -> None:
    changed = ALIKE[what](saved).validated()
    assert comparable(changed) == comparable(saved)
    cluster = with_servers(from_checkpoint(saved))
    assert created(cluster, changed).restored_clock == 41


def test_state_that_one_optimizer_has_and_the_other_has_not_is_a_difference() -> None:
    amsgrad = replace(ADAM, optimizer=replace(ADAM.optimizer, amsgrad=True))
    assert comparable(amsgrad) != comparable(ADAM)


def test_what_is_comparable_is_so_whatever_its_consistency_was() -> None:
    assert comparable(SPEC).consistency == Consistency()
