"""The scheduler's machine, event by event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ps_core import errors, limits
from ps_core.cluster_view import NodeState, Role, Session
from ps_core.keys import Incarnation, NodeId
from scheduler.machine.cluster import Cluster
from scheduler.machine.membership import KEPT_COUNT
from scheduler.machine.state import (
    ClusterFinished,
    NodeHeardAgain,
    NodeLeft,
    NodeRegistered,
    NodeSilent,
    Restored,
)
from tests.unit.cluster_harness import SETTINGS, SPEC, Harness, asking, refused


@pytest.fixture
def cluster() -> Harness:
    return Harness()


@pytest.fixture
def full() -> tuple[Harness, Session, Session, Session, Session]:
    """A cluster with both servers and both workers."""
    harness = Harness(stop_when_done=True)
    servers = harness.join(Role.SERVER), harness.join(Role.SERVER)
    return (harness, *servers, harness.join(Role.WORKER), harness.join(Role.WORKER))


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
            ({"world_size": 1}, ("the job has 1 workers", "2 workers", "with --workers 1")),
            ({"world_size": 3}, ("the job has 3 workers", "2 workers", "with --workers 3")),
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
            "restarted",
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
            "begin a run of another name (--run, PUSHPULL_RUN)",
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
        """CL-6."""
        harness, _, _, one, two = full
        harness.leave(one)
        harness.leave(two)
        for role in (Role.SERVER, Role.READER):
            refused(
                errors.InvalidConfig,
                "the cluster is finished",
                by=lambda role=role: harness.join(role),  # type: ignore[misc]
                of=harness,
            )

    @pytest.mark.thorough
    def test_a_full_cluster_is_an_overload(self, cluster: Harness) -> None:
        """Of nodes that are none too many servers, so one may come in the place of another."""
        most = limits.MAX_NODE_COUNT - SETTINGS.server_count - 200
        for _ in range(most):
            cluster.join(Role.READER)
        refused(
            errors.Overloaded,
            f"has {most} workers and readers, with those that have ended",
            "pushpull runs remove NAME",
            by=lambda: cluster.join(Role.READER),
            of=cluster,
        )
        for _ in range(limits.MAX_NODE_COUNT - most):
            cluster.join(Role.SERVER)
        refused(
            errors.Overloaded,
            "has 10000 nodes; it can have 10000",
            by=lambda: cluster.join(Role.SERVER),
            of=cluster,
        )


class TestSessions:
    def test_a_declared_restore_is_told_from_a_scheduler_that_was_started_again(
        self, cluster: Harness
    ) -> None:
        """Only in the first may a server forget what it has."""
        session = cluster.join(Role.SERVER)
        settings = cluster.cluster.in_new_timeline(Restored("runs/1", {}), b"n" * 16, b"k" * 32)
        again = Cluster(settings, 100.0)
        for _ in range(2):  # a restore of what was restored is one of both
            with pytest.raises(errors.Fenced) as refusal:
                again.heartbeat(session, 100.0)
            assert not isinstance(refusal.value, errors.ForeignCluster)
            assert refusal.value.retry_after_ms
            settings = again.in_new_timeline(Restored("runs/2", {}), b"m" * 16, b"k" * 32)
            again = Cluster(settings, 100.0)
        new = Cluster(replace(SETTINGS, timeline=b"n" * 16), 100.0)
        with pytest.raises(errors.ForeignCluster) as refusal:
            new.heartbeat(session, 100.0)
        assert not refusal.value.retry_after_ms

    def test_a_cluster_may_begin_anew_with_nothing(self, cluster: Harness) -> None:
        session = cluster.join(Role.SERVER)
        settings = cluster.cluster.in_new_timeline(Restored("runs/1", {}), b"n" * 16, b"k" * 32)
        settings = Cluster(settings, 100.0).in_new_timeline(None, b"m" * 16, b"k" * 32)
        again = Cluster(settings, 100.0)
        assert again.view.restored_from == ""
        assert not again.view.tables
        assert not again.view.nodes
        with pytest.raises(errors.Fenced) as refusal:
            again.heartbeat(session, 100.0)
        assert refusal.value.retry_after_ms, "a server may forget what it has"

    @pytest.mark.parametrize("call", ["heartbeat", "deregister", "create_table", "member"])
    @pytest.mark.parametrize(
        ("change", "kind", "words"),
        [
            ({"cluster_id": "old"}, errors.ForeignCluster, "of another cluster"),
            ({"timeline": b"t" * 16}, errors.ForeignCluster, "timeline"),
            ({"token": b"x" * 32}, errors.Unauthenticated, "token of node 1 is wrong"),
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
            "member": lambda: machine.caller(session, "WatchCluster"),
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

    def test_a_silent_reader_is_given_up_in_time_and_a_silent_worker_never_if_told_so(self) -> None:
        cluster = Harness(worker_timeout_s=0.0)
        reader, worker = cluster.join(Role.READER), cluster.join(Role.WORKER)
        cluster.pass_time(59)
        assert cluster.node(reader).state is NodeState.SILENT
        cluster.pass_time(3)
        assert cluster.node(reader).state is NodeState.LEFT
        assert cluster.node(worker).state is NodeState.SILENT
        refused(errors.Fenced, "must register again", by=lambda: cluster.beat(reader), of=cluster)

    def test_a_scheduler_that_was_paused_gives_no_reader_up_for_it(self, cluster: Harness) -> None:
        reader = cluster.join(Role.READER)
        cluster.now_s += 1_000
        cluster.cluster.tick(cluster.now_s)
        assert cluster.node(reader).state is NodeState.ALIVE

    def test_readers_that_come_and_go_do_not_fill_the_view(self, cluster: Harness) -> None:
        first = cluster.join(Role.READER)
        cluster.leave(first)
        for _ in range(KEPT_COUNT + 5):
            cluster.leave(cluster.join(Role.READER))
        assert len(cluster.cluster.view.nodes) == KEPT_COUNT
        assert first.node_id not in cluster.cluster.view.nodes_by_id
        cluster.leave(first)
        refused(errors.Fenced, "has left", by=lambda: cluster.beat(first), of=cluster)


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
        ({"worker_timeout_s": 3.0}, "worker timeout is 3.0 s; expected above the lease of 3.0 s"),
        ({"worker_timeout_s": -1.0}, "or 0 for never"),
        ({"worker_timeout_s": float("inf")}, "worker timeout is inf s"),
        ({"worker_timeout_s": float("nan")}, "worker timeout is nan s"),
        ({"adaptation_interval_s": 0.0}, "adaptation interval is 0.0 s; expected above 0"),
        ({"adaptation_interval_s": float("inf")}, "adaptation interval is inf s"),
        ({"adaptation_interval_s": float("nan")}, "adaptation interval is nan s"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidConfig) as failure:
        replace(SETTINGS, **change)
    assert words in failure.value.message
