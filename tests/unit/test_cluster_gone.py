"""Workers that are declared gone, at the scheduler's machine (SEMANTICS S6)."""

from __future__ import annotations

import contextlib

import pytest

from ps_core import errors
from ps_core.change import Join
from ps_core.cluster_view import NodeState, Role, Session
from scheduler.machine.cluster import Created
from scheduler.machine.membership import CUT_OFF_S, KEPT_COUNT
from scheduler.machine.state import (
    ChangeProposed,
    ClusterFinished,
    NodeRegistered,
    NodeSilent,
    WorkerGone,
)
from tests.unit.cluster_harness import SPEC, Harness, asking, refused


@pytest.fixture
def crashed() -> tuple[Harness, Session, Session]:
    """Two workers, of which the second (rank 1) has been silent for a long time."""
    harness = Harness(worker_timeout_s=10.0, stop_when_done=True)
    harness.join(Role.SERVER)
    living, dead = harness.join(Role.WORKER), harness.join(Role.WORKER)
    harness.transitions.clear()
    harness.pass_time(20, living)
    return harness, living, dead


def test_a_worker_is_silent_first_and_gone_when_its_timeout_has_passed() -> None:
    harness = Harness(worker_timeout_s=10.0)
    living, dead = harness.join(Role.WORKER), harness.join(Role.WORKER)
    harness.transitions.clear()
    harness.pass_time(10, living)
    assert harness.node(dead).state is NodeState.SILENT
    harness.pass_time(0.5, living)
    assert harness.node(dead).state is NodeState.GONE
    assert harness.node(living).state is NodeState.ALIVE
    silent, gone = harness.transitions
    assert isinstance(silent, NodeSilent)
    assert gone == WorkerGone(harness.node(dead))
    assert harness.node(dead).gone_words == "worker 1 was declared gone after 10.5 s of silence"


def test_it_is_declared_gone_once_and_the_view_moves_once(
    crashed: tuple[Harness, Session, Session],
) -> None:
    harness, living, _ = crashed
    number = harness.cluster.view.view_number
    harness.transitions.clear()
    harness.pass_time(30, living)
    assert harness.transitions == []
    assert harness.cluster.view.view_number == number


def test_no_worker_is_gone_while_the_scheduler_itself_is_cut_off() -> None:
    """All are silent, and train on without it: they were given up, and the run ended."""
    harness = Harness(worker_timeout_s=10.0)
    server = harness.join(Role.SERVER)
    workers = harness.join(Role.WORKER), harness.join(Role.WORKER)
    harness.pass_time(300)
    assert {harness.node(each).state for each in (server, *workers)} == {NodeState.SILENT}
    harness.pass_time(10, server, workers[0])
    assert harness.node(workers[1]).state is NodeState.SILENT
    harness.pass_time(1, server, workers[0])
    assert harness.node(workers[1]).state is NodeState.GONE
    assert harness.node(workers[0]).state is NodeState.ALIVE


def test_workers_are_gone_at_last_though_nobody_is_heard() -> None:
    harness = Harness(worker_timeout_s=10.0)
    harness.join(Role.SERVER)
    worker = harness.join(Role.WORKER)
    harness.pass_time(CUT_OFF_S)
    assert harness.node(worker).state is NodeState.SILENT
    harness.pass_time(5)
    assert harness.node(worker).state is NodeState.GONE


def test_who_wants_to_register_proves_that_the_scheduler_is_reached() -> None:
    """A worker that waits for the rank of a dead one, where all others have died with that."""
    harness = Harness(worker_timeout_s=10.0, worker_count=1)
    harness.join(Role.SERVER)
    dead = harness.join(Role.WORKER)
    harness.pass_time(30)
    for _ in range(12):
        with contextlib.suppress(errors.InvalidConfig):
            harness.join(Role.WORKER, requested_rank=0)
        harness.pass_time(1)
    assert harness.node(dead).state is NodeState.GONE


def test_who_comes_and_goes_while_nobody_is_heard_does_not_put_that_off() -> None:
    """As an evaluator does, or a server that ends at once: dead workers were never given up."""
    harness = Harness(worker_timeout_s=10.0)
    harness.join(Role.SERVER)
    worker = harness.join(Role.WORKER)
    for _ in range(13):
        harness.pass_time(CUT_OFF_S / 12)
        harness.leave(harness.join(Role.READER))
    harness.pass_time(10)
    assert harness.node(worker).state is NodeState.GONE


