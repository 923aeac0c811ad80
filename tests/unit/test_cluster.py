"""The scheduler's machine, event by event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ps_core import errors, limits
from ps_core.cluster_view import Node, NodeState, Role, Session
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId
from ps_core.tables import (
    DType,
    Initializer,
    InitializerKind,
    Mode,
    OptimizerKind,
    OptimizerSpec,
    TableSpec,
    TensorSpec,
)
from ps_runtime import wire
from scheduler import view_size
from scheduler.cluster import KEPT_READER_COUNT, Cluster, Created, Parked
from scheduler.cluster_state import (
    ClusterFinished,
    ClusterSettings,
    NodeHeardAgain,
    NodeLeft,
    NodeRegistered,
    NodeSilent,
    RangesPlaced,
    Registration,
    TableCreated,
)
from scheduler.spec_difference import first_difference

SETTINGS = ClusterSettings(
    cluster_id="c-1",
    timeline=bytes(range(16)),
    token_key=b"k" * 32,
    first_incarnation=Incarnation(70),
    worker_count=2,
    server_count=2,
)
SPEC = TableSpec(
    name="model",
    dtype=DType.FLOAT32,
    element_count=1_000,
    optimizer=OptimizerSpec(OptimizerKind.SGD),
    block_elements=64,
)


def asking(role: Role, number: int, **fields: Any) -> Registration:
    """A registration whose id is made from `number`."""
    if role is Role.SERVER:
        fields = {"address": f"h{number}:70", "kernel_fingerprint": "torch=2"} | fields
    return Registration(number.to_bytes(16, "big"), role, **fields)


class Harness:
    """A cluster and a hand on its clock."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 100.0
        self.cluster = Cluster(replace(SETTINGS, **settings), self.now_s)
        self.number = 0
        self.transitions: list[object] = []

    def join(self, role: Role, **fields: Any) -> Session:
        self.number += 1
        decision = self.cluster.register(asking(role, self.number, **fields), self.now_s)
        self.transitions += decision.transitions
        return decision.reply

    def leave(self, session: Session) -> None:
        self.transitions += self.cluster.deregister(session, "done", self.now_s).transitions

    def create(self, session: Session, spec: TableSpec = SPEC) -> Created | Parked:
        decision = self.cluster.create_table(session, spec, self.now_s)
        self.transitions += decision.transitions
        return decision.reply

    def beat(self, *sessions: Session) -> None:
        for session in sessions:
            self.transitions += self.cluster.heartbeat(session, self.now_s).transitions

    def pass_time(self, seconds: float, *heard: Session) -> None:
        """Let time go by in half seconds; the sessions of `heard` beat at each."""
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            self.beat(*heard)
            self.transitions += self.cluster.tick(self.now_s).transitions

    def is_finished(self) -> bool:
        return self.cluster.view.finished

    def servers_have_left(self) -> bool:
        return self.cluster.servers_have_left

    def node(self, session: Session) -> Node:
        return self.cluster.view.nodes_by_id[session.node_id]


@pytest.fixture
def cluster() -> Harness:
    return Harness()


@pytest.fixture
def full() -> tuple[Harness, Session, Session, Session, Session]:
    """A cluster with both servers and both workers."""
    harness = Harness(stop_when_done=True)
    servers = harness.join(Role.SERVER), harness.join(Role.SERVER)
    return (harness, *servers, harness.join(Role.WORKER), harness.join(Role.WORKER))


def refused(
    kind: type[errors.PushpullError], *words: str, by: Callable[[], object], of: Harness
) -> None:
    """`by` must raise `kind` with `words` in its message, and leave the view as it was."""
    before = of.cluster.view
    with pytest.raises(kind) as failure:
        by()
    for word in words:
        assert word in failure.value.message
    assert of.cluster.view == before


