"""Tables in the scheduler's machine: creation, placement, differences, and how large a view is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ps_core import errors, limits
from ps_core.cluster_view import Node, NodeState, Role, Session
from ps_core.consistency import Consistency, Mode
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId
from ps_core.tables.elements import DType, Initializer, InitializerKind
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import RowsSpec, TensorSpec
from ps_runtime.cluster import wire
from scheduler.machine import view_size
from scheduler.machine.cluster import Cluster, Created, Parked
from scheduler.machine.spec_difference import first_difference
from scheduler.machine.state import RangesPlaced, TableCreated
from tests.unit.cluster_harness import SETTINGS, SPEC, Harness, refused

CONSTANT = Initializer(InitializerKind.CONSTANT, 1e300)


@pytest.fixture
def cluster() -> Harness:
    return Harness()


@pytest.fixture
def full() -> tuple[Harness, Session, Session, Session, Session]:
    """A cluster with both servers and both workers."""
    harness = Harness(stop_when_done=True)
    servers = harness.join(Role.SERVER), harness.join(Role.SERVER)
    return (harness, *servers, harness.join(Role.WORKER), harness.join(Role.WORKER))


class TestTables:
    def test_a_table_whose_step_fits_no_ledger_is_refused(self) -> None:
        harness = Harness(server_count=1, worker_count=1, range_count=1)
        harness.join(Role.SERVER)
        worker = harness.join(Role.WORKER)
        most = limits.MAX_RANGE_BLOCK_COUNT
        small = replace(SPEC, element_count=64 * (most + 1), block_elements=64, tensors=())
        refused(
            errors.InvalidConfig,
            f"{most + 1} of them in range 0 of 1; expected at most {most} in a range",
            by=lambda: harness.create(worker, small),
            of=harness,
        )
        fitting = harness.create(worker, replace(small, element_count=64 * most))
        assert isinstance(fitting, Created)

    def test_a_creation_waits_for_the_servers_and_says_for_how_many(self, cluster: Harness) -> None:
        worker = cluster.join(Role.WORKER)
        waits = "table 'model' waits for "
        assert cluster.create(worker) == Parked(waits + "2 more servers (0 of 2 registered)")
        server = cluster.join(Role.SERVER)
        assert cluster.create(worker) == Parked(waits + "1 more server (1 of 2 registered)")
        cluster.pass_time(4, worker)
        parked = cluster.create(worker)
        assert isinstance(parked, Parked)
        assert "(0 of 2 registered; server node 2 at h2:70 (silent, last heard 4.0 s ago))" in (
            parked.reason
        )
        cluster.beat(server)
        cluster.join(Role.SERVER)
        created = cluster.create(worker)
        assert isinstance(created, Created)
        assert created.table.table_id == 1
        assert cluster.cluster.view.tables == (created.table,)

    def test_a_silent_server_does_not_count(self, cluster: Harness) -> None:
        worker, heard = cluster.join(Role.WORKER), cluster.join(Role.SERVER)
        cluster.join(Role.SERVER)
        cluster.pass_time(4, worker, heard)
        assert cluster.create(worker) == Parked(
            "table 'model' waits for 1 more server (1 of 2 registered; server node 3 at h3:70 "
            "(silent, last heard 4.0 s ago))"
        )

    def test_a_creation_places_the_ranges_that_hold_its_blocks_and_only_those(
        self, full: tuple[Harness, Session, Session, Session, Session]
    ) -> None:
        harness, *servers, worker, _ = full
        number = harness.cluster.view.view_number
        created = harness.create(worker)
        assert isinstance(created, Created)
        assert created.view_number == harness.cluster.view.view_number == number + 1
        held = created.table.blocks_by_range(limits.RANGE_COUNT)
        for assignment in harness.cluster.view.ranges:
            placed = assignment.range_id in held
            assert (assignment.primary is not None) == placed
            assert assignment.assignment_epoch == (2 if placed else 1)
        told = [t for t in harness.transitions if isinstance(t, TableCreated | RangesPlaced)]
        assert told == [TableCreated(created.table), RangesPlaced(((NodeId(1), 8), (NodeId(2), 8)))]
        assert {s.node_id for s in servers} == {1, 2}

    def test_the_identical_table_is_found(
        self, full: tuple[Harness, Session, Session, Session, Session]
    ) -> None:
        harness, _, _, one, two = full
        first = harness.create(one)
        view = harness.cluster.view
        spelled_out = replace(SPEC, tensors=(TensorSpec("model", (1_000,), 0),))
        assert harness.create(two, spelled_out) == first
        assert harness.cluster.view == view

    @pytest.mark.parametrize(("server_count", "expected"), [(1, 8), (2, 8), (3, 12)])
    def test_rows_without_a_number_of_partitions_get_one_by_the_servers_once(
        self, server_count: int, expected: int
    ) -> None:
        """Who comes when there are more servers gets the table as it is."""
        harness = Harness(server_count=server_count, worker_count=1)
        worker = harness.join(Role.WORKER)
        for _ in range(server_count):
            harness.join(Role.SERVER)
        rows = replace(SPEC, rows=RowsSpec(), element_count=10, tensors=())
        first = harness.create(worker, rows)
        assert isinstance(first, Created)
        assert first.table.block_count == expected
        for _ in range(9):
            harness.join(Role.SERVER)
        again = harness.create(worker, rows)
        assert isinstance(again, Created)
        assert again.table == first.table
        refused(
            errors.TableExists,
            f"its rows.partition_count is {expected}; got 7",
            by=lambda: harness.create(worker, replace(rows, rows=RowsSpec(7))),
            of=harness,
        )
        other = harness.create(worker, replace(rows, name="later"))
        assert isinstance(other, Created)
        assert other.table.block_count == 4 * (server_count + 9)

    def test_a_found_table_does_not_wait_for_servers(
        self, full: tuple[Harness, Session, Session, Session, Session]
    ) -> None:
        harness, server, _, one, two = full
        first = harness.create(one)
        harness.leave(server)
        found = harness.create(two)
        assert isinstance(first, Created)
        assert isinstance(found, Created)
        assert found.table == first.table

    def test_a_differing_table_is_refused_with_the_first_field_that_differs(
        self, full: tuple[Harness, Session, Session, Session, Session]
    ) -> None:
        harness, _, _, one, two = full
        harness.create(one)
        refused(
            errors.TableExists,
            "table 'model' exists and differs: its consistency is bsp; got asp",
            by=lambda: harness.create(two, replace(SPEC, consistency=Consistency(Mode.ASP))),
            of=harness,
        )

    def test_later_tables_keep_placed_ranges_and_ordinals_count_on(
        self, full: tuple[Harness, Session, Session, Session, Session]
    ) -> None:
        harness, _, _, worker, _ = full
        harness.create(worker)
        before = harness.cluster.view.ranges
        created = harness.create(worker, replace(SPEC, name="second", element_count=64 * 300))
        assert isinstance(created, Created)
        assert (created.table.table_id, created.table.first_ordinal) == (2, 16)
        for old, new in zip(before, harness.cluster.view.ranges, strict=True):
            assert new == old or (
                old.primary is None and new.assignment_epoch == old.assignment_epoch + 1
            )

    def test_a_table_in_a_silent_servers_ranges_waits_for_it(self) -> None:
        harness = Harness(server_count=1)
        first, worker = harness.join(Role.SERVER), harness.join(Role.WORKER)
        whole = replace(SPEC, element_count=64 * 65_536)
        harness.create(worker, whole)
        second = harness.join(Role.SERVER)
        harness.pass_time(4, second, worker)
        parked = harness.create(worker, replace(SPEC, name="second"))
        assert parked == Parked(
            "table 'second' waits for server node 1 at h1:70 (silent, last heard 4.0 s ago), "
            "which has 16 of its ranges"
        )
        harness.leave(first)
        parked = harness.create(worker, replace(SPEC, name="second"))
        assert parked == Parked(
            "table 'second' waits for server node 1 at h1:70 (left), which has 16 of its ranges"
        )

    @pytest.mark.parametrize("role", [Role.SERVER, Role.READER])
    def test_only_workers_create_tables(self, cluster: Harness, role: Role) -> None:
        session = cluster.join(role)
        refused(
            errors.NotPermitted,
            "CreateTable is for workers",
            f"the caller's role is {role.value}",
            by=lambda: cluster.create(session),
            of=cluster,
        )

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"name": ""}, "table name has 0 bytes"),
            ({"element_count": 0}, "element_count is below 1"),
            ({"block_elements": 63}, "block_elements is 63"),
            ({"tensors": (TensorSpec("w", (7,), 0),)}, "its tensors have 7 elements"),
            ({"element_count": 2**60}, "blocks of 64; expected at most 262144"),
            ({"tensors": (TensorSpec("w", (2**63,) * 300, 0),)}, "'w' has 300 dimensions"),
            ({"initializer": CONSTANT}, "its initial value is 1e+300; expected a finite number"),
            (
                {"optimizer": OptimizerSpec(OptimizerKind.ADAM, nesterov=True)},
                "adam has no nesterov",
            ),
            ({"optimizer": OptimizerSpec(OptimizerKind.SGD, amsgrad=True)}, "sgd has no amsgrad"),
            (
                {"optimizer": OptimizerSpec(OptimizerKind.SGD, (("lr", 1e300),))},
                "'lr' is 1e+300; expected a magnitude of at most 1e+18",
            ),
        ],
    )
    def test_a_wrong_specification_is_refused_at_once_even_without_servers(
        self, cluster: Harness, change: dict[str, Any], words: str
    ) -> None:
        worker = cluster.join(Role.WORKER)
        refused(
            errors.InvalidConfig,
            words,
            by=lambda: cluster.create(worker, replace(SPEC, **change)),
            of=cluster,
        )

    @pytest.mark.thorough
    def test_one_table_too_many_is_refused(
        self, full: tuple[Harness, Session, Session, Session, Session]
    ) -> None:
        harness, _, _, worker, _ = full
        small = replace(SPEC, element_count=1, optimizer=OptimizerSpec(OptimizerKind.AGGREGATE))
        for number in range(limits.MAX_TABLE_COUNT):
            created = harness.create(worker, replace(small, name=str(number)))
            assert isinstance(created, Created)
        refused(
            errors.InvalidConfig,
            "table number 10001 of the cluster; it can have 10000",
            by=lambda: harness.create(worker, replace(small, name="last")),
            of=harness,
        )

    def test_nothing_makes_the_view_larger_than_a_message(
        self, full: tuple[Harness, Session, Session, Session, Session]
    ) -> None:
        """CL-5."""
        harness, _, _, worker, _ = full
        inline = Initializer(InitializerKind.INLINE, inline=bytes(750_000))
        large = replace(SPEC, element_count=187_500, initializer=inline)
        for number in range(5):
            harness.create(worker, replace(large, name=f"t{number}"))
        refused(
            errors.InvalidConfig,
            "1 tensors, 750000 bytes of inline values",
            "of the cluster's view",
            by=lambda: harness.create(worker, replace(large, name="t5")),
            of=harness,
        )

        def fill() -> None:
            while True:
                harness.join(Role.READER)

        with pytest.raises(errors.Overloaded, match="the cluster's view may grow by"):
            fill()
        message = wire.view_to_proto(harness.cluster.view)
        assert message.ByteSize() <= limits.FOREIGN_MAX_MESSAGE_BYTES


TENSORS = (TensorSpec("w", (10, 90), 0), TensorSpec("b", (100,), 900))
OTHER_TENSORS = (TensorSpec("w", (90, 10), 0), TensorSpec("b", (100,), 900))


def outer(steps_per_clock: int, fragments: int) -> OptimizerSpec:
    return OptimizerSpec(OptimizerKind.SGD, inner_steps=steps_per_clock, fragment_count=fragments)


@pytest.mark.parametrize(
    ("exists", "came", "difference"),
    [
        ({}, {}, None),
        ({}, {"element_count": 7}, "element_count is 1000; got 7"),
        ({}, {"dtype": DType.FLOAT64}, "dtype is float32; got float64"),
        (
            {},
            {"optimizer": OptimizerSpec(OptimizerKind.ADAM)},
            "optimizer.kind is sgd; got adam",
        ),
        (
            {},
            {"optimizer": OptimizerSpec(OptimizerKind.SGD, (("lr", 0.5),))},
            "optimizer.hyperparameters[1] is ('lr', 0.001); got ('lr', 0.5)",
        ),
        (
            {"optimizer": outer(steps_per_clock=2, fragments=4)},
            {"optimizer": outer(steps_per_clock=4, fragments=2)},
            "optimizer.fragment_count is 4; got 2",
        ),
        (
            {"optimizer": outer(steps_per_clock=2, fragments=4)},
            {"optimizer": outer(steps_per_clock=4, fragments=4)},
            "optimizer.inner_steps is 8; got 16",
        ),
        ({"tensors": TENSORS}, {}, "tensors[0].name is 'w'; got 'model'"),
        ({"tensors": TENSORS}, {"tensors": OTHER_TENSORS}, "tensors[0].shape is (10, 90); got"),
        (
            {"tensors": (TENSORS[0], TensorSpec("c", (100,), 900))},
            {"tensors": TENSORS},
            "tensors[1].name is 'c'; got 'b'",
        ),
        (
            {
                "initializer": Initializer(InitializerKind.CONSTANT, float("nan")),
                "allow_non_finite": True,
            },
            {
                "initializer": Initializer(InitializerKind.CONSTANT, float("nan")),
                "allow_non_finite": True,
            },
            None,
        ),
        (
            {"initializer": Initializer(InitializerKind.INLINE, inline=bytes(4_000))},
            {"initializer": Initializer(InitializerKind.INLINE, inline=bytes(3_999) + b"\1")},
            "initializer.inline has byte 0x00 at 3999; got 0x01",
        ),
    ],
)
def test_differences_are_told_by_their_first_field(
    exists: dict[str, Any], came: dict[str, Any], difference: str | None
) -> None:
    told = first_difference(replace(SPEC, **exists).validated(), replace(SPEC, **came).validated())
    if difference is None:
        assert told is None
    else:
        assert told is not None
        assert difference in told


def test_a_difference_of_many_tensors_stays_short() -> None:
    many = tuple(TensorSpec(f"t{n}", (1,), n) for n in range(1_000))
    told = first_difference(
        replace(SPEC, tensors=many).validated(),
        replace(SPEC, tensors=(*many[:999], TensorSpec("x" * 10_000, (1,), 999))).validated(),
    )
    assert told is not None
    assert told.startswith("tensors[999].name is 't999'; got 'xxx")
    assert len(told) < 300


def test_the_bound_of_a_tables_share_of_the_view_is_above_its_real_share() -> None:
    spec = replace(
        SPEC,
        tensors=tuple(TensorSpec(f"layer.{n}.wéight", (1, 1, 10, 1), n * 10) for n in range(100)),
        optimizer=OptimizerSpec(OptimizerKind.RMSPROP, centered=True, maximize=True),
        initializer=Initializer(InitializerKind.INLINE, inline=bytes(4_000)),
        allow_non_finite=True,
        gate_bytes=2**40,
    ).validated()
    assert wire.spec_to_proto(spec).ByteSize() + 40 <= view_size.table_bytes(spec)


def test_the_bound_of_a_view_without_tables_is_above_its_size() -> None:
    huge = 2**53
    node = Node(
        NodeId(huge), Incarnation(huge), Role.SERVER, 2**32 - 1, "é" * 150, NodeState.GONE, huge
    )
    alone = wire.node_to_proto(replace(node, node_id=NodeId(2**32 - 1)))
    assert alone.ByteSize() + 6 <= view_size.node_bytes(node)
    empty = Cluster(replace(SETTINGS, cluster_id="c" * 40), 0.0).view
    ranges = tuple(
        replace(r, assignment_epoch=AssignmentEpoch(huge), primary=NodeId(2**32 - 1))
        for r in empty.ranges
    )
    message = wire.view_to_proto(replace(empty, ranges=ranges, view_number=huge, finished=True))
    assert message.ByteSize() <= view_size.fixed_bytes("c" * 40, limits.RANGE_COUNT, 1)
    widest = NodeId(2**32 - 1)
    backed = tuple(replace(r, backups=(widest,) * 200, catching_up=(widest,) * 100) for r in ranges)
    message = wire.view_to_proto(replace(empty, ranges=backed, view_number=huge, finished=True))
    assert message.ByteSize() <= view_size.fixed_bytes("c" * 40, limits.RANGE_COUNT, 301)