def test_a_later_cut_has_its_own_time() -> None:
    """All nodes of before are dead, and others are there."""
    harness = Harness(worker_timeout_s=10.0)
    harness.join(Role.SERVER)
    dead = harness.join(Role.WORKER)
    harness.pass_time(CUT_OFF_S / 2)
    server = harness.join(Role.SERVER)
    harness.pass_time(12, server)
    assert harness.node(dead).state is NodeState.GONE
    worker = harness.join(Role.WORKER)
    harness.pass_time(CUT_OFF_S, server, worker)
    harness.pass_time(CUT_OFF_S / 2)
    assert harness.node(worker).state is NodeState.SILENT


def test_a_worker_that_is_heard_in_time_is_not_gone() -> None:
    harness = Harness(worker_timeout_s=10.0)
    worker = harness.join(Role.WORKER)
    harness.pass_time(9.5)
    harness.beat(worker)
    harness.pass_time(9.5)
    assert harness.node(worker).state is NodeState.SILENT


def test_only_workers_are_declared_gone() -> None:
    harness = Harness(worker_timeout_s=10.0)
    server, reader = harness.join(Role.SERVER), harness.join(Role.READER)
    harness.pass_time(30)
    assert harness.node(server).state is NodeState.SILENT
    assert harness.node(reader).state is NodeState.SILENT


def test_its_incarnation_is_fenced_for_good(crashed: tuple[Harness, Session, Session]) -> None:
    harness, _, dead = crashed
    told = ("worker 1 was declared gone after 10.5 s", "register again", "worker_timeout_s")
    for _ in range(2):
        for call in (
            lambda: harness.beat(dead),
            lambda: harness.create(dead, SPEC),
            lambda: harness.cluster.register(asking(Role.WORKER, 3), harness.now_s),
        ):
            refused(errors.Fenced, *told, by=call, of=harness)
        harness.pass_time(5)
    harness.transitions.clear()
    harness.leave(dead)
    assert harness.transitions == []
    assert harness.node(dead).state is NodeState.GONE


def test_its_rank_is_given_again_once(crashed: tuple[Harness, Session, Session]) -> None:
    harness, living, dead = crashed
    successor = harness.join(Role.WORKER)
    assert successor.rank == dead.rank
    assert successor.incarnation > dead.incarnation
    assert harness.node(dead).state is NodeState.GONE
    refused(
        errors.InvalidConfig,
        f"rank {dead.rank} is taken by worker node {successor.node_id}",
        by=lambda: harness.join(Role.WORKER, requested_rank=dead.rank),
        of=harness,
    )
    harness.leave(living)
    assert not harness.is_finished(), "the successor is still there"
    harness.leave(successor)
    assert harness.is_finished()


def test_a_job_of_fewer_workers_is_taken_once_one_is_gone(
    crashed: tuple[Harness, Session, Session],
) -> None:
    harness, _, lost = crashed
    again = harness.join(Role.WORKER, world_size=1)
    assert again.rank == lost.rank


def test_the_run_ends_when_the_others_have_left(crashed: tuple[Harness, Session, Session]) -> None:
    harness, living, _ = crashed
    assert not harness.is_finished()
    harness.leave(living)
    assert harness.is_finished()


def test_the_run_ends_with_the_last_crash_too() -> None:
    harness = Harness(worker_timeout_s=10.0, stop_when_done=True)
    first, second = harness.join(Role.WORKER), harness.join(Role.WORKER)
    harness.leave(first)
    harness.pass_time(20)
    assert harness.node(second).state is NodeState.GONE
    assert harness.is_finished()
    assert isinstance(harness.transitions[-1], ClusterFinished)


def test_a_scheduler_that_was_paused_gives_a_silent_worker_its_whole_time_again() -> None:
    harness = Harness(worker_timeout_s=10.0)
    worker = harness.join(Role.WORKER)
    harness.pass_time(5)
    assert harness.node(worker).state is NodeState.SILENT
    harness.now_s += 1_000  # its heartbeats of that time may lie unread
    harness.cluster.tick(harness.now_s)
    harness.pass_time(9.5)
    assert harness.node(worker).state is NodeState.SILENT
    harness.pass_time(1)
    assert harness.node(worker).state is NodeState.GONE
    assert harness.node(worker).silence_ms == 10_500


# --- a process that has ended

PROCESS = b"p" * 16


