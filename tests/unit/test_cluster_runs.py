"""Runs of one cluster, at the scheduler's machine (SEMANTICS S19)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ps_core.cluster_view import Role, Session
from ps_core.consistency import parsed
from ps_core.errors import (
    Fenced,
    InvalidConfig,
    TableExists,
    TableNotFound,
    Unauthenticated,
)
from ps_core.runs import MAX_NAME_BYTES, Run, check_identity, check_name, words
from ps_runtime.cluster import wire
from pushpull.v1 import types_pb2
from scheduler.machine import view_size
from scheduler.machine.changes import ChangeRequest, PendingProposal
from scheduler.machine.cluster import Created
from scheduler.machine.membership import KEPT_COUNT
from scheduler.machine.state import NodeLeft
from tests.unit.cluster_harness import SPEC, Harness, refused


class Runs(Harness):
    """A cluster with its two servers, and workers of runs."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.servers = [self.join(Role.SERVER) for _ in range(2)]

    def worker(self, run: str = "", **fields: Any) -> Session:
        return self.join(Role.WORKER, run=run, **fields)

    def table(self, session: Session) -> Created:
        made = self.create(session)
        assert isinstance(made, Created)
        return made

    def end(self, run: str) -> int:
        decision = self.cluster.end_run(self.join(Role.OPERATOR), run)
        self.transitions += decision.transitions
        return decision.reply


def test_a_run_begins_with_rank_0_when_the_one_before_has_ended() -> None:
    cluster = Runs()
    before = [cluster.worker("a") for _ in range(2)]
    for worker in before:
        cluster.leave(worker)
    after = [cluster.worker("b") for _ in range(2)]
    assert [worker.rank for worker in (*before, *after)] == [0, 1, 0, 1]
    assert len({worker.incarnation for worker in (*before, *after)}) == 4


def test_two_runs_have_ranks_and_tables_of_their_own_at_once() -> None:
    cluster = Runs()
    a, b, unnamed = cluster.worker("a"), cluster.worker("b"), cluster.worker()
    tables = [cluster.table(worker).table for worker in (a, b, unnamed)]
    assert [worker.rank for worker in (a, b, unnamed)] == [0, 0, 0]
    assert len({table.table_id for table in tables}) == 3
    assert [table.key for table in tables] == [("a", "model"), ("b", "model"), ("", "model")]
    assert [table.joins for table in tables] == [(), (), ()], "nobody joined what another trains"
    assert cluster.table(cluster.worker("b")).table == tables[1]


def test_a_run_sees_its_own_workers_and_tables_and_all_servers() -> None:
    cluster = Runs()
    a, b, unnamed = cluster.worker("a", world_size=3), cluster.worker("b"), cluster.worker()
    for worker in (a, b, unnamed):
        cluster.table(worker)
    view = cluster.cluster.view
    own = {"a": a, "b": b, "": unnamed}
    for run, worker in own.items():
        seen = view.of_run(run)
        ids = {node.node_id for node in seen.nodes}
        assert ids == {each.node_id for each in (*cluster.servers, worker)}
        assert [table.run for table in seen.tables] == [run]
        assert (seen.ranges, seen.view_number) == (view.ranges, view.view_number)
    assert [view.of_run(run).worker_count for run in ("a", "b", "")] == [3, 2, 2]
    assert wire.view_from_proto(wire.view_to_proto(view)) == view


def test_a_cluster_without_runs_is_what_it_was() -> None:
    cluster = Runs()
    cluster.table(cluster.worker())
    view = cluster.cluster.view
    assert view.of_run("") is view
    message = wire.view_to_proto(view)
    assert not message.runs
    assert not any(node.run for node in message.nodes)
    assert not any(table.run for table in message.tables)


def test_a_run_has_as_many_workers_as_its_first_one_says() -> None:
    cluster = Runs()
    ranks = [cluster.worker("a", world_size=3).rank for _ in range(3)]
    assert ranks == [0, 1, 2]
    refused(
        InvalidConfig,
        "beyond the 3 that run 'a'",
        by=lambda: cluster.worker("a", world_size=3),
        of=cluster,
    )
    refused(
        InvalidConfig,
        "run 'a' was begun for 3",
        by=lambda: cluster.worker("a", world_size=2),
        of=cluster,
    )


