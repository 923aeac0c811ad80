"""What workers that have left had of their own, in the checkpoints that are made later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ps_core.cluster_view import Session
from ps_core.manifest import (
    Manifest,
    PartReport,
    ReportedTable,
    SavedWorker,
    left_directory_name,
    number_of,
)
from ps_runtime.checkpoint.directory import CheckpointDirectory, locate
from ps_runtime.checkpoint.part_file import StoredWorker
from ps_runtime.checkpoint.part_writer import WorkerTensor, write_worker_part
from ps_runtime.checkpoint.reader import CheckpointReader
from ps_runtime.checkpoint.worker_copies import SourceLost, WorkerCopies
from scheduler.machine.checkpoint_state import CheckpointWritten
from scheduler.machine.checkpoints import LEAVING
from tests.unit.checkpoint_files import CLUSTER_ID, manifest_of, write_checkpoint
from tests.unit.test_cluster_checkpoints import MODEL, OTHER, Saving

# --- which belong to a cut: clock 5 of the one table, 4 of the other


def left_behind(model: int = 5, other: int = 4) -> PartReport:
    tables = {MODEL: ReportedTable(0, model), OTHER: ReportedTable(0, other)}
    return PartReport("worker-of-old", 9, "cd", tables)


def complete(cluster: Saving, *workers: tuple[Session, PartReport]) -> CheckpointWritten:
    for server in (0, 1):
        cluster.report(cluster.servers[server], cluster.written(server))
    for worker, part in workers:
        cluster.report(worker, part)
    (written,) = cluster.happened(CheckpointWritten)
    assert isinstance(written, CheckpointWritten)
    return written


def cut_without(cluster: Saving, leaver: int) -> None:
    """Only the other worker is asked."""
    assert cluster.begin().number == 7
    for server in (0, 1):
        cluster.promise(server, 5, 4)
    cluster.answer(1 - leaver, 5, 4)


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_left_before_has_what_it_wrote_then(leaver: int) -> None:
    cluster = Saving()
    part = left_behind()
    cluster.report(cluster.workers[leaver], part, LEAVING)
    cluster.leave(cluster.workers[leaver])
    cut_without(cluster, leaver)
    other = cluster.workers[1 - leaver]
    written = complete(cluster, (other, PartReport("worker-1", 9, "cd")))
    assert written.attempt.left == {leaver: part}


def test_who_left_with_nothing_to_write_has_nothing_in_it() -> None:
    cluster = Saving()
    cluster.report(cluster.workers[0], PartReport(), LEAVING)
    cluster.leave(cluster.workers[0])
    cut_without(cluster, 0)
    part = PartReport("worker-1", 9, "cd")
    assert complete(cluster, (cluster.workers[1], part)).attempt.left == {}


def test_who_leaves_while_it_is_made_has_its_own_or_what_it_wrote_then() -> None:
    cluster = Saving()
    cluster.cut()
    own = PartReport("worker-0", 9, "cd")
    for worker in cluster.workers:
        cluster.report(worker, left_behind(), LEAVING)
    cluster.report(cluster.workers[0], own)
    for worker in cluster.workers:
        cluster.leave(worker)
    attempt = complete(cluster).attempt
    assert attempt.parts[cluster.workers[0].node_id] == own
    assert attempt.left == {1: left_behind()}


def test_all_may_have_left() -> None:
    cluster = Saving()
    for worker in cluster.workers:
        cluster.report(worker, left_behind(), LEAVING)
        cluster.leave(worker)
    cluster.begin()
    for server in (0, 1):
        cluster.promise(server, 5, 4)
    assert set(complete(cluster).attempt.left) == {0, 1}


@pytest.mark.parametrize(("model", "other"), [(6, 4), (5, 5)])
def test_a_step_beyond_the_cut_is_not_in_it(model: int, other: int) -> None:
    cluster = Saving()
    cluster.report(cluster.workers[0], left_behind(model, other), LEAVING)
    cluster.leave(cluster.workers[0])
    cut_without(cluster, 0)
    part = PartReport("worker-1", 9, "cd")
    assert complete(cluster, (cluster.workers[1], part)).attempt.left == {}


def test_who_has_not_left_has_its_state_as_of_the_cut_or_none() -> None:
    """It is about to, and dies: or its goodbye is not committed."""
    cluster = Saving()
    cluster.cut()
    cluster.report(cluster.workers[0], left_behind(), LEAVING)
    cluster.die(cluster.workers[0])
    attempt = complete(cluster, (cluster.workers[1], PartReport("worker-1", 9, "cd"))).attempt
    assert attempt.left == {}
    assert "was declared gone" in attempt.parts[cluster.workers[0].node_id].problem


def test_a_rank_has_nothing_of_whoever_had_it_before() -> None:
    """It was given to another, whose state is lost: that is said, and no older one put in its
    place.
    """
    cluster = Saving(max_workers=3)
    before = cluster.worker()
    for server in (0, 1):  # the change with which it joins
        cluster.promise(server, 1, 1)
    cluster.report(before, left_behind(), LEAVING)
    cluster.leave(before)
    cluster.begin()
    cluster.workers.append(cluster.worker())
    assert cluster.workers[2].rank == before.rank == 2
    for server in (0, 1):
        cluster.promise(server, 5, 4)
    for worker in (2, 0, 1):
        cluster.answer(worker, 5, 4)
    cluster.die(cluster.workers[2])
    whole = PartReport("worker", 9, "cd")
    attempt = complete(cluster, *((worker, whole) for worker in cluster.workers[:2])).attempt
    assert attempt.left == {}
    assert "was declared gone" in attempt.parts[cluster.workers[2].node_id].problem


# --- files


def worker_file(directory: CheckpointDirectory, rank: int = 1, clock: int = 41) -> SavedWorker:
    file = f"worker-{rank}-9.safetensors"
    directory.create()
    path = directory.begin(file)
    tensors = {"momentum": WorkerTensor("F32", (2,), np.ones(2, np.float32).tobytes())}
    worker = StoredWorker(rank, clock, {"seen": 3})
    written = write_worker_part(path, (LEAVING, CLUSTER_ID), worker, tensors)
    directory.commit(file, path)
    return SavedWorker(rank, clock, file, written.byte_count, written.header_sha256)


def test_a_copy_is_a_file_of_the_checkpoint(tmp_path: Path) -> None:
    left = CheckpointDirectory(locate(str(tmp_path / left_directory_name(CLUSTER_ID))))
    saved = worker_file(left)
    directory = CheckpointDirectory(locate(str(tmp_path / f"00000003-{CLUSTER_ID[:8]}")))
    manifest = write_checkpoint(directory, 3)
    copied = WorkerCopies(directory, manifest).copy_from(left, saved)
    workers = (manifest.workers[0], copied)
    directory.write_manifest(replace(manifest, workers=workers))
    with CheckpointReader(directory) as reader:
        header = reader.headers[saved.file]
        assert header.worker is not None
        assert (header.worker.rank, header.worker.clock) == (1, 41)
        assert header.worker.state == {"seen": 3}
        assert np.frombuffer(reader.read_file(saved.file, "momentum"), np.float32).sum() == 2


def test_what_is_not_as_it_was_reported_is_no_copy(tmp_path: Path) -> None:
    left = CheckpointDirectory(locate(str(tmp_path / "left")))
    saved = worker_file(left)
    directory = CheckpointDirectory(locate(str(tmp_path / f"00000003-{CLUSTER_ID[:8]}")))
    directory.create()
    copies = WorkerCopies(directory, _manifest())
    for wrong in (replace(saved, rank=0), replace(saved, clock=40)):
        with pytest.raises(SourceLost, match="it is of rank and clock"):
            copies.copy_from(left, wrong)
    with pytest.raises(SourceLost, match="SHA-256"):
        copies.copy_from(left, replace(saved, header_sha256="00" * 32))
    with pytest.raises(SourceLost, match="cannot be read"):
        copies.copy_from(left, replace(saved, file="worker-2-9.safetensors"))


def _manifest() -> Manifest:
    return manifest_of(3, ())


def test_where_they_wait_is_no_checkpoints_directory() -> None:
    name = left_directory_name("a/b-c-d-e-f-g")
    assert name == "left-a-b-c-d-"
    assert number_of(name) is None