def process_ended(harness: Harness, session: Session, launch_id: bytes = PROCESS) -> int:
    decision = harness.cluster.process_ended(session, launch_id)
    harness.transitions += decision.transitions
    return decision.reply


def test_who_started_a_process_says_that_it_has_ended_and_its_workers_are_gone_at_once() -> None:
    harness = Harness(worker_timeout_s=0.0)
    harness.join(Role.SERVER)
    living, dead = harness.join(Role.WORKER), harness.join(Role.WORKER, launch_id=PROCESS)
    reader = harness.join(Role.READER, launch_id=PROCESS)
    operator = harness.join(Role.OPERATOR)
    number = harness.cluster.view.view_number
    assert process_ended(harness, operator) == 2
    assert harness.cluster.view.view_number == number + 1
    assert harness.node(dead).state is NodeState.GONE
    assert harness.node(reader).state is NodeState.LEFT
    assert harness.node(living).state is NodeState.ALIVE
    words = "worker 1 was declared gone: its process has ended"
    assert harness.node(dead).ended_words == words
    refused(errors.Fenced, words, by=lambda: harness.beat(dead), of=harness)
    assert harness.join(Role.WORKER).rank == dead.rank
    assert process_ended(harness, operator) == 0, "it is told once"


def test_a_process_of_which_nobody_is_left_changes_nothing() -> None:
    harness = Harness()
    worker = harness.join(Role.WORKER, launch_id=PROCESS)
    operator = harness.join(Role.OPERATOR)
    harness.leave(worker)
    number = harness.cluster.view.view_number
    assert process_ended(harness, operator) == 0
    assert process_ended(harness, operator, b"q" * 16) == 0
    assert harness.cluster.view.view_number == number
    assert harness.node(worker).state is NodeState.LEFT


def test_servers_are_not_concerned() -> None:
    harness = Harness()
    server = harness.join(Role.SERVER, launch_id=PROCESS)
    assert process_ended(harness, harness.join(Role.OPERATOR)) == 0
    assert harness.node(server).state is NodeState.ALIVE


@pytest.mark.parametrize("role", [Role.WORKER, Role.READER, Role.SERVER])
def test_it_is_an_operators_to_tell(role: Role) -> None:
    harness = Harness()
    caller = harness.join(role, launch_id=PROCESS)
    refused(
        errors.NotPermitted,
        "an operator's right",
        role.value,
        by=lambda: process_ended(harness, caller),
        of=harness,
    )


def test_a_launch_id_has_its_length_and_is_in_no_refusal() -> None:
    harness = Harness()
    refused(
        errors.InvalidConfig,
        "launch_id has 3 bytes; expected 16",
        by=lambda: harness.join(Role.WORKER, launch_id=b"abc"),
        of=harness,
    )
    operator = harness.join(Role.OPERATOR)
    refused(
        errors.InvalidConfig,
        "launch_id has 3 bytes",
        by=lambda: process_ended(harness, operator, b"abc"),
        of=harness,
    )
    assert "launch" not in repr(asking(Role.WORKER, 9, launch_id=PROCESS))


