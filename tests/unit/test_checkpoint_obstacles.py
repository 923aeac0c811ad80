"""What keeps a checkpoint from being made is named: lost values, servers that are late or leave."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from ps_core import limits
from ps_core.change import ChangeOutcome
from ps_core.cluster_view import Role
from ps_core.errors import InvalidCheckpoint
from ps_core.keys import NodeId
from ps_core.manifest import PartReport
from ps_runtime.system import clock
from pushpull.v1 import scheduler_pb2
from scheduler.machine.checkpoint_state import (
    CheckpointBegunAgain,
    CheckpointFailed,
    CheckpointWritten,
)
from scheduler.machine.state import ChangeProposed, UpdateLogClaim
from tests.unit import test_due_checkpoints
from tests.unit.cluster_harness import SPEC, Harness
from tests.unit.test_cluster_checkpoints import MODEL, OTHER, PLACE, Saving


def test_none_is_proposed_while_values_are_lost() -> None:
    cluster = Saving()
    cluster.leave(cluster.servers[0])
    cluster.transitions.clear()
    pending = cluster.begin()
    assert pending.number == 0
    assert "key ranges are lost, of which server 1 had the only copy" in pending.reason
    assert "Restore a checkpoint" in pending.reason
    assert cluster.checkpoint is None
    assert cluster.happened(ChangeProposed) == []


def test_values_of_a_named_run_that_are_lost_are_no_obstacle() -> None:
    cluster = Saving()
    assert cluster.cluster.checkpoints.lost_words == ""
    named = cluster.join(Role.WORKER, run="a", world_size=1)
    comes = cluster.join(Role.SERVER)
    before = {each.range_id for each in cluster.cluster.view.ranges if each.primary is not None}
    for _ in range(40):  # some block of it lies where no other table has one
        name = f"t{len(cluster.cluster.view.tables)}"
        cluster.create(named, replace(SPEC, name=name))
    new = [each for each in cluster.cluster.view.ranges if each.range_id not in before]
    assert comes.node_id in {each.primary for each in new}
    cluster.leave(comes)
    assert cluster.cluster.view.lost_ranges
    assert cluster.cluster.checkpoints.lost_words == ""
    assert cluster.begin().number == 7


def test_who_asks_while_values_are_lost_is_refused_at_once(tmp_path: Path) -> None:
    async def live() -> None:
        cluster = test_due_checkpoints.Saving(tmp_path)
        cluster.cluster.leave(cluster.server)
        request = scheduler_pb2.CreateCheckpointRequest()
        with pytest.raises(InvalidCheckpoint, match=r"no checkpoint can be made: .* are lost"):
            await cluster.edge.create(request, clock.now_s() + 60.0)

    asyncio.run(live())


def test_values_that_may_come_back_with_an_update_log_are_waited_for_before_it_begins() -> None:
    cluster = Harness(checkpoint_url=PLACE)
    logged = cluster.join(Role.SERVER, update_log=UpdateLogClaim(b"l" * 16))
    cluster.join(Role.SERVER, update_log=UpdateLogClaim(b"m" * 16))
    cluster.create(cluster.join(Role.WORKER))
    cluster.leave(logged)
    pending = cluster.cluster.begin_checkpoint("wanted", cluster.now_s).reply
    assert pending.number == 0
    assert pending.reason.startswith(f"server node {logged.node_id} at")
    assert "nobody has come back with them yet" in pending.reason


def test_one_that_is_late_names_the_servers_that_did_not_prepare_it() -> None:
    cluster = Saving()
    cluster.begin()
    cluster.promise(0, 5, 4)
    cluster.answer(0, 5, 4)
    cluster.answer(1, 5, 4)
    cluster.pass_time(limits.CHECKPOINT_CUT_S, cluster.servers[0], *cluster.workers)
    cluster.check_failed("waits until server node 2 at h2:70 (silent, last heard")


def test_a_cut_that_is_late_when_a_server_answers_names_who_was_missing() -> None:
    cluster = Saving()
    cluster.begin()
    cluster.promise(0, 5, 4)
    late_s = cluster.now_s + limits.CHECKPOINT_CUT_S
    cluster.note(cluster.cluster.prepare_change(cluster.servers[0], MODEL, 1, 5, now_s=late_s))
    cluster.check_failed("waits until server node 2 at h2:70")


def test_a_cut_that_servers_gave_up_says_so() -> None:
    cluster = Saving()
    cluster.begin()
    (table, _) = cluster.tables
    assert table.proposed is not None
    given_up = MODEL, table.proposed.number, 5, ChangeOutcome.GIVEN_UP
    cluster.note(cluster.cluster.prepare_change(cluster.servers[0], *given_up))
    cluster.check_failed("the servers gave it up, because they did not hear the scheduler")
    assert OTHER in {each.table_id for each in cluster.tables}


@pytest.mark.parametrize("is_cut", [False, True])
def test_one_fails_at_once_when_a_server_leaves_that_has_not_written_its_part(
    *, is_cut: bool
) -> None:
    cluster = Saving()
    if is_cut:
        cluster.cut()
        cluster.report(cluster.servers[0], cluster.written(0))
    else:
        cluster.begin()
    cluster.leave(cluster.servers[1])
    cluster.check_failed("server node 2 has left")


def test_one_whose_part_is_written_is_complete_without_its_server() -> None:
    """A server that is told to stop leaves when the checkpoint that it waited for is made."""
    cluster = Saving()
    cluster.cut()
    cluster.report(cluster.servers[1], cluster.written(1))
    first = cluster.written(0)
    cluster.leave(cluster.servers[1])
    cluster.report(cluster.servers[0], first)
    for worker in cluster.workers:
        cluster.report(worker, PartReport(f"worker-{worker.rank}", 9, "c"))
    assert cluster.happened(CheckpointWritten)
    assert not cluster.happened(CheckpointFailed)


@pytest.mark.parametrize("comes", ["before it is proposed", "after its cut"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_who_starts_up_is_not_waited_for_where_all_others_wait(
    comes: str, *, has_begun: bool
) -> None:
    """It comes beside the first ones, and may load its data for minutes before its first step."""
    cluster = Saving(max_workers=3)

    def settled() -> None:
        for server in (0, 1):
            cluster.promise(server, 4, 4)

    if comes == "before it is proposed":
        cluster.workers.append(cluster.worker())
        settled()
        cluster.begin()
        for server in (0, 1):
            cluster.promise(server, 5, 4)
        cluster.answer(2, 0, 0, has_state=False, has_begun=has_begun)
        for worker in (0, 1):
            cluster.answer(worker, 5, 4)
    else:
        cluster.cut()
        cluster.workers.append(cluster.worker())
        settled()
    under_way = cluster.checkpoint
    assert under_way is not None
    assert under_way.is_cut
    for worker in (0, 1):
        cluster.stay(worker, 4, 4)
    is_awaited = has_begun and comes == "before it is proposed"
    assert bool(cluster.happened(CheckpointBegunAgain)) != is_awaited


@pytest.mark.parametrize(
    "other", ["has taken a step", "has taken the step", "answers no checkpoint", "is silent"]
)
def test_who_may_take_the_step_or_has_is_waited_for(other: str) -> None:
    """Another worker than the two that wait."""
    cluster = Saving(max_workers=3)
    answers = other != "answers no checkpoint"
    cluster.workers.append(cluster.worker() if answers else cluster.join(Role.WORKER))
    for server in (0, 1):
        cluster.promise(server, 4, 4)
    cluster.begin()
    for server in (0, 1):
        cluster.promise(server, 5, 4)
    if other == "has taken a step":
        cluster.answer(2, 1, 0, has_state=False, has_begun=False)
    elif answers:
        cluster.answer(2, 0, 0, has_state=False, has_begun=False)
    for worker in (0, 1):
        cluster.answer(worker, 5, 4)
    assert cluster.checkpoint is not None
    assert cluster.checkpoint.is_cut
    if other == "has taken the step":
        cluster.stay(2, 5, 4)
    elif other == "is silent":
        cluster.pass_time(15.0, *cluster.servers, *cluster.workers[:2])
    for worker in (0, 1):
        cluster.stay(worker, 4, 4)
    assert not cluster.happened(CheckpointBegunAgain)


def test_who_has_not_come_to_the_cut_is_named_and_not_the_servers_that_wait_for_it() -> None:
    cluster = Saving()
    checkpoints = cluster.cluster.checkpoints
    ahead, behind = (worker.node_id for worker in cluster.workers)
    checkpoints.reached = {ahead: {MODEL: 5}, behind: {MODEL: 4}, NodeId(99): {MODEL: 1}}
    cluster.cut()
    assert f"waits for a step of worker node {behind} (" in checkpoints.reason(cluster.now_s)
    for at in range(2):
        cluster.report(cluster.servers[at], cluster.written(at))
    assert "waits for the files of worker" in checkpoints.reason(cluster.now_s)


@pytest.mark.parametrize("consistency", ["asp", "bsp:backup=1"])
def test_a_cut_that_waits_for_no_late_worker_names_the_servers(consistency: str) -> None:
    cluster = Saving(consistency=consistency)
    checkpoints = cluster.cluster.checkpoints
    checkpoints.reached = {cluster.workers[1].node_id: {MODEL: 1}}
    cluster.cut()
    assert "waits for the files of server" in checkpoints.reason(cluster.now_s)


@pytest.mark.parametrize("consistency", ["ssp:3", "asp"])
def test_who_waits_before_a_step_of_one_that_has_left_must_take_it(consistency: str) -> None:
    """The servers have it, so what is begun again would be cut there again, for ever."""
    cluster = Saving(consistency=consistency)
    cluster.leave(cluster.workers[1])
    cluster.begin()
    for server in (0, 1):
        cluster.promise(server, 6, 4)
    cluster.answer(0, 3, 4)
    assert cluster.stay(0, 3, 4)
    assert not cluster.happened(CheckpointBegunAgain)
    assert not cluster.stay(0, 6, 4)