class TestRegistration:
    def test_ids_incarnations_and_ranks_count_up(self, cluster: Harness) -> None:
        server, worker = cluster.join(Role.SERVER), cluster.join(Role.WORKER)
        reader, second = cluster.join(Role.READER), cluster.join(Role.WORKER)
        assert [s.node_id for s in (server, worker, reader, second)] == [1, 2, 3, 4]
        assert [s.incarnation for s in (server, worker, reader, second)] == [70, 71, 72, 73]
        assert (worker.rank, second.rank) == (0, 1)
        assert cluster.node(server).address == "h1:70"
        assert cluster.node(worker).address == ""

    def test_the_session_is_signed(self, cluster: Harness) -> None:
        session = cluster.join(Role.WORKER, requested_rank=1)
        assert session.is_genuine(SETTINGS.token_key)
        assert (session.cluster_id, session.timeline) == ("c-1", SETTINGS.timeline)
        assert session.rank == 1

    def test_a_repeated_request_gets_the_first_answer_and_changes_nothing(
        self, cluster: Harness
    ) -> None:
        request = asking(Role.WORKER, 1)
        first = cluster.cluster.register(request, 100.0)
        again = cluster.cluster.register(request, 101.0)
        assert first.reply == again.reply
        assert [type(t) for t in first.transitions] == [NodeRegistered]
        assert again.transitions == ()
        assert len(cluster.cluster.view.nodes) == 1

    def test_a_registration_id_that_comes_for_something_else_is_refused(
        self, cluster: Harness
    ) -> None:
        cluster.join(Role.WORKER)
        refused(
            errors.InvalidConfig,
            "node 1's with role",
            "its own registration_id",
            by=lambda: cluster.cluster.register(asking(Role.READER, 1), 100.0),
            of=cluster,
        )

    def test_a_registration_whose_node_left_is_fenced(self, cluster: Harness) -> None:
        cluster.leave(cluster.join(Role.WORKER))
        refused(
            errors.Fenced,
            "node 1's, which has left",
            by=lambda: cluster.cluster.register(asking(Role.WORKER, 1), 100.0),
            of=cluster,
        )

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"registration_id": b"short"}, ("registration_id has 5 bytes", "expected 16")),
            ({"protocol_version": 2}, ("protocol_version is 2", "speaks 1")),
            ({"protocol_version": 0}, ("protocol_version is 0",)),
            ({"features": ("x",) * 65}, ("features has 65 names",)),
            ({"features": ("x" * 65,)}, ("up to 65 bytes",)),
            ({"requested_rank": 2}, ("requested_rank is 2", "2 workers", "ranks 0 to 1")),
            ({"role": Role.READER, "requested_rank": 0}, ("a reader has no rank",)),
            ({"role": Role.SERVER, "requested_rank": 0}, ("a server has no rank",)),
            ({"address": ""}, ("address is ''", "expected 'host:port'")),
            ({"address": "host"}, ("expected 'host:port'",)),
            ({"address": "host:0"}, ("port from 1 to 65535",)),
            ({"address": "host:65536"}, ("port from 1 to 65535",)),
            ({"address": "host:" + "9" * 5_000}, ("port from 1 to 65535",)),
            ({"address": "a b:70"}, ("expected 'host:port'",)),
            ({"address": "h" * 300 + ":70"}, ("at most 300 bytes",)),
            ({"address": "0.0.0.0:70"}, ("nobody can reach", "--advertise")),
            ({"address": "[::]:70"}, ("nobody can reach",)),
            ({"kernel_fingerprint": ""}, ("kernel_fingerprint has 0 bytes",)),
            ({"kernel_fingerprint": "x" * 1_025}, ("kernel_fingerprint has 1025 bytes",)),
        ],
    )
    def test_a_bad_field_is_named(
        self, cluster: Harness, fields: dict[str, Any], words: tuple[str, ...]
    ) -> None:
        of_servers = {"address", "kernel_fingerprint"} & fields.keys()
        role = fields.get("role", Role.SERVER if of_servers else Role.WORKER)
        request = replace(asking(role, 9), **fields)
        refused(
            errors.InvalidConfig,
            *words,
            by=lambda: cluster.cluster.register(request, 100.0),
            of=cluster,
        )

    def test_another_clusters_node_is_fenced(self, cluster: Harness) -> None:
        refused(
            errors.Fenced,
            "names cluster 'old'",
            "this is cluster 'c-1'",
            "started again",
            by=lambda: cluster.join(Role.WORKER, cluster_id="old"),
            of=cluster,
        )
        assert cluster.join(Role.WORKER, cluster_id="c-1").node_id == 1

    def test_a_taken_rank_names_its_holder(self, cluster: Harness) -> None:
        holder = cluster.join(Role.WORKER, requested_rank=1)
        cluster.pass_time(1)
        refused(
            errors.InvalidConfig,
            "rank 1 is taken by worker node 1 (alive, rank 1, last heard 1.0 s ago)",
            by=lambda: cluster.join(Role.WORKER, requested_rank=1),
            of=cluster,
        )
        cluster.pass_time(4)
        assert cluster.node(holder).state is NodeState.SILENT
        refused(
            errors.InvalidConfig,
            "worker node 1 (silent, rank 1, last heard 5.0 s ago)",
            by=lambda: cluster.join(Role.WORKER, requested_rank=1),
            of=cluster,
        )

    def test_the_rank_of_a_worker_that_left_is_not_given_again(self, cluster: Harness) -> None:
        cluster.leave(cluster.join(Role.WORKER))
        refused(
            errors.InvalidConfig,
            "rank 0 was worker node 1 (left, rank 0)",
            "not given again",
            by=lambda: cluster.join(Role.WORKER, requested_rank=0),
            of=cluster,
        )
        assert cluster.join(Role.WORKER).rank == 1

    def test_a_worker_beyond_the_count_hears_who_has_the_ranks(self, cluster: Harness) -> None:
        cluster.join(Role.WORKER)
        cluster.leave(cluster.join(Role.WORKER))
        refused(
            errors.InvalidConfig,
            "a worker beyond the 2",
            "rank 0 by worker node 1 (alive, rank 0",
            "rank 1 by worker node 2 (left, rank 1)",
            by=lambda: cluster.join(Role.WORKER),
            of=cluster,
        )

    def test_the_list_of_holders_stays_short(self) -> None:
        cluster = Harness(worker_count=20)
        for _ in range(20):
            cluster.join(Role.WORKER)
        with pytest.raises(errors.InvalidConfig, match="and 12 more") as failure:
            cluster.join(Role.WORKER)
        assert failure.value.message.count("by worker node") == 8

    def test_servers_must_have_equal_kernels(self, cluster: Harness) -> None:
        first = cluster.join(Role.SERVER)
        refused(
            errors.InvalidConfig,
            "kernel_fingerprint is 'torch=3'",
            "server node 1 at h1:70",
            "has 'torch=2'",
            by=lambda: cluster.join(Role.SERVER, kernel_fingerprint="torch=3"),
            of=cluster,
        )
        cluster.leave(first)
        assert cluster.join(Role.SERVER, kernel_fingerprint="torch=3").node_id == 2

    def test_two_servers_cannot_live_at_one_address(self, cluster: Harness) -> None:
        cluster.join(Role.SERVER, address="h:70")
        refused(
            errors.InvalidConfig,
            "'h:70', which server node 1 at h:70 (alive, last heard 0.0 s ago) has already",
            by=lambda: cluster.join(Role.SERVER, address="h:70"),
            of=cluster,
        )
        cluster.pass_time(4)
        assert cluster.join(Role.SERVER, address="h:70").node_id == 2

    def test_nobody_joins_a_finished_cluster(
        self, full: tuple[Harness, Session, Session, Session, Session]
    ) -> None:
        harness, _, _, one, two = full
        harness.leave(one)
        harness.leave(two)
        for role in (Role.SERVER, Role.READER):
            refused(
                errors.Draining,
                "the cluster is finished",
                by=lambda role=role: harness.join(role),  # type: ignore[misc]
                of=harness,
            )

    def test_a_full_cluster_is_an_overload(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cluster = Harness()
        monkeypatch.setattr(limits, "MAX_NODE_COUNT", 1)
        cluster.join(Role.READER)
        refused(
            errors.Overloaded,
            "has 1 nodes; it can have 1",
            by=lambda: cluster.join(Role.READER),
            of=cluster,
        )


class TestSessions:
    @pytest.mark.parametrize("call", ["heartbeat", "deregister", "create_table", "member"])
    @pytest.mark.parametrize(
        ("change", "kind", "words"),
        [
            ({"cluster_id": "old"}, errors.Fenced, "of cluster 'old'; this is cluster 'c-1'"),
            ({"timeline": b"t" * 16}, errors.Fenced, "timeline"),
            ({"token": b"x" * 32}, errors.Unauthenticated, "token of node 1 (worker, inc"),
            ({"token": b""}, errors.Unauthenticated, "is missing"),
            ({"rank": 1}, errors.Unauthenticated, "is wrong"),
            ({"node_id": NodeId(2)}, errors.Unauthenticated, "is wrong"),
            ({"incarnation": Incarnation(71)}, errors.Unauthenticated, "is wrong"),
            ({"role": Role.SERVER}, errors.Unauthenticated, "is wrong"),
        ],
    )
    def test_a_session_that_was_not_issued_is_refused(
        self,
        cluster: Harness,
        call: str,
        change: dict[str, Any],
        kind: type[errors.PushpullError],
        words: str,
    ) -> None:
        session = replace(cluster.join(Role.WORKER), **change)
        machine = cluster.cluster
        calls: dict[str, Callable[[], object]] = {
            "heartbeat": lambda: machine.heartbeat(session, 100.0),
            "deregister": lambda: machine.deregister(session, "", 100.0),
            "create_table": lambda: machine.create_table(session, SPEC, 100.0),
            "member": lambda: machine.member(session),
        }
        refused(kind, words, by=calls[call], of=cluster)

    def test_a_node_that_left_is_fenced(self, cluster: Harness) -> None:
        session = cluster.join(Role.WORKER)
        cluster.leave(session)
        refused(errors.Fenced, "node 1 has left", by=lambda: cluster.beat(session), of=cluster)
        refused(errors.Fenced, "node 1 has left", by=lambda: cluster.create(session), of=cluster)

    def test_leaving_twice_is_leaving_once(self, cluster: Harness) -> None:
        session = cluster.join(Role.WORKER)
        cluster.leave(session)
        view = cluster.cluster.view
        cluster.leave(session)
        assert cluster.cluster.view == view
        assert [t.reason for t in cluster.transitions if isinstance(t, NodeLeft)] == ["done"]


class TestSilence:
    def test_a_node_falls_silent_is_heard_again_and_each_is_told_once(
        self, cluster: Harness
    ) -> None:
        quiet, loud = cluster.join(Role.WORKER), cluster.join(Role.WORKER)
        cluster.transitions.clear()
        cluster.pass_time(10, loud)
        assert cluster.node(quiet).state is NodeState.SILENT
        assert cluster.node(loud).state is NodeState.ALIVE
        cluster.beat(quiet)
        assert cluster.node(quiet).state is NodeState.ALIVE
        silent, again = cluster.transitions
        assert isinstance(silent, NodeSilent)
        assert (silent.node.node_id, silent.quiet_s) == (quiet.node_id, 3.5)
        assert again == NodeHeardAgain(cluster.node(quiet))

    def test_the_view_number_moves_only_with_the_view(self, cluster: Harness) -> None:
        session = cluster.join(Role.WORKER)
        number = cluster.cluster.view.view_number
        cluster.pass_time(10, session)
        assert cluster.cluster.view.view_number == number
        cluster.pass_time(4)
        assert cluster.cluster.view.view_number == number + 1

    def test_a_silent_reader_is_given_up_in_time_and_a_silent_worker_never(
        self, cluster: Harness
    ) -> None:
        reader, worker = cluster.join(Role.READER), cluster.join(Role.WORKER)
        cluster.pass_time(59)
        assert cluster.node(reader).state is NodeState.SILENT
        cluster.pass_time(3)
        assert cluster.node(reader).state is NodeState.LEFT
        assert cluster.node(worker).state is NodeState.SILENT
        refused(errors.Fenced, "register again", by=lambda: cluster.beat(reader), of=cluster)

    def test_readers_that_come_and_go_do_not_fill_the_view(self, cluster: Harness) -> None:
        first = cluster.join(Role.READER)
        cluster.leave(first)
        for _ in range(KEPT_READER_COUNT + 5):
            cluster.leave(cluster.join(Role.READER))
        assert len(cluster.cluster.view.nodes) == KEPT_READER_COUNT
        assert first.node_id not in cluster.cluster.view.nodes_by_id
        cluster.leave(first)
        refused(errors.Fenced, "has left", by=lambda: cluster.beat(first), of=cluster)


class TestTables:
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
            assert assignment.epoch == (2 if placed else 1)
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
            "table 'model' exists and differs: its mode is bsp; got asp",
            by=lambda: harness.create(two, replace(SPEC, mode=Mode.ASP)),
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
            assert new == old or (old.primary is None and new.epoch == old.epoch + 1)

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
            f"{role.value} node 1",
            "only workers create tables",
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
            ({"element_count": 2**60}, "blocks of 64; expected at most 4194304"),
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

    def test_one_table_too_many_is_refused(
        self,
        full: tuple[Harness, Session, Session, Session, Session],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        harness, _, _, worker, _ = full
        monkeypatch.setattr(limits, "MAX_TABLE_COUNT", 1)
        harness.create(worker)
        refused(
            errors.InvalidConfig,
            "table number 2 of the cluster; it can have 1",
            by=lambda: harness.create(worker, replace(SPEC, name="second")),
            of=harness,
        )

    def test_no_table_makes_the_view_larger_than_a_message(
        self, full: tuple[Harness, Session, Session, Session, Session]
    ) -> None:
        harness, _, _, worker, _ = full
        inline = Initializer(InitializerKind.INLINE, inline=bytes(800_000))
        large = replace(SPEC, element_count=200_000, initializer=inline)
        for number in range(5):
            harness.create(worker, replace(large, name=f"t{number}"))
        refused(
            errors.InvalidConfig,
            "1 tensors, 800000 bytes of inline values",
            "of the cluster's view",
            by=lambda: harness.create(worker, replace(large, name="t5")),
            of=harness,
        )
        message = wire.view_to_proto(harness.cluster.view)
        assert message.ByteSize() <= limits.FOREIGN_MAX_MESSAGE_BYTES


class TestTheEnd:
    def test_the_cluster_is_finished_when_the_last_worker_has_left(
        self, full: tuple[Harness, Session, Session, Session, Session]
    ) -> None:
        harness, server, other, one, two = full
        harness.leave(two)
        assert not harness.is_finished()
        harness.leave(one)
        assert harness.is_finished()
        assert harness.transitions[-1] == ClusterFinished()
        assert not harness.servers_have_left()
        harness.leave(server)
        harness.leave(other)
        assert harness.servers_have_left()
        assert harness.is_finished()

    def test_workers_that_have_not_come_yet_keep_it_open(self) -> None:
        harness = Harness(stop_when_done=True)
        harness.leave(harness.join(Role.WORKER))
        assert not harness.is_finished()

    def test_a_silent_worker_keeps_it_open(
        self, full: tuple[Harness, Session, Session, Session, Session]
    ) -> None:
        harness, _, _, one, _ = full
        harness.pass_time(10, one)
        harness.leave(one)
        assert not harness.is_finished()

    def test_without_stop_when_done_it_stays_open(self) -> None:
        harness = Harness(worker_count=1)
        harness.leave(harness.join(Role.WORKER))
        assert not harness.is_finished()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cluster_id": ""}, "cluster_id is empty"),
        ({"timeline": b"x"}, "timeline has 1 bytes; expected 16"),
        ({"token_key": b"x"}, "token_key has 1 bytes"),
        ({"first_incarnation": 0}, "first_incarnation is 0"),
        ({"worker_count": 0}, "workers is 0; expected 1 to 5000"),
        ({"server_count": 5_001}, "servers is 5001"),
        ({"heartbeat_interval_s": 2.0}, "heartbeat interval is 2.0 s"),
        ({"heartbeat_interval_s": 0.0}, "expected above 0"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidConfig) as failure:
        replace(SETTINGS, **change)
    assert words in failure.value.message


TENSORS = (TensorSpec("w", (10, 90), 0), TensorSpec("b", (100,), 900))
OTHER_TENSORS = (TensorSpec("w", (90, 10), 0), TensorSpec("b", (100,), 900))


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
        ({"tensors": TENSORS}, {}, "tensors[0].name is 'w'; got 'model'"),
        ({"tensors": TENSORS}, {"tensors": OTHER_TENSORS}, "tensors[0].shape is (10, 90); got"),
        (
            {"tensors": (TENSORS[0], TensorSpec("c", (100,), 900))},
            {"tensors": TENSORS},
            "tensors[1].name is 'c'; got 'b'",
        ),
        (
            {"initializer": Initializer(InitializerKind.CONSTANT, float("nan"))},
            {"initializer": Initializer(InitializerKind.CONSTANT, float("nan"))},
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
        NodeId(huge), Incarnation(huge), Role.SERVER, 2**32 - 1, "é" * 150, NodeState.SILENT
    )
    alone = wire.node_to_proto(replace(node, node_id=NodeId(2**32 - 1)))
    assert alone.ByteSize() + 6 <= view_size.node_bytes(node)
    empty = Cluster(replace(SETTINGS, cluster_id="c" * 40), 0.0).view
    ranges = tuple(
        replace(r, epoch=AssignmentEpoch(huge), primary=NodeId(2**32 - 1)) for r in empty.ranges
    )
    message = wire.view_to_proto(replace(empty, ranges=ranges, view_number=huge, finished=True))
    assert message.ByteSize() <= view_size.fixed_bytes("c" * 40, limits.RANGE_COUNT)