class TestUnfinished:
    """A worker says that it ends in the middle of its work."""

    def test_it_is_gone_at_once_and_its_rank_is_free(self) -> None:
        cluster = Harness(worker_count=2)
        first, second = (cluster.join(Role.WORKER) for _ in range(2))
        decision = cluster.cluster.deregister(first, "SIGTERM", cluster.now_s, unfinished=True)
        (gone,) = [each for each in decision.transitions if isinstance(each, WorkerGone)]
        assert gone.node.state is NodeState.GONE
        assert gone.node.gone_words == "worker 0 was declared gone: its process has ended"
        again = cluster.join(Role.WORKER, requested_rank=0)
        assert again.rank == 0
        assert again.incarnation != first.incarnation
        assert cluster.node(second).state is NodeState.ALIVE

    def test_the_work_is_not_done_for_that(self) -> None:
        """The only worker is moved to another machine: its successor must find the cluster."""
        cluster = Harness(worker_count=1, stop_when_done=True, worker_timeout_s=30.0)
        only = cluster.join(Role.WORKER)
        cluster.cluster.deregister(only, "SIGTERM", cluster.now_s, unfinished=True)
        cluster.pass_time(29.0)
        assert not cluster.is_finished()
        cluster.pass_time(2.0)
        assert cluster.is_finished()

    def test_the_work_is_done_when_its_time_is_over_to_the_second(self) -> None:
        cluster = Harness(worker_count=1, stop_when_done=True, worker_timeout_s=30.0)
        cluster.cluster.deregister(
            cluster.join(Role.WORKER), "SIGTERM", cluster.now_s, unfinished=True
        )
        cluster.pass_time(29.5)
        assert not cluster.is_finished()
        cluster.pass_time(0.5)
        assert cluster.is_finished()

    def test_a_cluster_that_goes_on_without_work_does_not_end_with_its_time(self) -> None:
        cluster = Harness(worker_count=1, worker_timeout_s=30.0)
        cluster.cluster.deregister(
            cluster.join(Role.WORKER), "SIGTERM", cluster.now_s, unfinished=True
        )
        cluster.pass_time(60.0)
        assert not cluster.is_finished()

    def test_without_a_timeout_it_may_be_replaced_at_any_time(self) -> None:
        cluster = Harness(worker_count=1, stop_when_done=True, worker_timeout_s=0.0)
        cluster.cluster.deregister(
            cluster.join(Role.WORKER), "SIGTERM", cluster.now_s, unfinished=True
        )
        cluster.pass_time(600.0)
        assert not cluster.is_finished()
        cluster.leave(cluster.join(Role.WORKER))
        assert cluster.is_finished()

    def test_who_came_in_its_place_ends_the_work(self) -> None:
        cluster = Harness(worker_count=1, stop_when_done=True, worker_timeout_s=30.0)
        cluster.cluster.deregister(
            cluster.join(Role.WORKER), "SIGTERM", cluster.now_s, unfinished=True
        )
        successor = cluster.join(Role.WORKER, requested_rank=0)
        cluster.leave(successor)
        assert cluster.is_finished()

    def test_a_reader_leaves(self) -> None:
        cluster = Harness()
        reader = cluster.join(Role.READER)
        cluster.cluster.deregister(reader, "error", cluster.now_s, unfinished=True)
        assert cluster.node(reader).state is NodeState.LEFT


def test_an_address_of_a_server_that_has_left_is_free() -> None:
    """It does not leave once more."""
    harness = Harness()
    before = harness.join(Role.SERVER, address="h9:70")
    harness.leave(before)
    harness.transitions.clear()
    again = harness.join(Role.SERVER, address="h9:70")
    assert harness.transitions == [NodeRegistered(harness.node(again))]
    assert harness.node(before).state is NodeState.LEFT


# --- a worker that is started again with its identity


def test_who_comes_with_an_identity_has_the_rank_of_the_one_before_which_is_gone_at_once() -> None:
    harness = Harness(worker_timeout_s=0.0)
    harness.join(Role.SERVER)
    dead, living = harness.join(Role.WORKER, identity="pod-0"), harness.join(Role.WORKER)
    harness.transitions.clear()
    number = harness.cluster.view.view_number
    again = harness.join(Role.WORKER, identity="pod-0")
    assert (again.rank, living.rank) == (0, 1)
    assert harness.cluster.view.view_number == number + 1
    assert harness.transitions == [
        WorkerGone(harness.node(dead)), NodeRegistered(harness.node(again))
    ]  # fmt: skip
    assert harness.node(dead).gone_words == "worker 0 was declared gone: its process has ended"
    words = "another process registered with the identity 'pod-0' of this worker"
    refused(errors.Fenced, words, "--identity", by=lambda: harness.beat(dead), of=harness)
    harness.beat(again, living)


def test_one_that_was_gone_already_is_not_declared_gone_again() -> None:
    harness = Harness(worker_timeout_s=10.0)
    dead = harness.join(Role.WORKER, identity="pod-0")
    harness.pass_time(20.0)
    assert harness.node(dead).state is NodeState.GONE
    harness.transitions.clear()
    again = harness.join(Role.WORKER, identity="pod-0")
    assert harness.transitions == [NodeRegistered(harness.node(again))]
    assert again.rank == dead.rank


def test_workers_that_have_left_stay_in_the_view_however_many_they_are() -> None:
    """Their ranks are not given again, unlike those of readers and servers."""
    count = KEPT_COUNT + 2
    harness = Harness(worker_count=count)
    workers = [harness.join(Role.WORKER) for _ in range(count)]
    readers = [harness.join(Role.READER) for _ in range(count)]
    for session in (*workers, *readers):
        harness.leave(session)
    nodes = harness.cluster.view.nodes_by_id
    assert all(worker.node_id in nodes for worker in workers)
    assert [reader.node_id in nodes for reader in readers] == [False] * 2 + [True] * KEPT_COUNT


