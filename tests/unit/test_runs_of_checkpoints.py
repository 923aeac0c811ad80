"""Checkpoints of several runs under one URL: each cluster keeps to its own."""

from __future__ import annotations

import io
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from ps_cli.console.output import Output
from ps_cli.train.run_checkpoints import earlier_checkpoints
from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.manifest import MANIFEST_FILE, Manifest
from ps_runtime.checkpoint.pruning import RunTimelines, prune
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.launch.cluster_shape import CheckpointPlan
from scheduler.edge.restoring import AUTO, restored_at_start, run_of
from scheduler.machine.state import Restored
from tests.unit.checkpoint_files import CLUSTER_ID, write_checkpoint
from tests.unit.cluster_harness import Harness

FIRST, SECOND, THIRD = b"1" * 16, b"2" * 16, b"3" * 16
"""Timelines of three clusters."""


def written(store: CheckpointStore, number: int, timeline: bytes, *lineage: bytes) -> Manifest:
    """A good checkpoint of a timeline. All are of clusters with one id, as where it is configured:
    names tell nothing.
    """
    directory = store.directory(number, CLUSTER_ID)
    told = replace(write_checkpoint(directory, number), timeline=timeline, lineage=lineage)
    directory.write_manifest(told)
    return told


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path))


def test_retention_leaves_other_runs_alone(store: CheckpointStore) -> None:
    """A scheduler that was started again with nothing must not remove what was before it."""
    for number in (1, 2, 3):
        written(store, number, FIRST)
    for number in (4, 5, 6):
        written(store, number, SECOND)
    before = store.names()
    assert prune(store, 1, RunTimelines({THIRD})) == []
    assert prune(store, 2, RunTimelines({SECOND})) == [before[3]]
    assert store.names() == [*before[:3], *before[4:]]


def test_what_a_run_went_on_from_is_its_own(store: CheckpointStore) -> None:
    written(store, 1, FIRST)
    written(store, 2, FIRST)
    written(store, 3, SECOND, FIRST)
    written(store, 4, THIRD)
    before = store.names()
    assert prune(store, 1, RunTimelines({SECOND, FIRST})) == before[:2]


def test_a_branch_that_a_restore_has_left_behind_is_the_runs_own(store: CheckpointStore) -> None:
    """Restored twice to one. A cluster that began anew with nothing since is another run."""
    before = written(store, 1, b"0" * 16)
    source = written(store, 2, FIRST)
    left = [written(store, number, SECOND, FIRST) for number in (3, 4)]
    elsewhere = written(store, 5, b"4" * 16, FIRST)  # another cluster went on from it as well
    newest = written(store, 6, THIRD, FIRST)
    run = RunTimelines({THIRD, FIRST}, {b"0" * 16, FIRST, SECOND})
    assert prune(store, 1, run, source.directory) == [each.directory for each in left]
    stay = before, source, elsewhere, newest
    assert store.names() == [each.directory for each in stay]


def test_so_is_a_branch_that_earlier_clusters_had_made(store: CheckpointStore) -> None:
    """Which the cluster went on from, and which the restore took it back behind."""
    source = written(store, 1, FIRST)
    left = written(store, 2, SECOND, FIRST)
    written(store, 3, b"5" * 16, FIRST)
    own = Restored(left.directory, {}, lineage=(SECOND, FIRST))
    cluster = Harness(timeline=b"4" * 16, restored=own).cluster
    back = Restored(source.directory, {}, lineage=(FIRST,))
    settings = cluster.in_new_timeline(back, b"5" * 16, b"k" * 32)
    assert prune(store, 1, run_of(settings), source.directory) == [left.directory]


def test_one_that_was_given_up_goes_with_its_cluster(store: CheckpointStore) -> None:
    """It has no manifest that says whose it is; the name of its directory does."""
    given_up, foreign = store.directory(1, CLUSTER_ID), store.directory(2, "99999999")
    given_up.create()
    foreign.create()
    gone = written(store, 3, SECOND)
    newest = written(store, 4, SECOND)
    assert prune(store, 1, RunTimelines({SECOND})) == [given_up.name, gone.directory]
    assert store.names() == [foreign.name, newest.directory]


