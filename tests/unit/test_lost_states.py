"""Workers' states that a checkpoint lacks: where it fails, and where it is complete."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.cluster_view import Session
from ps_core.manifest import PartReport, ReportedTable
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import TableSpec
from scheduler.machine.checkpoint_state import CheckpointFailed, CheckpointWritten
from scheduler.machine.checkpoints import LEAVING
from scheduler.machine.cluster import Created, Parked
from tests.unit.cluster_harness import SPEC
from tests.unit.test_cluster_checkpoints import MODEL, OTHER, Saving

FULL = PartReport(problem="the disk is full")
WHOLE = PartReport("worker", 9, "cd", has_parameters=True)


class Aggregating(Saving):
    """The workers have the parameters."""

    def create(self, session: Session, spec: TableSpec = SPEC) -> Created | Parked:
        return super().create(
            session, replace(spec, optimizer=OptimizerSpec(OptimizerKind.AGGREGATE))
        )


def leave(cluster: Saving, worker: int, part: PartReport) -> None:
    tables = {MODEL: ReportedTable(0, 5), OTHER: ReportedTable(0, 4)} if part.file else {}
    cluster.report(cluster.workers[worker], replace(part, tables=tables), LEAVING)
    cluster.leave(cluster.workers[worker])


def made(cluster: Saving, *parts: tuple[int, PartReport], number: int = 7) -> str:
    """What comes of a checkpoint for which these workers report: empty if it is complete."""
    cluster.transitions.clear()
    assert cluster.begin().number == number
    for server in (0, 1):
        cluster.promise(server, 5, 4)
    for worker, _ in parts:
        cluster.answer(worker, 5, 4, number=number)
    for server in (0, 1):
        cluster.report(cluster.servers[server], cluster.written(server), number)
    for worker, part in parts:
        cluster.report(cluster.workers[worker], part, number)
    if cluster.happened(CheckpointWritten):
        cluster.note(cluster.cluster.end_checkpoint(number, ""))
        return ""
    (failed,) = cluster.happened(CheckpointFailed)
    assert isinstance(failed.reason, str)
    return failed.reason


@pytest.mark.parametrize("kind", [Saving, Aggregating])
def test_who_cannot_write_fails_it_and_the_next_is_made(kind: type[Saving]) -> None:
    """Whoever else has written: the one before is whole, and this one would not be."""
    cluster = kind()
    assert made(cluster, (0, WHOLE), (1, FULL)) == "worker 1: the disk is full"
    assert cluster.checkpoint is None
    assert made(cluster, (0, WHOLE), (1, WHOLE), number=8) == ""


def test_who_left_and_could_not_write_fails_none_whose_parameters_the_servers_have() -> None:
    """No later one could have its state, and each is to have the parameters."""
    cluster = Saving()
    leave(cluster, 0, FULL)
    assert made(cluster, (1, PartReport("worker", 9, "cd"))) == ""
    leave(cluster, 1, FULL)
    assert made(cluster, number=8) == ""


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("kind", [Saving, Aggregating])
def test_none_is_made_without_the_parameters(kind: type[Saving], dies: bool) -> None:
    """CP-3: Aggregate's tables say that workers have them, and so does a worker's report."""
    cluster = kind()

    def end(worker: int) -> None:
        if dies:
            cluster.die(cluster.workers[worker])
        else:
            leave(cluster, worker, replace(FULL, has_parameters=kind is Saving))

    assert made(cluster, (0, WHOLE), (1, WHOLE)) == ""
    end(0)
    assert made(cluster, (1, WHOLE), number=8) == "", "the other has the parameters"
    end(1)
    reason = made(cluster, number=9)
    assert "no worker's state is in it, and only the workers have parameters" in reason
    assert ("worker 0: the disk is full, worker 1: the disk is full" in reason) is not dies


def test_what_a_worker_wrote_when_it_left_has_the_parameters() -> None:
    cluster = Aggregating()
    cluster.die(cluster.workers[0])
    leave(cluster, 1, WHOLE)
    assert made(cluster) == ""
    assert not cluster.cluster.checkpoints.parameters_are_lost


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("kind", [Saving, Aggregating])
def test_once_all_have_ended_and_left_none_the_parameters_are_lost(
    kind: type[Saving], dies: bool
) -> None:
    """No later scheduler could save them, so the cluster may end."""
    cluster = kind()
    for worker in cluster.workers:
        assert not cluster.cluster.checkpoints.parameters_are_lost
        if dies:
            cluster.die(worker)
        else:
            leave(cluster, cluster.workers.index(worker), FULL)
    assert cluster.cluster.checkpoints.parameters_are_lost is (kind is Aggregating)


def test_workers_without_a_state_lack_none() -> None:
    cluster = Aggregating()
    for worker in cluster.workers:
        cluster.report(worker, PartReport(), LEAVING)
        cluster.leave(worker)
    assert made(cluster) == ""
    assert not cluster.cluster.checkpoints.parameters_are_lost