def test_it_joins_the_tables_where_the_others_are() -> None:
    harness = Harness()
    for _ in range(2):
        harness.join(Role.SERVER)
    harness.join(Role.WORKER, identity="pod-0")
    harness.join(Role.WORKER, identity="pod-1")
    made = harness.create(harness.join(Role.WORKER, identity="pod-0"))
    assert isinstance(made, Created)
    harness.transitions.clear()
    again = harness.join(Role.WORKER, identity="pod-1")
    (proposed,) = [each for each in harness.transitions if isinstance(each, ChangeProposed)]
    assert proposed.change.join == Join(1, again.incarnation)


@pytest.mark.parametrize(
    ("fields", "rank"),
    [
        ({"identity": "pod-0", "requested_rank": 0}, 0),
        ({"identity": "pod-0", "requested_rank": 2}, 2),
        ({"identity": "pod-9"}, 2),
        ({}, 2),
        ({"identity": "pod-0", "run": "other", "world_size": 3}, 0),
    ],
)
def test_nobody_else_is_ended_by_it(fields: dict[str, object], rank: int) -> None:
    harness = Harness(worker_count=3)
    first = harness.join(Role.WORKER, identity="pod-0")
    harness.join(Role.WORKER)
    assert harness.join(Role.WORKER, **fields).rank == rank
    is_meant = fields == {"identity": "pod-0", "requested_rank": 0}
    assert (harness.node(first).state is NodeState.GONE) == is_meant


def test_it_has_its_rank_back_before_the_others_that_are_free() -> None:
    harness = Harness(worker_count=3, worker_timeout_s=10.0)
    harness.join(Role.WORKER, identity="pod-0")
    harness.join(Role.WORKER, identity="pod-1")
    harness.pass_time(20)
    assert harness.join(Role.WORKER, identity="pod-1").rank == 1
    assert harness.join(Role.WORKER).rank == 2
    assert harness.join(Role.WORKER, identity="pod-0").rank == 0


def test_who_has_left_has_no_successor() -> None:
    harness = Harness()
    harness.leave(harness.join(Role.WORKER, identity="pod-0"))
    assert harness.join(Role.WORKER, identity="pod-0").rank == 1
    refused(
        errors.InvalidConfig,
        "every rank is given",
        by=lambda: harness.join(Role.WORKER, identity="pod-3"),
        of=harness,
    )


def test_the_last_worker_that_is_started_again_does_not_end_the_cluster() -> None:
    harness = Harness(stop_when_done=True)
    harness.leave(harness.join(Role.WORKER, identity="pod-0"))
    harness.join(Role.WORKER, identity="pod-1")
    again = harness.join(Role.WORKER, identity="pod-1")
    assert (again.rank, harness.is_finished()) == (1, False)
    harness.leave(again)
    assert harness.is_finished()


def test_a_scheduler_that_was_started_again_knows_identities() -> None:
    harness = Harness()
    dead = harness.join(Role.WORKER, identity="pod-0")
    harness.start_again()
    assert harness.join(Role.WORKER, identity="pod-0").rank == dead.rank
    assert harness.node(dead).state is NodeState.GONE


@pytest.mark.parametrize(
    ("role", "identity", "words"),
    [
        (Role.WORKER, "pod 0", "identity is 'pod 0'; expected at most 253 letters"),
        (Role.WORKER, "x" * 254, "expected at most 253"),
        (Role.READER, "pod-0", "a reader has none"),
        (Role.SERVER, "pod-0", "a server has none"),
    ],
)
def test_what_is_no_identity_is_refused(role: Role, identity: str, words: str) -> None:
    harness = Harness()
    refused(
        errors.InvalidConfig, words, by=lambda: harness.join(role, identity=identity), of=harness
    )


def test_a_registration_that_comes_again_has_its_identity() -> None:
    harness = Harness()
    harness.join(Role.WORKER, identity="pod-0")
    other = asking(Role.WORKER, harness.number, identity="pod-1")
    refused(
        errors.InvalidConfig,
        "with identity 'pod-0'; it came again with 'pod-1'",
        by=lambda: harness.cluster.register(other, harness.now_s),
        of=harness,
    )
    again = asking(Role.WORKER, harness.number, identity="pod-0")
    assert harness.cluster.register(again, harness.now_s).transitions == ()