def test_one_that_is_gone_is_replaced_in_its_run_alone() -> None:
    cluster = Runs()
    a = [cluster.worker("a") for _ in range(2)]
    b = [cluster.worker("b") for _ in range(2)]
    tables = [cluster.table(worker).table for worker in (a[0], b[0])]
    cluster.pass_time(31, *cluster.servers, *a, b[0])
    assert [cluster.node(each).state.value for each in (*a, *b)] == ["alive"] * 3 + ["gone"]
    newest = cluster.worker("b")
    assert newest.rank == 1
    proposed = {t.run: t.proposed for t in cluster.cluster.view.tables}
    assert proposed["a"] is None, "nobody joins the table of another run"
    assert proposed["b"] is not None
    assert proposed["b"].join is not None
    assert proposed["b"].join.incarnation == newest.incarnation
    assert [table.run for table in tables] == ["a", "b"]


def test_a_table_that_comes_after_another_runs_replacement_has_no_join() -> None:
    cluster = Runs()
    b = [cluster.worker("b") for _ in range(2)]
    cluster.pass_time(31, *cluster.servers, b[0])
    cluster.worker("b")
    assert cluster.table(cluster.worker("a")).table.joins == ()
    assert len(cluster.table(b[0]).table.joins) == 1


def test_a_setting_is_changed_in_the_callers_run_alone() -> None:
    cluster = Runs()
    a, b = cluster.worker("a"), cluster.worker("b")
    for worker in (a, b):
        cluster.table(worker)
    wanted = ChangeRequest("model", parsed("asp"), 0, cluster.now_s + 9)
    cluster.cluster.set_consistency(b, wanted, cluster.now_s)
    assert [t.proposed is None for t in cluster.cluster.view.tables] == [True, False]
    other = replace(wanted, table_name="absent")
    refused(
        TableNotFound,
        "run 'b'",
        by=lambda: cluster.cluster.set_consistency(b, other, cluster.now_s),
        of=cluster,
    )


def test_the_same_name_means_another_table_in_another_run() -> None:
    cluster = Runs()
    a, b = cluster.worker("a"), cluster.worker("b")
    cluster.table(a)
    other = replace(SPEC, element_count=77)
    assert isinstance(cluster.create(b, other), Created)
    refused(TableExists, "element_count", by=lambda: cluster.create(a, other), of=cluster)


def test_nobody_joins_a_run_that_is_over() -> None:
    cluster = Runs()
    for worker in [cluster.worker("a") for _ in range(2)]:
        cluster.leave(worker)
    refused(
        InvalidConfig, "run 'a' is over", "another name", by=lambda: cluster.worker("a"), of=cluster
    )
    cluster.join(Role.READER, run="a")
    refused(
        InvalidConfig,
        "no run 'z'",
        "'a'",
        by=lambda: cluster.join(Role.READER, run="z"),
        of=cluster,
    )


def test_a_run_whose_workers_are_all_gone_is_not_over() -> None:
    cluster = Runs()
    for _ in range(2):
        cluster.worker("a")
    cluster.pass_time(31, *cluster.servers)
    assert [cluster.worker("a").rank for _ in range(2)] == [0, 1]


def test_an_operator_ends_a_run_and_no_other() -> None:
    cluster = Runs()
    a, b = [cluster.worker("a") for _ in range(2)], cluster.worker("b")
    cluster.table(a[0])
    assert cluster.end("a") == 2
    assert cluster.end("a") == 0
    refused(Fenced, "'a' was ended", by=lambda: cluster.beat(a[0]), of=cluster)
    cluster.beat(b)
    refused(InvalidConfig, "ended it", by=lambda: cluster.worker("a"), of=cluster)
    refused(InvalidConfig, "no run 'z'", "'a', 'b'", by=lambda: cluster.end("z"), of=cluster)
    assert [t.run for t in cluster.cluster.view.tables] == ["a"], "they can be read"


def test_the_cluster_ends_with_its_runs_where_it_is_told_to() -> None:
    cluster = Runs(stop_when_done=True, worker_count=1)
    a, b = cluster.worker("a"), cluster.worker("b")
    cluster.leave(a)
    assert not cluster.is_finished()
    cluster.leave(b)
    assert cluster.is_finished()


