"""The scheduler's machine makes checkpoints: cuts that everybody answers for, parts that add up."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from ps_core import errors, limits
from ps_core.change import ChangeOutcome, Checkpoint, Join, TableChange, TableCut
from ps_core.cluster_view import NodeState, Role, Session
from ps_core.consistency import Consistency, parsed
from ps_core.keys import TableId
from ps_core.manifest import DataSetSpec, PartReport, ReportedTable, SavedDataSet
from ps_core.tables.table import Table
from ps_runtime.cluster import wire
from scheduler.edge.checkpointing import manifest_of
from scheduler.machine import view_size
from scheduler.machine.changes import ChangeRequest, PendingProposal
from scheduler.machine.checkpoint_state import (
    CheckpointBegunAgain,
    CheckpointCut,
    CheckpointFailed,
    CheckpointMade,
    CheckpointUnneeded,
    CheckpointWritten,
)
from scheduler.machine.checkpoints import CHECKPOINTS_FEATURE, LEAVING
from scheduler.machine.cluster import Created
from scheduler.machine.data_shards import ShardRequest
from scheduler.machine.state import ChangeWithdrawn, Restored, RestoredTable
from tests.unit.cluster_harness import SPEC, Harness, refused

MODEL, OTHER = TableId(1), TableId(2)
PLACE = "file:///tmp/checkpoints"


class Saving(Harness):
    """Two servers, two workers that answer, and two tables."""

    def __init__(self, *, workers: int = 2, consistency: str = "bsp", **settings: Any) -> None:
        super().__init__(worker_count=workers, checkpoint_url=PLACE, checkpoint_count=6, **settings)
        self.servers = [self.join(Role.SERVER) for _ in range(2)]
        self.workers = [self.worker() for _ in range(workers)]
        for name in ("model", "other"):
            spec = replace(SPEC, name=name, consistency=parsed(consistency))
            assert isinstance(self.create(self.workers[0], spec), Created)

    def worker(self) -> Session:
        return self.join(Role.WORKER, features=(CHECKPOINTS_FEATURE,))

    def note(self, decision: Any) -> Any:
        self.transitions += decision.transitions
        return decision.reply

    def begin(self, reason: str = "wanted") -> PendingProposal:
        pending = self.note(self.cluster.begin_checkpoint(reason, self.now_s))
        assert isinstance(pending, PendingProposal)
        return pending

    def promise(self, server: int, *clocks: int) -> None:
        """Of each table at its clock."""
        for table, clock in zip(self.tables, clocks, strict=False):
            if table.proposed is not None:
                number = table.proposed.number
                session, table_id = self.servers[server], table.table_id
                self.note(self.cluster.prepare_change(session, table_id, number, clock))
                (now,) = (t for t in self.cluster.view.tables if t.table_id == table_id)
                if now.proposed is not None and now.proposed.is_decided:
                    taken = ChangeOutcome.TAKEN
                    self.note(self.cluster.prepare_change(session, table_id, number, clock, taken))

    def answer(
        self,
        worker: int,
        *clocks: int,
        has_state: bool = True,
        number: int = 7,
        has_begun: bool = True,
    ) -> None:
        named = dict(zip((MODEL, OTHER), clocks, strict=False))
        session = self.workers[worker]
        joined = self.cluster.join_checkpoint(session, number, named, has_state, has_begun)
        self.note(joined)

    def stay(self, worker: int, *clocks: int, number: int = 7, **reached: int) -> bool:
        """A worker's script waits; `reached`: what others were heard at, of the first table."""
        named = dict(zip((MODEL, OTHER), clocks, strict=False))
        heard = {self.workers[int(who[1:])].node_id: {MODEL: at} for who, at in reached.items()}
        session = self.workers[worker]
        must_step = self.note(
            self.cluster.stay_for_checkpoint(session, number, named, heard, self.now_s)
        )
        assert isinstance(must_step, bool)
        return must_step

    def cut(self) -> None:
        """All of it, at clocks 5 and 4."""
        assert self.begin().number == 7
        self.promise(0, 5, 4)
        self.promise(1, 5, 4)
        self.answer(0, 5, 4)
        self.answer(1, 5, 4)
        assert self.checkpoint == Checkpoint(7, f"{PLACE}/00000007-c-1", is_cut=True)

    def report(self, session: Session, part: PartReport, number: int = 7) -> None:
        self.note(self.cluster.report_part(session, number, part))

    def written(self, server: int, *, fewer: int = 0) -> PartReport:
        """All that it has, as it should be."""
        view, node_id = self.cluster.view, self.servers[server].node_id
        owned = {r.range_id for r in view.ranges if r.primary == node_id}
        counts = {
            table.table_id: sum(
                len(blocks)
                for range_id, blocks in table.blocks_by_range(len(view.ranges)).items()
                if range_id in owned
            )
            for table in self.tables
        }
        tables = {t: ReportedTable(count - fewer, 5) for t, count in counts.items()}
        return PartReport(f"server-{node_id}", 100, "ab", tables)

    def all_but_one_report(self) -> CheckpointWritten:
        for server in (0, 1):
            self.report(self.servers[server], self.written(server))
        self.report(self.workers[0], PartReport("worker-0", 9, "cd"))
        return next(each for each in self.transitions if isinstance(each, CheckpointWritten))

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.cluster.view.tables

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.cluster.view.checkpoint

    def happened(self, kind: type) -> list[Any]:
        return [each for each in self.transitions if isinstance(each, kind)]

    def check_failed(self, *words: str) -> None:
        """It was given up, for that reason, and nothing of it is in the view."""
        (failed,) = self.happened(CheckpointFailed)
        for word in words:
            assert word in failed.reason
        assert self.checkpoint is None
        assert all(table.proposed is None and table.cut is None for table in self.tables)
        assert self.cluster.checkpoints.problem_of(7) == failed.reason


