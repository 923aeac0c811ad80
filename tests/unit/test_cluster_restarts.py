"""The scheduler's machine goes on from its journal: nothing twice, nobody judged, nothing open."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any

import pytest

from ps_core.change import ChangeOutcome, Join, TableChange
from ps_core.cluster_view import NodeState, Role, Session
from ps_core.consistency import parsed
from ps_core.errors import InvalidJournal, Recovering
from ps_core.keys import AssignmentEpoch
from ps_core.losses import LossTotals
from ps_core.manifest import Imported, PartReport
from scheduler.journal import records
from scheduler.machine.adaptation import Course, CourseRecord
from scheduler.machine.changes import Withdrawn
from scheduler.machine.checkpoint_state import CheckpointFailed, CheckpointMade, CompleteCheckpoint
from scheduler.machine.checkpoints import LEAVING
from scheduler.machine.cluster import Cluster, Created, Parked
from scheduler.machine.membership import GIVEN_UP_LEASES
from scheduler.machine.state import ChangeProposed, JournaledCluster, NodeSilent, Restored
from tests.unit.cluster_harness import SETTINGS, SPEC, Harness
from tests.unit.test_cluster_changes import MODEL, Changing
from tests.unit.test_cluster_checkpoints import PLACE, Saving

LEASE_S = SETTINGS.lease_s
MADE = "checkpoint_made"


def formed(**settings: Any) -> tuple[Harness, list[Session], list[Session]]:
    """A cluster with a table, its servers and its workers."""
    cluster = Harness(**settings)
    servers = [cluster.join(Role.SERVER) for _ in range(2)]
    workers = [cluster.join(Role.WORKER) for _ in range(2)]
    cluster.create(workers[0])
    return cluster, servers, workers


def states(cluster: Harness) -> list[NodeState]:
    return [node.state for node in cluster.cluster.view.nodes]


def test_sessions_stay_good_and_the_view_is_the_one_of_before() -> None:
    cluster, servers, workers = formed(replica_count=2)
    before = cluster.cluster.view
    cluster.start_again()
    assert cluster.cluster.view == before
    cluster.beat(*servers, *workers)
    assert cluster.cluster.view == before


def test_numbers_are_not_given_again() -> None:
    cluster, _, workers = formed()
    cluster.start_again()
    reader = cluster.join(Role.READER)
    assert reader.node_id == workers[-1].node_id + 1
    assert reader.incarnation == workers[-1].incarnation + 1


def test_a_registration_that_comes_again_finds_its_node() -> None:
    cluster, servers, _ = formed()
    request = cluster.cluster._state.members[servers[0].node_id].registration
    cluster.start_again()
    assert cluster.cluster.register(request, cluster.now_s).reply == servers[0]


def test_members_are_judged_when_a_lease_has_passed_without_a_word() -> None:
    cluster, servers, workers = formed(replica_count=2)
    cluster.start_again()
    cluster.pass_time(LEASE_S, *workers, servers[1])
    assert states(cluster) == [NodeState.ALIVE] * 4
    cluster.pass_time(1.0, *workers, servers[1])
    assert states(cluster) == [NodeState.SILENT, *[NodeState.ALIVE] * 3]
    assert {r.primary for r in cluster.cluster.view.ranges if r.backups} <= {2}


def test_who_was_silent_is_silent_until_heard_and_has_its_whole_silence_again() -> None:
    cluster, servers, workers = formed(worker_timeout_s=20.0)
    cluster.pass_time(15.0, *servers, workers[0])
    assert states(cluster)[-1] is NodeState.SILENT
    cluster.start_again()
    assert states(cluster)[-1] is NodeState.SILENT
    cluster.pass_time(19.0, *servers, workers[0])
    assert states(cluster)[-1] is NodeState.SILENT
    cluster.start_again()
    cluster.beat(workers[1])
    assert states(cluster)[-1] is NodeState.ALIVE
    cluster.start_again()
    cluster.pass_time(21.0, *servers, workers[0])
    assert states(cluster)[-1] is NodeState.GONE


def test_a_silent_reader_is_given_up_as_long_after_the_start_as_ever() -> None:
    cluster, servers, workers = formed()
    cluster.join(Role.READER)
    cluster.pass_time(GIVEN_UP_LEASES * LEASE_S - 1, *servers, *workers)
    cluster.start_again()
    cluster.pass_time(GIVEN_UP_LEASES * LEASE_S - 1, *servers, *workers)
    assert states(cluster)[-1] is NodeState.SILENT
    cluster.pass_time(2, *servers, *workers)
    assert states(cluster)[-1] is NodeState.LEFT


def test_who_waits_for_the_place_of_one_that_was_not_heard_is_told_to_wait() -> None:
    cluster, servers, workers = formed(worker_timeout_s=20.0)
    cluster.start_again()
    for role, more in ((Role.WORKER, {}), (Role.SERVER, {"address": "h1:70"})):
        with pytest.raises(Recovering, match="not heard in the 0"):
            cluster.join(role, waited_s=15.0, **more)
    cluster.pass_time(21.0, *servers, workers[0])
    assert cluster.join(Role.WORKER, waited_s=36.0).rank == workers[1].rank


def test_what_was_not_decided_is_withdrawn_and_its_number_is_not_given_again() -> None:
    cluster = Changing()
    cluster.wanted("ssp:2")
    cluster.promise(0, 1, 5)
    cluster.start_again()
    assert cluster.proposed() is None
    assert isinstance(cluster.outcome(1), Withdrawn)
    cluster.promise(1, 1, 5)  # of before
    assert cluster.proposed() is None
    cluster.wanted("ssp:2")
    cluster.settle(2, 6)
    assert cluster.setting.staleness == 2


def test_what_was_decided_is_settled_by_the_first_range() -> None:
    for outcome in ChangeOutcome:
        cluster = Changing()
        cluster.wanted("ssp:2")
        for server in cluster.servers:
            cluster.cluster.prepare_change(server, MODEL, 1, 5)
        assert cluster.cluster.view.tables[0].proposed.is_decided  # type: ignore[union-attr]
        cluster.start_again()
        cluster.pass_time(100.0, *cluster.servers, *cluster.workers)
        found = cluster.proposed()
        assert found is not None
        assert found.is_decided
        cluster.say(1, outcome)
        assert isinstance(cluster.outcome(1), TableChange) == (outcome is ChangeOutcome.TAKEN)


def test_who_was_to_join_is_proposed_again() -> None:
    cluster, servers, workers = formed(worker_timeout_s=20.0)
    cluster.pass_time(21.0, *servers, workers[0])
    successor = cluster.join(Role.WORKER)
    cluster.start_again()
    (table,) = cluster.cluster.view.tables
    assert table.proposed is None
    cluster.transitions.clear()
    cluster.pass_time(0.5, *servers, workers[0], successor)
    (proposed,) = [t for t in cluster.transitions if isinstance(t, ChangeProposed)]
    assert proposed.change.join is not None
    assert proposed.change.join.incarnation == successor.incarnation
    assert proposed.change.number == 2


def test_a_decided_join_is_taken_though_its_worker_has_ended() -> None:
    """As by the scheduler that decided it."""
    for is_again in (False, True):
        cluster, servers, workers = formed(worker_timeout_s=20.0)
        cluster.pass_time(21.0, *servers, workers[0])
        successor = cluster.join(Role.WORKER)
        for server in servers:
            cluster.cluster.prepare_change(server, MODEL, 1, 5)
        cluster.leave(successor)
        if is_again:
            cluster.start_again()
        cluster.cluster.prepare_change(servers[0], MODEL, 1, 5, ChangeOutcome.TAKEN)
        (table,) = cluster.cluster.view.tables
        assert table.proposed is None
        assert table.joins == (Join(1, successor.incarnation, 5),)


def test_one_that_ended_in_the_middle_may_be_followed_for_as_long_as_was_left() -> None:
    settings = {"worker_timeout_s": 20.0, "stop_when_done": True}
    cluster, servers, workers = formed(**settings)
    cluster.leave(workers[0])
    done = cluster.cluster.deregister(workers[1], "SIGTERM", cluster.now_s, unfinished=True)
    assert done.transitions
    cluster.pass_time(15.0, *servers)
    cluster.start_again()
    cluster.pass_time(4.0, *servers)
    assert not cluster.is_finished()
    cluster.pass_time(2.0, *servers)
    assert cluster.is_finished()
    cluster.start_again()
    assert cluster.is_finished()


def test_one_that_is_told_only_now_to_end_with_its_workers_ends() -> None:
    cluster, servers, workers = formed()
    for worker in workers:
        cluster.leave(worker)
    found = records.read(
        records.Differences().since(cluster.cluster.journaled(cluster.now_s)).encoded()
    )
    assert found is not None
    told = replace(found, settings=replace(found.settings, stop_when_done=True))
    cluster.cluster = Cluster.resumed(told, cluster.now_s).reply
    assert not cluster.is_finished()
    cluster.pass_time(LEASE_S, *servers)
    assert cluster.is_finished()


def test_a_checkpoint_without_its_parts_has_failed_and_holds_nobody() -> None:
    for is_cut in (False, True):
        cluster = Saving()
        if is_cut:
            cluster.cut()
        else:
            cluster.begin()
        cluster.start_again()
        (failed,) = [t for t in cluster.transitions if isinstance(t, CheckpointFailed)]
        assert (failed.number, failed.url[: len(PLACE)]) == (7, PLACE)
        view = cluster.cluster.view
        assert view.checkpoint is None
        assert all(table.proposed is None and table.cut is None for table in view.tables)
        assert "restarted" in (cluster.cluster.checkpoints.problem_of(7) or "")
        assert cluster.begin().number == 8


def test_a_checkpoint_that_lacks_its_manifest_alone_waits_for_who_knows() -> None:
    for problem in ("", "the disk is full"):
        cluster = Saving()
        cluster.cut()
        for server in (0, 1):
            cluster.report(cluster.servers[server], cluster.written(server))
            cluster.report(cluster.workers[server], PartReport(f"worker-{server}", 9, "cd"))
        cluster.start_again()
        cluster.pass_time(1000.0, *cluster.servers, *cluster.workers)
        assert cluster.cluster.view.checkpoint is not None
        cluster.transitions.clear()
        cluster.note(cluster.cluster.end_checkpoint(7, problem))
        kind = CheckpointFailed if problem else CheckpointMade
        assert any(isinstance(t, kind) for t in cluster.transitions)
        assert cluster.begin().number == 8


def test_the_newest_checkpoint_is_kept_and_a_journal_without_it_is_read() -> None:
    cluster = Saving()
    made = CompleteCheckpoint("runs/7/00000007-c", 100, clock=3, complete_s=9.0, count=1)
    cluster.cluster._state.checkpoint_made = made
    cluster.start_again()
    assert cluster.cluster.checkpoints.newest == made
    delta = records.Differences().since(cluster.cluster.journaled(cluster.now_s))
    older = {name: value for name, value in delta.values["cluster"].items() if name != MADE}
    assert len(older) + 1 == len(delta.values["cluster"])
    found = records.read(
        records.JournalDelta({**delta.values, "cluster": older}, delta.removed).encoded()
    )
    assert found is not None
    assert found.state.checkpoint_made is None


def test_what_a_worker_left_behind_is_kept() -> None:
    cluster = Saving()
    part = PartReport("worker-0.part", 10, "ab" * 32)
    cluster.note(cluster.cluster.report_part(cluster.workers[0], LEAVING, part))
    before = cluster.cluster._state.left_parts
    cluster.start_again()
    assert cluster.cluster._state.left_parts == before


def test_nobody_is_silent_for_what_the_scheduler_before_did_not_hear() -> None:
    cluster, _, _ = formed()
    cluster.now_s += 1000.0
    cluster.start_again(now_s=cluster.now_s)
    cluster.transitions.clear()
    cluster.cluster.tick(cluster.now_s)
    assert not [t for t in cluster.transitions if isinstance(t, NodeSilent)]


def test_nobody_is_told_anything_before_the_servers_have_said_which_views_they_act_on() -> None:
    cluster, servers, workers = formed(replica_count=2)
    cluster.cluster.members.check_heard(cluster.now_s)
    cluster.start_again()
    cluster.beat(*workers, servers[0])
    with pytest.raises(Recovering, match=r"which view server node 2 at h2:70 .* acts on"):
        cluster.cluster.members.check_heard(cluster.now_s)
    cluster.beat(servers[1])
    cluster.cluster.members.check_heard(cluster.now_s)


def test_a_server_that_is_not_heard_is_waited_for_as_long_as_a_lease() -> None:
    cluster, servers, workers = formed(replica_count=2)
    cluster.start_again()
    cluster.pass_time(LEASE_S, *workers, servers[0])
    with pytest.raises(Recovering):
        cluster.cluster.members.check_heard(cluster.now_s)
    cluster.cluster.members.check_heard(cluster.now_s + 0.1)


def test_a_server_that_was_silent_is_not_waited_for() -> None:
    cluster, servers, workers = formed(replica_count=2)
    cluster.pass_time(LEASE_S + 1, *workers, servers[0])
    cluster.start_again()
    cluster.beat(servers[0])
    cluster.cluster.members.check_heard(cluster.now_s)


def test_a_server_that_acts_on_a_newer_view_says_that_the_journal_is_an_older_copy() -> None:
    cluster, servers, workers = formed(replica_count=2)
    newer = cluster.cluster.view.view_number + 1
    for each in (*servers, *workers):  # it began the cluster: nobody can have a newer one
        cluster.cluster.heartbeat(each, cluster.now_s, newer)
    cluster.start_again()
    before = cluster.cluster.view
    for each in workers:  # a client in any language
        cluster.cluster.heartbeat(each, cluster.now_s, newer)
    cluster.cluster.heartbeat(servers[0], cluster.now_s, newer - 1)
    for _ in range(2):
        with pytest.raises(InvalidJournal, match=f"has view {newer - 1}, and server node 1 acts"):
            cluster.cluster.heartbeat(servers[0], cluster.now_s, newer)
    assert cluster.cluster.view == before


@pytest.mark.parametrize("role", [Role.SERVER, Role.WORKER, Role.READER])
def test_who_joined_after_the_journal_was_copied_says_so_too(role: Role) -> None:
    cluster, _, workers = formed(max_workers=3)
    copied = records.Differences().since(cluster.cluster.journaled(cluster.now_s)).encoded()
    late = cluster.join(role)
    found = records.read(copied)
    assert found is not None
    cluster.cluster = Cluster.resumed(found, cluster.now_s).reply
    words = f"has given {workers[-1].node_id} node ids, .* {role.value} node {late.node_id} calls"
    with pytest.raises(InvalidJournal, match=words):
        cluster.beat(late)


def test_what_is_remembered_of_bounds_that_move_is_kept() -> None:
    cluster, _, _ = formed()
    (table,) = cluster.cluster.view.tables
    course = Course(quiet_count=1, too_low=3, was_lowered=True, losses=LossTotals(8, 2.5, 1.25, 1))
    courses = {table.table_id: CourseRecord(parsed("ssp:2..8"), course)}
    assert cluster.cluster.keep_courses(courses)
    assert not cluster.cluster.keep_courses(dict(courses))
    cluster.start_again()
    assert cluster.cluster.courses == courses


# --- records


def kept_records(cluster: Harness) -> dict[str, bytes]:
    return records.Differences().since(cluster.cluster.journaled(cluster.now_s)).encoded()


def rewritten(record: bytes, **changed: Any) -> bytes:
    text = json.dumps(json.loads(record[8:]) | changed).encode()
    return b"%08x" % zlib.crc32(text) + text


def without(record: bytes, field: str) -> bytes:
    body = json.loads(record[8:])
    text = json.dumps({name: value for name, value in body.items() if name != field}).encode()
    return b"%08x" % zlib.crc32(text) + text


def test_an_event_writes_what_it_changes() -> None:
    cluster, _, workers = formed()
    differences = records.Differences()
    first = differences.since(cluster.cluster.journaled(cluster.now_s))
    assert first.encoded() == kept_records(cluster)
    cluster.leave(workers[1])
    delta = differences.since(cluster.cluster.journaled(cluster.now_s))
    assert set(delta.values) == {"cluster", f"member/{workers[1].node_id}"}
    assert delta.removed == ()


def test_another_timeline_takes_the_place_of_all_records() -> None:
    cluster, _, _ = formed()
    differences = records.Differences()
    found = differences.since(cluster.cluster.journaled(cluster.now_s)).encoded()
    settings = cluster.cluster.in_new_timeline(None, bytes(15) + b"2", b"t" * 32)
    renewed = Harness()
    renewed.cluster = type(cluster.cluster)(settings, 1.0)
    delta = differences.since(renewed.cluster.journaled(1.0))
    found = {key: value for key, value in found.items() if key not in delta.removed}
    read = records.read(found | delta.encoded())
    assert read is not None
    assert read == JournaledCluster(settings, renewed.cluster._state)
    assert read.settings.replaced_timelines == {SETTINGS.timeline}


def test_a_checkpoint_that_was_imported_is_kept() -> None:
    imported = Imported.of("file:///x", [SPEC.validated()])
    cluster = Harness(restored=Restored("file:///x", {}, imported, (bytes(16),)))
    read = records.read(kept_records(cluster))
    assert read is not None
    assert read.settings == cluster.cluster.settings


def test_records_that_are_damaged_missing_or_of_another_version_are_refused() -> None:
    cluster, _, _ = formed()
    whole = kept_records(cluster)
    flipped = whole["range/3"].replace(b'"range_id":3', b'"range_id":2')
    bad = {
        "'range/3' is damaged": whole | {"range/3": flipped},
        "ranges came": {k: v for k, v in whole.items() if k != "range/3"},
        "'spec/1'|KeyError": {k: v for k, v in whole.items() if k != "spec/1"},
        "'settings'": {k: v for k, v in whole.items() if k != "settings"},
        "no record 'format'": {k: v for k, v in whole.items() if k != "format"},
        "of format 2": whole | {"format": rewritten(whole["format"], format=2)},
        "unknown field 'magic'": whole | {"cluster": rewritten(whole["cluster"], magic=1)},
        "no field 'magic'": whole | {"member/1": rewritten(whole["member/1"], magic=1)},
        "expected int": whole | {"cluster": rewritten(whole["cluster"], view_number="7")},
    }
    for words, found in bad.items():
        with pytest.raises(InvalidJournal, match=words):
            records.read(found)
    assert records.read({}) is None


def test_a_field_that_a_record_lacks_has_its_default() -> None:
    cluster, _, _ = formed()
    whole = kept_records(cluster)
    body = json.loads(whole["cluster"][8:])
    del body["failed_over"], body["has_formed"]
    text = json.dumps(body).encode()
    read = records.read(whole | {"cluster": b"%08x" % zlib.crc32(text) + text})
    assert read is not None
    assert not read.state.has_formed


def test_ranges_of_a_journal_that_does_not_say_when_they_were_placed_are_read() -> None:
    """Their servers take them for placed once: a release before this one wrote it."""
    cluster, _, _ = formed(range_count=8)
    assert {each.placed_epoch for each in cluster.cluster.view.ranges} == {2}
    older = {key: without(record, "placed_epoch") for key, record in kept_records(cluster).items()}
    read = records.read(older)
    assert read is not None
    ranges = [
        replace(each, placed_epoch=AssignmentEpoch(0)) for each in cluster.cluster.view.ranges
    ]
    assert read.state.ranges == ranges


@pytest.mark.parametrize(("replicas", "has_formed"), [(2, True), (1, True), (2, False)])
def test_a_restore_in_place_waits_for_no_server_that_a_replicated_cluster_went_on_without(
    replicas: int, *, has_formed: bool
) -> None:
    harness = Harness(server_count=3, worker_count=1, replica_count=replicas)
    servers = [harness.join(Role.SERVER) for _ in range(3 if has_formed else 2)]
    for lost in servers[2:]:
        harness.leave(lost)
    settings = harness.cluster.in_new_timeline(None, bytes(15) + b"2", b"t" * 32)
    harness.cluster = Cluster(settings, harness.now_s)
    harness.start_again()  # its journal says so, too
    worker = harness.join(Role.WORKER)
    harness.join(Role.SERVER)
    waits = isinstance(harness.create(worker), Parked)
    harness.join(Role.SERVER)
    made = isinstance(harness.create(worker), Created)
    assert (waits, made) == (True, replicas == 2 and has_formed)
    if not made:
        harness.join(Role.SERVER)
        assert isinstance(harness.create(worker), Created)


def test_a_restore_in_place_waits_for_no_server_beyond_those_it_was_started_for() -> None:
    harness = Harness(server_count=2, worker_count=1, replica_count=2)
    for _ in range(3):
        harness.join(Role.SERVER)
    settings = harness.cluster.in_new_timeline(None, bytes(15) + b"2", b"t" * 32)
    harness.cluster = Cluster(settings, harness.now_s)
    worker = harness.join(Role.WORKER)
    harness.join(Role.SERVER)
    assert isinstance(harness.create(worker), Parked)
    harness.join(Role.SERVER)
    assert isinstance(harness.create(worker), Created)