def test_runs_are_told_apart(store: CheckpointStore) -> None:
    written(store, 1, FIRST)
    second = written(store, 2, SECOND)
    third = written(store, 3, THIRD, FIRST)
    assert list(store.runs().values()) == [second.directory, third.directory]


class TestAuto:
    def test_nothing_is_there_yet(self, store: CheckpointStore) -> None:
        assert restored_at_start(AUTO, store.url) is None
        store.directory(1, "99999999").create()  # was never complete
        assert restored_at_start(AUTO, store.url) is None

    def test_the_newest_is_gone_on_from(self, store: CheckpointStore) -> None:
        written(store, 1, FIRST)
        newest = written(store, 2, SECOND, FIRST)
        restored = restored_at_start(AUTO, store.url)
        assert restored is not None
        assert restored.url.endswith(newest.directory)
        assert restored.lineage == (SECOND, FIRST)

    def test_what_is_damaged_does_not_count_as_nothing(
        self, store: CheckpointStore, tmp_path: Path
    ) -> None:
        manifest = written(store, 1, FIRST)
        place = tmp_path / manifest.directory / manifest.parts[0].file
        place.write_bytes(place.read_bytes()[:-1])
        with pytest.raises(InvalidCheckpoint, match="has no good checkpoint"):
            restored_at_start(AUTO, store.url)

    @pytest.mark.parametrize("damaged", [b"{", b"\xff", b'{"version": 99}'])
    def test_a_manifest_that_cannot_be_read_does_not_count_as_nothing(
        self, damaged: bytes, store: CheckpointStore, tmp_path: Path
    ) -> None:
        """Also one of a newer version, where the image was rolled back."""
        place = tmp_path / written(store, 1, FIRST).directory / MANIFEST_FILE
        place.write_bytes(damaged)
        store.directory(2, CLUSTER_ID).create()  # was never complete
        with pytest.raises(InvalidCheckpoint, match="has no good checkpoint"):
            restored_at_start(AUTO, store.url)

    def test_it_needs_a_place(self) -> None:
        with pytest.raises(InvalidConfig, match="'auto' without a checkpoint_url"):
            restored_at_start(AUTO, "")

    @pytest.mark.parametrize("resume", ["", AUTO])
    def test_other_runs_are_named(
        self, resume: str, store: CheckpointStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = written(store, 1, FIRST)
        second = written(store, 2, SECOND)
        with caplog.at_level(logging.WARNING, "pushpull"):
            restored_at_start(resume, store.url)
        (said,) = [r.getMessage() for r in caplog.records if "other_runs_kept" in r.getMessage()]
        assert first.directory in said
        assert (second.directory in said) == (not resume)

    def test_a_branch_that_a_restore_left_behind_is_named(
        self, store: CheckpointStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nothing removes it from now on."""
        source = written(store, 1, FIRST)
        branch = written(store, 2, SECOND, FIRST)
        newest = written(store, 3, THIRD, FIRST)
        with caplog.at_level(logging.WARNING, "pushpull"):
            restored_at_start(AUTO, store.url)
        (said,) = [r.getMessage() for r in caplog.records if "other_runs_kept" in r.getMessage()]
        assert branch.directory in said
        assert source.directory not in said
        assert newest.directory not in said


def test_train_says_so_where_resume_was_forgotten(
    store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(plan: CheckpointPlan) -> str:
        earlier_checkpoints(plan, Output(io.StringIO()))
        return capsys.readouterr().err

    assert told(CheckpointPlan(store.url)) == ""
    newest = written(store, 1, FIRST)
    words = " ".join(told(CheckpointPlan(store.url)).split())
    assert f"the newest of them {newest.directory}" in words
    assert f"To go on from them: --resume {store.url}" in words
    assert told(CheckpointPlan(store.url, resume=store.url)) == ""
    assert told(CheckpointPlan()) == ""