def test_all_tables_are_cut_at_once_after_the_highest_clock_that_anyone_named() -> None:
    """CP-1, over servers and workers."""
    cluster = Saving()
    assert cluster.begin() == PendingProposal(cluster.cluster.checkpoints.reason(cluster.now_s), 7)
    assert [t.proposed.checkpoint for t in cluster.tables if t.proposed] == [7, 7]
    assert cluster.checkpoint == Checkpoint(7, f"{PLACE}/00000007-c-1")
    cluster.promise(0, 5, 9)
    cluster.promise(1, 6, 3)
    cluster.answer(0, 4, 3)
    assert not cluster.happened(CheckpointCut)
    assert "the clocks of worker node 4" in cluster.cluster.checkpoints.reason(cluster.now_s)
    cluster.answer(1, 8, 2)
    assert cluster.happened(CheckpointCut) == [CheckpointCut(7, {"model": 8, "other": 9})]
    assert [table.cut for table in cluster.tables] == [TableCut(7, 8), TableCut(7, 9)]
    assert all(table.proposed is None for table in cluster.tables)


def test_no_table_is_cut_before_every_server_has_promised_every_table() -> None:
    cluster = Saving()
    cluster.begin()
    cluster.answer(0, 5, 4)
    cluster.answer(1, 5, 4)
    cluster.promise(0, 5, 4)
    cluster.promise(1, 5)
    assert "until server node 2 at h2:70" in cluster.cluster.checkpoints.reason(cluster.now_s)
    assert all(table.cut is None for table in cluster.tables)
    cluster.promise(1, 5, 4)
    assert cluster.checkpoint is not None
    assert cluster.checkpoint.is_cut


def test_a_worker_that_knows_no_checkpoints_is_not_waited_for() -> None:
    cluster = Harness(worker_count=1, checkpoint_url=PLACE)
    servers = [cluster.join(Role.SERVER) for _ in range(2)]
    cluster.create(cluster.join(Role.WORKER))
    cluster.cluster.begin_checkpoint("", cluster.now_s)
    for server in servers:
        cut = cluster.cluster.prepare_change(server, MODEL, 1, 3).transitions
    assert cut == (CheckpointCut(1, {"model": 3}),)


def test_who_wants_one_while_one_is_proposed_has_that_one_and_later_the_next() -> None:
    cluster = Saving()
    first = cluster.begin()
    before = cluster.cluster.view
    assert cluster.begin() == first
    assert cluster.cluster.view == before
    for server in (0, 1):
        cluster.promise(server, 1, 1)
    for worker in (0, 1):
        cluster.answer(worker, 1, 1)
    assert cluster.begin().number == 0


def test_one_waits_until_a_change_is_settled() -> None:
    cluster = Saving()
    wanted = ChangeRequest("other", parsed("ssp:2"), 0, cluster.now_s + 5)
    cluster.note(cluster.cluster.set_consistency(cluster.workers[0], wanted, cluster.now_s))
    pending = cluster.begin()
    assert (pending.number, cluster.checkpoint) == (0, None)
    assert "a change of table 'other' has not ended" in pending.reason
    cluster.promise(0, 0, 3)
    cluster.promise(1, 0, 3)
    assert cluster.begin().number == 7


