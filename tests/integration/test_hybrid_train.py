"""A hybrid run under `pushpull train`, to which everything happens that it must survive."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ps_core.errors import InvalidCheckpoint
from ps_runtime.checkpoint.reader import CheckpointReader
from ps_runtime.checkpoint.store import CheckpointStore
from tests.integration.command_line import Tool, run_here
from tests.integration.lane_cluster import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ENDS_WITHIN_S = 40.0

SCRIPT = """
import torch
import pushpull as ps

with ps.connect() as client:
    rows = ps.Embedding(client, "rows", 4, optimizer=ps.Adagrad(lr=0.1), init=ps.Normal(0.1))
    torch.manual_seed(0)
    model = torch.nn.Sequential(rows, torch.nn.Linear(4, 1))
    local = torch.optim.Adam(model[1].parameters(), lr=0.01)
    optimizer = ps.HybridOptimizer(client, model, local)
    print(f"begins at step {optimizer.clock}")
    while True:
        draws = torch.Generator().manual_seed(2 * optimizer.clock + client.rank)
        optimizer.zero_grad()
        (model(torch.randint(40, (8,), generator=draws)) - 1.0).square().mean().backward()
        optimizer.step()
        if optimizer.clock % 20 == 0:
            print(f"took step {optimizer.clock}")
"""


def good(root: str) -> int:
    """The number of good checkpoints."""
    entries = CheckpointStore(root).entries()
    return sum(not isinstance(found, InvalidCheckpoint) for _, found in entries)


def steps_of(reader: CheckpointReader) -> tuple[int, list[int | None]]:
    """The step of the servers' half of a checkpoint, and of each worker's."""
    parts = [reader.headers[worker.file].worker for worker in reader.manifest.workers]
    halves = [None if part is None else part.state["hybrid/model"]["clock"] for part in parts]
    return reader.manifest.table("rows").clock, halves


@pytest.mark.thorough
def test_what_a_hybrid_run_survives_and_what_ends_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    root = str(tmp_path / "runs")
    arguments = (
        *("train", "train.py", "-w", "2", "-s", "2", "--replicas", "2", "--lease-s", "2"),
        *("--checkpoint-url", root, "--checkpoint-every", "20"),
    )
    with Tool(*arguments, cwd=tmp_path, is_warm=True) as tool:
        address = tool.wait_for(r"scheduler at (\S+:\d+);").group(1)

        def set_rows(consistency: str) -> None:
            command = "tables", "set", "rows", consistency, "--scheduler", address
            until(  # a scheduler that is back has not heard of every server yet
                lambda: run_here(*command, cwd=tmp_path).returncode == 0, f"rows are {consistency}"
            )

        def more_steps() -> None:
            tool.wait_for("took step", tool.text.count("took step") + 2)

        tool.wait_for("begins at step 0", count=2)
        until(lambda: good(root) >= 1, "a checkpoint under bsp")
        set_rows("asp")
        more_steps()
        under_bsp = good(root)
        until(lambda: good(root) >= under_bsp + 2, "checkpoints under asp")
        os.kill(tool.role_pids()["scheduler"][0], signal.SIGKILL)
        tool.wait_for("scheduler was killed by SIGKILL; it goes on from its journal")
        more_steps()
        set_rows("bsp")
        more_steps()
        os.kill(tool.role_pids()["server"][0], signal.SIGKILL)
        tool.wait_for("was killed by SIGKILL; its ranges go on at their backups")
        more_steps()
        tool.process.send_signal(signal.SIGINT)
        tool.wait_for("making a last checkpoint")
        assert tool.end(ENDS_WITHIN_S) == 130, tool.text
    assert "Traceback" not in tool.text
    last = 0
    for name, manifest in CheckpointStore(root).entries():
        assert not isinstance(manifest, InvalidCheckpoint), name
        with CheckpointStore(root).open(name) as reader:
            last, halves = steps_of(reader)
            assert halves == [last, last], name
    with Tool(*arguments, "--resume", root, cwd=tmp_path, is_warm=True) as tool:
        tool.wait_for(rf"begins at step {last}\b", count=2)
        os.kill(tool.role_pids()["worker"][1], signal.SIGKILL)
        assert tool.end(ENDS_WITHIN_S) == 1, tool.text
    assert "ended with signal 9 (SIGKILL) and the run cannot go on" in tool.text
    newest = CheckpointStore(root).newest_good()
    assert newest is not None
    assert f": --resume {newest.url}\n" in tool.text


@pytest.mark.thorough
def test_workers_that_end_together_use_up_one_restart(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = ("train", "train.py", "-w", "2", "-s", "1", "--max-restarts", "3")
    with Tool(*arguments, cwd=tmp_path, is_warm=True) as tool:
        tool.wait_for("took step", 2)
        os.kill(tool.role_pids()["worker"][1], signal.SIGKILL)
        assert tool.end(ENDS_WITHIN_S) == 1, tool.text
    assert tool.text.count("is started again") == tool.text.count("restart 1 of 3") <= 2
    assert "WorkerLost: worker 1 was declared gone" in tool.text
    assert "ended with exit code 2 after 1 restarts (see --max-restarts) and the run" in tool.text
    assert "takes nobody in: start all workers again" in tool.text