def test_a_run_that_was_ended_is_done_though_not_all_its_workers_came() -> None:
    cluster = Runs(stop_when_done=True)
    cluster.worker("a", world_size=2)
    assert cluster.end("a") == 1
    assert cluster.is_finished()


def test_the_run_without_a_name_counts_once_it_has_had_a_worker() -> None:
    cluster = Runs(stop_when_done=True, worker_count=1)
    unnamed = cluster.worker()
    cluster.leave(cluster.worker("a"))
    assert not cluster.is_finished()
    cluster.leave(unnamed)
    assert cluster.is_finished()


def test_a_checkpoint_needs_no_space_in_the_view_for_tables_of_other_runs() -> None:
    cluster = Runs(worker_count=1, checkpoint_url="file:///tmp/checkpoints")
    cluster.table(cluster.worker())
    cluster.table(cluster.worker("a"))
    settings, state = cluster.cluster.settings, cluster.cluster._state
    state.view_bytes += view_size.free_bytes(settings, state) - view_size.CHANGE_BYTES
    pending = cluster.cluster.begin_checkpoint("wanted", cluster.now_s).reply
    assert (pending.number, view_size.free_bytes(settings, state)) == (1, 0), pending.reason


def test_readers_of_a_run_that_is_removed_leave_once() -> None:
    cluster = Runs()
    cluster.worker("a")
    gone, reader = (cluster.join(Role.READER, run="a") for _ in range(2))
    cluster.leave(gone)
    cluster.end("a")
    removed = cluster.cluster.remove_run(cluster.join(Role.OPERATOR), "a").transitions
    assert [each.node.node_id for each in removed if isinstance(each, NodeLeft)] == [reader.node_id]


def test_workers_of_removed_runs_leave_the_view_but_for_the_newest() -> None:
    cluster = Runs()
    count = KEPT_COUNT + 3
    workers = [cluster.worker("a", world_size=count) for _ in range(count)]
    stays = cluster.worker("b")
    cluster.leave(cluster.worker("b"))
    cluster.end("a")
    before = cluster.cluster.journaled(0.0).state.view_bytes
    cluster.cluster.remove_run(cluster.join(Role.OPERATOR), "a")
    nodes = cluster.cluster.view.nodes_by_id
    assert [worker.node_id in nodes for worker in workers] == [False] * 3 + [True] * KEPT_COUNT
    assert len(cluster.cluster.view.of_run("b").nodes) == 4
    assert cluster.cluster.journaled(0.0).state.view_bytes < before
    for worker in workers:
        removed = "run 'a' was removed by an operator"
        refused(Fenced, removed, by=lambda w=worker: cluster.beat(w), of=cluster)  # type: ignore[misc]
    cluster.start_again()
    assert cluster.cluster.view.nodes_by_id == nodes
    cluster.beat(stays)


def test_values_that_a_server_alone_has_are_of_runs() -> None:
    """A checkpoint has those of the run without a name alone."""
    cluster = Runs(range_count=1)
    for run in ("b", "", "a"):
        cluster.table(cluster.worker(run, **({"world_size": 1} if run else {})))
    (held,) = cluster.cluster.view.ranges
    has, other = sorted(cluster.servers, key=lambda each: each.node_id != held.primary)
    assert cluster.cluster.runs_held_alone(has) == ["", "a", "b"]
    assert cluster.cluster.runs_held_alone(other) == []
    refusal = cluster.cluster.only_in_servers(has, ["a", "b"])
    assert "only copy of values of run 'a', 'b', which no checkpoint covers" in refusal.message
    assert "pushpull runs remove a" in refusal.message
    assert refusal.retry_after_ms


def test_a_restore_is_refused_while_a_run_is_trained() -> None:
    cluster = Runs()
    worker = cluster.worker("a", world_size=1)
    refused(
        InvalidConfig,
        "run 'a' is not over",
        "pushpull runs end a",
        by=cluster.cluster.check_runs_are_over,
        of=cluster,
    )
    cluster.leave(worker)
    cluster.cluster.check_runs_are_over()


def test_a_checkpoint_of_no_table_says_of_which_run_checkpoints_are() -> None:
    cluster = Runs(checkpoint_url="/nowhere")
    cluster.table(cluster.worker("a"))
    pending = cluster.cluster.begin_checkpoint("asked for", cluster.now_s).reply
    said = "the run without a name, of which checkpoints are, has no table yet"
    assert pending == PendingProposal(said)


