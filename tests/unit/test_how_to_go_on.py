"""The checkpoint that `pushpull train` names when its run has failed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ps_cli.console.output import Output
from ps_cli.train.run_checkpoints import RunBeginning, tell_how_to_go_on
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.launch.cluster_shape import CheckpointPlan
from tests.unit.checkpoint_files import CLUSTER_ID, write_checkpoint

FIRST, LEFT_BEHIND, PRESENT = (bytes([each]) * 16 for each in (1, 2, 3))


def told(root: Path, beginning: RunBeginning, capsys: pytest.CaptureFixture[str]) -> str:
    with Output() as output:
        tell_how_to_go_on(CheckpointPlan(str(root)), (), beginning, output)
    return capsys.readouterr().err.strip()


def test_a_branch_that_a_restore_has_left_behind_is_not_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Restored twice to the same checkpoint: numbers grow, whatever was restored."""
    store = CheckpointStore(str(tmp_path))
    urls = []
    for number, timeline in enumerate((FIRST, FIRST, LEFT_BEHIND), 1):
        directory = store.directory(number, CLUSTER_ID)
        directory.write_manifest(replace(write_checkpoint(directory, number), timeline=timeline))
        urls.append(directory.url)
    words = "pushpull: to go on from its newest checkpoint: --resume "
    beginning = RunBeginning(CLUSTER_ID, urls[0], PRESENT)
    again = f"pushpull: it has made no checkpoint; to begin where it began: --resume {urls[0]}"
    assert told(tmp_path, beginning, capsys) == again, "its script may refuse that one"
    assert told(tmp_path, replace(beginning, timeline=FIRST), capsys) == words + urls[1]
    assert told(tmp_path, RunBeginning(), capsys) == ""
    directory = store.directory(4, CLUSTER_ID)
    directory.write_manifest(replace(write_checkpoint(directory, 4), timeline=PRESENT))
    assert told(tmp_path, beginning, capsys) == words + directory.url