def test_a_change_and_a_join_wait_until_the_cut_is_settled() -> None:
    cluster = Saving(max_workers=3)
    cluster.begin()
    wanted = ChangeRequest("model", parsed("ssp:2"), 0, cluster.now_s + 90)
    asked = cluster.note(cluster.cluster.set_consistency(cluster.workers[0], wanted, cluster.now_s))
    assert isinstance(asked, PendingProposal)
    assert asked.number == 0
    assert "checkpoint 7 of table 'model'" in asked.reason
    newcomer = cluster.worker()
    assert newcomer.rank == 2
    cluster.pass_time(1, *cluster.servers, *cluster.workers, newcomer)
    assert all(t.proposed is not None and t.proposed.checkpoint for t in cluster.tables)
    cluster.promise(0, 5, 4)
    cluster.promise(1, 5, 4)
    for worker in (0, 1):
        cluster.answer(worker, 5, 4)
    cluster.pass_time(1, *cluster.servers, *cluster.workers, newcomer)
    joins = [t.proposed.join for t in cluster.tables if t.proposed is not None]
    assert joins == [Join(2, newcomer.incarnation)] * 2


def test_a_worker_that_comes_while_it_is_proposed_counts_if_it_answers() -> None:
    cluster = Saving(max_workers=3)
    cluster.begin()
    cluster.promise(0, 5, 4)
    cluster.promise(1, 5, 4)
    cluster.answer(0, 5, 4)
    cluster.workers.append(cluster.worker())
    cluster.answer(2, 9, 0)
    cluster.answer(1, 5, 4)
    assert cluster.happened(CheckpointCut) == [CheckpointCut(7, {"model": 9, "other": 4})]


def test_a_cluster_without_tables_has_nothing_to_write() -> None:
    cluster = Harness(checkpoint_url=PLACE)
    pending = cluster.cluster.begin_checkpoint("", cluster.now_s).reply
    assert pending == PendingProposal("the cluster has no table yet")


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_worker_that_ends_before_it_has_answered_is_not_waited_for(is_dead: bool) -> None:
    cluster = Saving()
    cluster.begin()
    cluster.promise(0, 5, 4)
    cluster.promise(1, 5, 4)
    cluster.answer(0, 5, 4)
    if is_dead:
        cluster.pass_time(40, *cluster.servers, cluster.workers[0])
    else:
        cluster.leave(cluster.workers[1])
    assert len(cluster.happened(CheckpointCut)) == 1
    written = cluster.all_but_one_report()
    assert written.attempt.parts[cluster.workers[1].node_id].problem.startswith("worker 1 ")


def test_a_worker_that_is_silent_is_not_asked_and_is_named_as_lost() -> None:
    cluster = Saving()
    cluster.pass_time(5, *cluster.servers, cluster.workers[0])  # longer than a lease
    cluster.begin()
    cluster.promise(0, 5, 4)
    cluster.promise(1, 5, 4)
    cluster.answer(0, 5, 4)
    assert cluster.happened(CheckpointCut)
    written = cluster.all_but_one_report()
    assert "silent" in written.attempt.parts[cluster.workers[1].node_id].problem


def test_what_is_reported_of_a_table_that_was_not_cut_is_not_in_it() -> None:
    cluster = Saving()
    cluster.cut()
    for server, part in enumerate(map(cluster.written, (0, 1))):
        strange = replace(part, tables={**part.tables, TableId(99): ReportedTable(1, 5)})
        cluster.report(cluster.servers[server], strange)
    for worker in cluster.workers:
        cluster.report(worker, PartReport())
    found = cluster.happened(CheckpointWritten)[0].attempt.parts[cluster.servers[0].node_id]
    assert found.tables.keys() == {MODEL, OTHER}