def test_a_checkpoint_asks_and_cuts_the_run_without_a_name_alone() -> None:
    cluster = Runs(checkpoint_url="/nowhere")
    features = ("checkpoints",)
    a, unnamed = cluster.worker("a", features=features), cluster.worker(features=features)
    for worker in (a, unnamed):
        cluster.table(worker)
    cluster.cluster.begin_checkpoint("asked for", cluster.now_s)
    proposed = {table.run: table.proposed for table in cluster.cluster.view.tables}
    assert proposed["a"] is None
    assert proposed[""] is not None
    assert cluster.cluster.view.of_run("a").checkpoint is None
    assert "rank 0," in cluster.cluster.checkpoints.reason(cluster.now_s)
    assert "run 'a'" not in cluster.cluster.checkpoints.reason(cluster.now_s)


def test_a_scheduler_that_is_started_again_has_the_runs() -> None:
    cluster = Runs()
    a, b = cluster.worker("a", world_size=3), cluster.worker("b")
    for worker in (a, b):
        cluster.table(worker)
    cluster.end("b")
    before = cluster.cluster.view
    cluster.start_again()
    after = cluster.cluster.view
    assert after.runs == before.runs == (Run("a", 3), Run("b", 2, has_ended=True))
    assert after.tables == before.tables
    assert cluster.worker("a").rank == 1
    refused(InvalidConfig, "ended it", by=lambda: cluster.worker("b"), of=cluster)


def test_nobody_joins_anew_when_the_scheduler_is_started_again() -> None:
    cluster = Runs()
    workers = [cluster.worker("a", world_size=3) for _ in range(3)]
    cluster.table(workers[0])
    cluster.start_again()
    cluster.pass_time(1, *cluster.servers, *workers)
    assert cluster.cluster.view.tables[0].proposed is None


def test_a_session_is_good_for_its_own_run_alone() -> None:
    cluster = Runs()
    a = cluster.worker("a")
    cluster.worker("b")
    for run in ("b", ""):
        forged = replace(a, run=run)
        refused(Unauthenticated, "token", by=lambda it=forged: cluster.beat(it), of=cluster)  # type: ignore[misc]


def test_the_view_is_as_large_as_was_reckoned() -> None:
    cluster = Runs()
    name = "n" * 63
    for worker in (cluster.worker(name), cluster.worker("b")):
        cluster.table(worker)
    room = view_size.free_bytes(cluster.cluster.settings, cluster.cluster.journaled(0.0).state)
    size = wire.view_to_proto(cluster.cluster.view).ByteSize()
    assert size <= view_size.MAX_VIEW_BYTES - room
    alone = types_pb2.Node(run=name).ByteSize()
    assert alone <= view_size.of_run_bytes(name)
    assert wire.run_to_proto(Run(name, 2**31 - 1, True)).ByteSize() + 4 <= view_size.run_bytes(
        Run(name, 1)
    )


@pytest.mark.parametrize("identity", ["", "a", "-", "Pod-7.x_1", "a" * 253])
def test_an_identity_is_any_name_of_a_pod_or_a_host(identity: str) -> None:
    check_identity(identity)


@pytest.mark.parametrize("identity", [" ", "a b", "pod/7", "ä", "a\n", "a" * 254])
def test_what_no_pod_and_no_host_is_called_is_no_identity(identity: str) -> None:
    with pytest.raises(InvalidConfig, match=r"identity is .*; expected at most 253 letters"):
        check_identity(identity)


def test_of_a_long_name_the_beginning_is_in_the_refusal() -> None:
    for check in (check_identity, check_name):
        with pytest.raises(InvalidConfig, match=f" is '{'a' * 100}'; expected"):
            check("a" * 300)


def test_a_name_that_is_none_is_refused() -> None:
    for name in ("a b", "-a", "a-", "a/", "n" * 64, "ä", "."):
        with pytest.raises(InvalidConfig, match=r"run is .*at most 63 letters"):
            check_name(name)
    for name in ("", "a", "7", "a.b_c-9", "n" * 63):
        check_name(name)
    cluster = Runs()
    refused(InvalidConfig, "run is", by=lambda: cluster.worker("a b"), of=cluster)
    assert words("a") == "run 'a'"
    assert words("") == "the run without a name"
    assert MAX_NAME_BYTES == 63
