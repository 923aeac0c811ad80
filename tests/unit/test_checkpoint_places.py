"""Whether anything can be written where checkpoints are to go, and what a run hears of failures."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from ps_cli.console.output import Output
from ps_cli.train.run_checkpoints import CheckpointWatch
from ps_core.errors import InvalidCheckpoint
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.system.disk import Payload
from pushpull.v1 import scheduler_pb2
from scheduler.edge.restoring import checkpoints_under
from tests.unit.checkpoint_files import CLUSTER_ID, write_checkpoint
from tests.unit.power_cut import RecordingDisk, restart_after


class FullDisk(RecordingDisk):
    """One that takes no byte."""

    def write(self, descriptor: int, payload: Payload, offset: int) -> None:
        del descriptor, payload, offset
        raise OSError(28, "No space left on device")


def test_a_place_is_made_and_left_empty(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "7"
    CheckpointStore(str(root)).check_writable()
    assert root.is_dir()
    assert list(root.iterdir()) == []
    assert checkpoints_under(str(root)) == (str(root), 0)


def test_a_place_that_was_made_is_there_after_a_power_cut(tmp_path: Path) -> None:
    """And so is the checkpoint in it. The scheduler tries the place out before anybody writes."""
    before, after, disk = tmp_path / "before", tmp_path / "after", RecordingDisk()
    before.mkdir()
    store = CheckpointStore(str(before / "runs" / "7"), disk)
    store.check_writable()
    write_checkpoint(store.directory(1, CLUSTER_ID), 1, disk)
    restart_after(disk.operations, before, 0, 0.0, after)
    assert CheckpointStore(str(after / "runs" / "7")).newest_good() is not None


def test_a_place_that_cannot_be_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidCheckpoint) as refused:
        checkpoints_under(str(tmp_path / "file" / "runs"))
    assert f"{tmp_path}/file/runs cannot be written to: Not a directory" in refused.value.message
    assert "give another --checkpoint-url, or none" in refused.value.message


def test_a_full_disk_is_found_and_nothing_is_left_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="No space left on device"):
        CheckpointStore(str(tmp_path), FullDisk()).check_writable()
    assert list(tmp_path.iterdir()) == []


def test_a_place_elsewhere_is_tried_too() -> None:
    CheckpointStore("memory://runs/7").check_writable()
    with pytest.raises(InvalidCheckpoint, match="cannot be written"):
        CheckpointStore("data://runs/7").check_writable()


def test_each_failure_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    watch = CheckpointWatch(Output(io.StringIO()))

    def heard(failed_count: int, number: int = 0, reason: str = "") -> str:
        watch.observe(
            scheduler_pb2.CheckpointHistory(
                failed_count=failed_count, failed_number=number, failed_reason=reason
            )
        )
        return capsys.readouterr().err

    assert heard(0) == ""
    assert heard(1, 3, "the disk is full") == "pushpull: checkpoint 3 failed: the disk is full\n"
    assert heard(1, 3, "the disk is full") == ""
    assert heard(3, 5, "so it is") == "pushpull: checkpoint 5 failed (and 1 before it): so it is\n"
    assert watch.failed_count == 3
    assert heard(0) == "", "a restored cluster begins to count anew"
    assert heard(1, 6, "still") == "pushpull: checkpoint 6 failed: still\n"
    assert watch.failed_count == 4