@pytest.mark.parametrize("is_dead", [False, True])
@pytest.mark.parametrize("is_early", [False, True])
def test_the_state_of_a_worker_that_ends_before_it_reports_is_lost(
    is_dead: bool, is_early: bool
) -> None:
    cluster = Saving()
    if not is_early:
        cluster.cut()
    else:
        cluster.begin()
        cluster.answer(1, 5, 4)
    if is_dead:
        cluster.pass_time(40, *cluster.servers, cluster.workers[0])
    else:
        cluster.leave(cluster.workers[1])
    if is_early:
        for server in (0, 1):
            cluster.promise(server, 5, 4)
        cluster.answer(0, 5, 4)
    written = cluster.all_but_one_report()
    lost = written.attempt.parts[cluster.workers[1].node_id]
    assert lost.problem.startswith("worker 1 ")
    assert written.attempt.parts[cluster.workers[0].node_id].file == "worker-0"


def test_what_a_worker_reported_before_it_left_counts() -> None:
    cluster = Saving()
    cluster.cut()
    cluster.report(cluster.workers[1], PartReport("worker-1", 9, "cd"))
    cluster.leave(cluster.workers[1])
    for server in (0, 1):
        cluster.report(cluster.servers[server], cluster.written(server))
    cluster.report(cluster.workers[0], PartReport("worker-0", 9, "cd"))
    (written,) = cluster.happened(CheckpointWritten)
    assert written.attempt.parts[cluster.workers[1].node_id].file == "worker-1"
    assert written.attempt.parts[cluster.workers[0].node_id].file == "worker-0"


@pytest.mark.parametrize("answers", ["before the cut", "never", "never, gone before"])
def test_a_rank_is_in_the_manifest_once(answers: str) -> None:
    """Its worker is gone before the cut; and so it says where nobody takes its place."""
    cluster = Saving()
    if answers != "never, gone before":
        cluster.begin()
        cluster.promise(0, 5, 4)
    ended = cluster.cluster.deregister(
        cluster.workers[1], "SIGTERM", cluster.now_s, unfinished=True
    )
    cluster.note(ended)
    if answers == "never, gone before":
        cluster.begin()
        cluster.promise(0, 5, 4)
    if answers == "before the cut":
        replacement = cluster.worker()
        assert replacement.rank == 1
        cluster.note(cluster.cluster.join_checkpoint(replacement, 7, {}, False))
    cluster.answer(0, 5, 4)
    cluster.promise(1, 5, 4)
    written = cluster.all_but_one_report()
    manifest = manifest_of(cluster.cluster.settings, written.attempt, 2)
    first, second = manifest.workers
    assert (first.rank, first.file, first.problem) == (0, "worker-0", "")
    assert (second.rank, second.file) == (1, "")
    assert "was declared gone" in second.problem


# --- in a cluster that began from a checkpoint

SOURCE = "file:///tmp/before/00000006-b"


def resumed(
    consistency: Consistency = SPEC.consistency,
    data_sets: tuple[SavedDataSet, ...] = (),
    **settings: Any,
) -> Saving:
    """Its two tables, at 5 and 4 with that consistency, and data sets are of a checkpoint."""
    tables = {
        name: RestoredTable(replace(SPEC, name=name).validated(), consistency, clock)
        for name, clock in (("model", 5), ("other", 4))
    }
    return Saving(restored=Restored(SOURCE, tables, data_sets=data_sets), **settings)


def asked(cluster: Saving, model: int = 5, *, begun: tuple[int, ...] = ()) -> None:
    """One is asked for, and everybody answers; `begun`: the workers that have begun."""
    assert cluster.begin("stopped").number == 7
    for server in (0, 1):
        cluster.promise(server, model, 4)
    for worker, session in enumerate(cluster.workers):
        if cluster.node(session).state is NodeState.ALIVE:
            has_begun = worker in begun
            cluster.answer(worker, 5, 4, has_state=has_begun, has_begun=has_begun)


@pytest.mark.parametrize("begun", [(), (0,)])
def test_while_workers_start_up_it_is_the_one_that_the_cluster_began_from(
    begun: tuple[int, ...],
) -> None:
    cluster = resumed()
    asked(cluster, begun=begun)
    (unneeded,) = cluster.happened(CheckpointUnneeded)
    assert (unneeded.number, unneeded.source, unneeded.changed) == (7, SOURCE, ())
    assert not cluster.happened(CheckpointCut)
    assert not cluster.happened(CheckpointFailed)
    assert cluster.cluster.checkpoints.problem_of(7) == ""
    assert cluster.checkpoint is None
    assert all(table.proposed is None and table.cut is None for table in cluster.tables)
    assert cluster.begin().number == 8, "the next request begins another"


@pytest.mark.parametrize("first", ["bsp", "ssp:2"])
def test_a_setting_that_was_changed_meanwhile_is_named_and_no_step(first: str) -> None:
    """`first`: that of the checkpoint; the scripts say BSP, as they did then."""
    cluster = resumed(consistency=parsed(first))
    wanted = ChangeRequest("model", parsed("asp"), 0, cluster.now_s + 5)
    cluster.note(cluster.cluster.set_consistency(cluster.workers[0], wanted, cluster.now_s))
    for server in (0, 1):
        cluster.promise(server, 5)
    cluster.pass_time(1, *cluster.servers, *cluster.workers)
    for server in (0, 1):
        cluster.promise(server, 5)
    assert [str(table.consistency) for table in cluster.tables] == ["asp", first]
    asked(cluster)
    (unneeded,) = cluster.happened(CheckpointUnneeded)
    assert unneeded.changed == ("model",)


def test_before_a_worker_has_come_it_is_the_one_that_the_cluster_began_from() -> None:
    cluster = resumed(max_workers=3)
    cluster.cluster.deregister(cluster.workers[1], "SIGTERM", cluster.now_s, unfinished=True)
    asked(cluster, begun=(0,))
    assert len(cluster.happened(CheckpointUnneeded)) == 1


def test_once_all_workers_have_begun_one_is_made_though_no_step_was_taken() -> None:
    cluster = resumed()
    asked(cluster, begun=(0, 1))
    assert cluster.happened(CheckpointCut) == [CheckpointCut(7, {"model": 5, "other": 4})]


@pytest.mark.parametrize(
    "part",
    [PartReport("worker-1", 9, "cd"), PartReport(), PartReport(problem="it left early"), None],
)
def test_a_worker_that_has_left_with_its_state_or_none_to_write_has_begun(
    part: PartReport | None,
) -> None:
    cluster = resumed()
    if part is not None:
        cluster.report(cluster.workers[1], part, LEAVING)
    cluster.leave(cluster.workers[1])
    asked(cluster, begun=(0,))
    has_begun = part is not None and not part.problem
    assert len(cluster.happened(CheckpointCut)) == has_begun
    assert len(cluster.happened(CheckpointUnneeded)) == (not has_begun)


SAMPLES = DataSetSpec("samples", 4, 1, 0)


def lease(cluster: Saving, pass_number: int, done: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The shards of worker 0 after it has reported some."""
    request = ShardRequest(SAMPLES, pass_number, done, 1)
    leased = cluster.cluster.lease_data_shards(cluster.workers[0], request, cluster.now_s)
    shards: tuple[int, ...] = cluster.note(leased).shards
    return shards


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_once_a_shard_was_reported_one_is_made_though_its_worker_has_left(
    is_known: bool, leaves: bool
) -> None:
    """`is_known`: the checkpoint has the data set, in its second pass."""
    cluster = resumed(data_sets=(SavedDataSet(SAMPLES, 1, 2, (), 0),) if is_known else ())
    lease(cluster, int(is_known), done=lease(cluster, int(is_known)))
    if leaves:
        cluster.leave(cluster.workers[0])
    asked(cluster)
    assert len(cluster.happened(CheckpointCut)) == 1


@pytest.mark.parametrize("leaves", [False, True])
def test_shards_that_were_leased_and_not_reported_are_no_movement(leaves: bool) -> None:
    cluster = resumed(data_sets=(SavedDataSet(SAMPLES, 1, 2, (3,), 0),))
    assert lease(cluster, 1)
    if leaves:
        cluster.leave(cluster.workers[0])
    asked(cluster)
    assert len(cluster.happened(CheckpointUnneeded)) == 1


def test_beyond_it_one_is_made_and_names_a_worker_that_still_starts_up_as_lost() -> None:
    cluster = resumed()
    asked(cluster, 6, begun=(0,))
    assert len(cluster.happened(CheckpointCut)) == 1
    written = cluster.all_but_one_report()
    first, second = manifest_of(cluster.cluster.settings, written.attempt, 2).workers
    assert (first.file, first.problem) == ("worker-0", "")
    assert "starting up" in second.problem


def test_workers_without_a_state_have_nothing_to_report() -> None:
    cluster = Saving()
    cluster.begin()
    for node in (0, 1):
        cluster.promise(node, 5, 4)
        cluster.answer(node, 5, 4, has_state=False)
    for server in (0, 1):
        cluster.report(cluster.servers[server], cluster.written(server))
    assert len(cluster.happened(CheckpointWritten)) == 1


def test_one_is_complete_when_its_manifest_is_and_only_then() -> None:
    cluster = Saving()
    cluster.cut()
    for server in (0, 1):
        cluster.report(cluster.servers[server], cluster.written(server))
        cluster.report(cluster.servers[server], cluster.written(server))  # again: late, or lost
        reason = cluster.cluster.checkpoints.reason(cluster.now_s)
        assert "waits for the files of" in reason
    for worker in (0, 1):
        assert not cluster.happened(CheckpointWritten)
        cluster.report(cluster.workers[worker], PartReport(f"worker-{worker}", 9, "cd"))
    assert len(cluster.happened(CheckpointWritten)) == 1
    assert "waits for its manifest" in cluster.cluster.checkpoints.reason(cluster.now_s)
    assert cluster.cluster.checkpoints.problem_of(7) is None
    cluster.note(cluster.cluster.end_checkpoint(6, ""))
    assert cluster.checkpoint is not None
    cluster.note(cluster.cluster.end_checkpoint(7, ""))
    assert cluster.happened(CheckpointMade) == [CheckpointMade(7, f"{PLACE}/00000007-c-1")]
    assert cluster.cluster.checkpoints.problem_of(7) == ""
    assert cluster.cluster.checkpoints.reason(cluster.now_s) == ""
    assert cluster.begin().number == 8


def test_a_report_that_comes_again_while_the_manifest_is_written_changes_nothing() -> None:
    cluster = Saving()
    cluster.cut()
    for server in (0, 1):
        cluster.report(cluster.servers[server], cluster.written(server))
    for worker in (0, 1):
        cluster.report(cluster.workers[worker], PartReport("worker", 9, "cd"))
    (written,) = cluster.happened(CheckpointWritten)
    before = dict(written.attempt.parts)
    cluster.report(cluster.workers[0], PartReport(problem="late"))
    cluster.report(cluster.servers[0], PartReport(problem="late"))
    cluster.note(cluster.cluster.tick(cluster.now_s + 2 * limits.CHECKPOINT_WRITTEN_S))
    assert written.attempt.parts == before
    assert not cluster.happened(CheckpointFailed)
    cluster.note(cluster.cluster.end_checkpoint(7, "no space"))
    cluster.transitions = [t for t in cluster.transitions if isinstance(t, CheckpointFailed)]
    cluster.check_failed("no space")


def test_blocks_that_nobody_wrote_are_missed() -> None:
    """CP-2."""
    cluster = Saving()
    cluster.cut()
    cluster.report(cluster.servers[0], cluster.written(0))
    cluster.report(cluster.servers[1], cluster.written(1, fewer=1))
    for worker in (0, 1):
        cluster.report(cluster.workers[worker], PartReport("worker", 9, "cd"))
    cluster.check_failed("15 of 16 blocks of 'model' were written")


def test_a_server_that_cannot_write_fails_it_after_the_cut() -> None:
    cluster = Saving()
    cluster.cut()
    cluster.report(cluster.servers[1], PartReport(problem="no space left on device"))
    cluster.check_failed("server 2: no space left on device")


def test_a_server_that_cannot_write_fails_it_before_the_cut() -> None:
    """It says so once: who does not listen waits for it for an hour."""
    cluster = Saving()
    cluster.begin()
    cluster.promise(0, 5, 4)
    cluster.report(cluster.servers[1], PartReport(problem="permission denied"))
    cluster.check_failed("server 2: permission denied")
    assert len(cluster.happened(ChangeWithdrawn)) == 2


def test_a_report_of_another_checkpoint_changes_nothing() -> None:
    cluster = Saving()
    cluster.cut()
    before = cluster.cluster.view
    for number in (6, 8):
        cluster.report(cluster.servers[0], PartReport(problem="other"), number)
        cluster.answer(0, 99, 99, number=number)
    assert cluster.cluster.view == before


def test_what_is_named_after_the_cut_changes_nothing() -> None:
    cluster = Saving()
    cluster.cut()
    before = cluster.cluster.view
    cluster.answer(0, 99, 99)
    cluster.answer(0, 99, 99)
    assert cluster.cluster.view == before
    assert [table.cut for table in cluster.tables] == [TableCut(7, 5), TableCut(7, 4)]


# --- a cut that was a guess


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_where_all_wait_before_the_step_of_a_cut_it_is_begun_again(consistency: str) -> None:
    """Under ASP workers ask that take their steps together."""
    cluster = Saving(consistency=consistency)
    cluster.cut()
    assert not cluster.stay(0, 4, 4)
    assert not cluster.happened(CheckpointBegunAgain), "the other may come to the step"
    assert not cluster.stay(1, 4, 4)
    (again,) = cluster.happened(CheckpointBegunAgain)
    assert (again.number, again.again) == (7, 8)
    assert cluster.checkpoint is not None
    assert (cluster.checkpoint.number, cluster.checkpoint.is_cut) == (8, False)
    assert all(table.cut is None for table in cluster.tables)
    assert cluster.cluster.checkpoints.newest_of(7) == 8
    assert cluster.cluster.checkpoints.problem_of(7) is None
    for worker in (0, 1):
        cluster.answer(worker, 4, 4, number=8)
    for server in (0, 1):
        cluster.promise(server, 4, 4)
    assert [table.cut for table in cluster.tables] == [TableCut(8, 4), TableCut(8, 4)]


def test_who_joins_hears_whether_another_waits() -> None:
    cluster = Saving()
    cluster.cut()
    join = cluster.cluster.join_checkpoint
    assert not join(cluster.workers[1], 7, {}, has_state=True).reply
    cluster.stay(0, 4, 4)
    assert join(cluster.workers[1], 7, {}, has_state=True).reply
    assert not join(cluster.workers[0], 7, {}, has_state=True).reply
    assert not join(cluster.workers[1], 6, {}, has_state=True).reply


def test_it_is_begun_again_when_a_change_is_settled() -> None:
    cluster = Saving()
    cluster.cut()
    wanted = ChangeRequest("other", parsed("ssp:2"), 0, cluster.now_s + 90)
    cluster.note(cluster.cluster.set_consistency(cluster.workers[0], wanted, cluster.now_s))
    for worker in (0, 1):
        cluster.stay(worker, 4, 4)
    assert not cluster.happened(CheckpointBegunAgain)
    assert not cluster.happened(CheckpointFailed)
    for server in (0, 1):
        cluster.promise(server, 5, 4)
    cluster.stay(0, 4, 4)
    assert cluster.happened(CheckpointBegunAgain)


def test_who_is_gone_is_not_waited_for_where_all_wait() -> None:
    cluster = Saving()
    cluster.cut()
    cluster.stay(0, 4, 4)
    cluster.leave(cluster.workers[1])
    cluster.stay(0, 4, 4)
    assert cluster.happened(CheckpointBegunAgain)


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
@pytest.mark.parametrize("heard", [{"w1": 5}, {}])
def test_who_stays_before_a_step_that_another_has_taken_must_take_it(
    heard: dict[str, int], consistency: str
) -> None:
    """Under SSP the other may wait there, too."""
    cluster = Saving(consistency=consistency)
    cluster.cut()
    assert not cluster.stay(1, 5, 4) or heard
    assert cluster.stay(0, 4, 4, **heard)
    assert not cluster.happened(CheckpointBegunAgain)
    assert not cluster.stay(0, 5, 4, **heard)


def test_who_stays_before_a_step_that_another_has_taken_must_take_it_on_the_way_to_the_cut() -> (
    None
):
    """The other named the clock after its next two steps, and waits in the first."""
    cluster = Saving()
    cluster.cut()
    assert not cluster.stay(0, 3, 4, w1=3)
    assert cluster.stay(0, 3, 4, w1=4)
    assert not cluster.stay(0, 4, 4, w1=4)


@pytest.mark.parametrize(
    "part",
    [
        PartReport("../part"), PartReport("a/b"), PartReport("/etc/passwd"), PartReport(".."),
        PartReport("manifest.json"), PartReport("part", bases=("../00000007-abc",)),
        PartReport("part", bases=("00000007-abc", "elsewhere")),
    ],
)  # fmt: skip
def test_a_report_names_no_file_elsewhere(part: PartReport) -> None:
    """What it names is opened by the scheduler, now or when its worker has left."""
    cluster = Saving()
    cluster.cut()
    report = cluster.cluster.report_part
    server, worker = cluster.servers[0], cluster.workers[0]
    for session, number in ((server, 7), (worker, 7), (worker, 0)):
        call = partial(report, session, number, part)
        refused(errors.InvalidConfig, "expected the", by=call, of=cluster)


def test_who_has_no_part_in_it_is_told() -> None:
    cluster = Saving(max_workers=3)
    cluster.cut()
    late, reader = cluster.worker(), cluster.join(Role.READER)
    report = cluster.cluster.report_part
    part = PartReport("worker")
    refused(
        errors.InvalidConfig, "worker 2 is not in checkpoint 7",
        by=lambda: report(late, 7, part), of=cluster,
    )  # fmt: skip
    refused(errors.NotPermitted, "reader", by=lambda: report(reader, 7, part), of=cluster)
    refused(
        errors.NotPermitted, "JoinCheckpoint is for workers",
        by=lambda: cluster.cluster.join_checkpoint(cluster.servers[0], 7, {}, has_state=False),
        of=cluster,
    )  # fmt: skip


def test_one_that_is_not_cut_in_time_is_given_up_and_holds_nobody() -> None:
    cluster = Saving()
    cluster.begin()
    cluster.promise(0, 5, 4)
    cluster.answer(0, 5, 4)
    everybody = (*cluster.servers, *cluster.workers)
    cluster.pass_time(limits.CHECKPOINT_CUT_S - 1, *everybody)
    assert not cluster.happened(CheckpointFailed)
    cluster.pass_time(1, *everybody)
    cluster.check_failed("waits for the clocks of worker node 4")
    cluster.answer(1, 5, 4)
    cluster.promise(1, 5, 4)
    assert cluster.begin().number == 8


def test_one_that_is_not_written_in_time_is_given_up() -> None:
    cluster = Saving()
    cluster.cut()
    cluster.note(cluster.cluster.tick(cluster.now_s + limits.CHECKPOINT_WRITTEN_S - 1))
    assert cluster.checkpoint is not None
    cluster.note(cluster.cluster.tick(cluster.now_s + limits.CHECKPOINT_WRITTEN_S))
    cluster.transitions = cluster.happened(CheckpointFailed)
    cluster.check_failed("waits for the files of server node 1")


@pytest.mark.parametrize("is_cut", [False, True])
def test_one_fails_when_a_range_has_another_primary(is_cut: bool) -> None:
    cluster = Saving(replica_count=2)
    if is_cut:
        cluster.cut()
    else:
        cluster.begin()
        cluster.promise(0, 5, 4)
    cluster.pass_time(4, cluster.servers[0], *cluster.workers)
    cluster.check_failed("a server was lost")
    number = cluster.cluster.view.view_number
    cluster.pass_time(1, cluster.servers[0], *cluster.workers)
    assert cluster.cluster.view.view_number == number


def test_a_view_that_is_full_takes_no_cuts() -> None:
    """VS-1: a view beyond gRPC's limit reaches nobody."""
    cluster = Saving()
    settings, state = cluster.cluster.settings, cluster.cluster._state
    taken_bytes = view_size.free_bytes(settings, state) - 2 * view_size.CHANGE_BYTES
    state.view_bytes += taken_bytes + 1
    pending = cluster.begin()
    assert (pending.number, cluster.checkpoint) == (0, None)
    assert "the cuts of 2 tables take" in pending.reason
    state.view_bytes -= 1
    assert cluster.begin().number == 7
    assert view_size.free_bytes(settings, state) == 0


def test_the_bound_of_a_view_with_cuts_is_above_its_size() -> None:
    """VS-1, of real messages with the widest numbers."""
    huge = 2**53 - 1
    cluster = Saving(workers=2)
    view = cluster.cluster.view
    for table in view.tables:
        alone = wire.table_to_proto(table).ByteSize()
        widest = replace(table, cut=TableCut(2**32 - 1, huge), restored_clock=huge)
        wider = wire.table_to_proto(widest).ByteSize() - alone
        assert wider <= view_size.CUT_BYTES
        proposed = TableChange(
            2**32 - 1, huge, parsed("ssp:999998..1000000@999999"), None, 2**32 - 1
        )
        both = replace(table, change=replace(proposed, checkpoint=0), proposed=proposed)
        assert wire.table_to_proto(both).ByteSize() - alone <= view_size.CHANGE_BYTES
    url = "x" * limits.MAX_CHECKPOINT_URL_BYTES
    directory = url + "/" + "d" * (limits.CHECKPOINT_DIRECTORY_BYTES - 1)
    empty = replace(view, nodes=(), tables=())
    full = replace(
        empty, checkpoint=Checkpoint(2**32 - 1, directory, is_cut=True), restored_from=directory
    )
    bound = view_size.fixed_bytes(view.cluster_id, len(view.ranges), 1)
    assert wire.view_to_proto(full).ByteSize() <= bound
