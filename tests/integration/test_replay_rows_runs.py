"""`pushpull replay` of rows of a cluster that is restored while it runs, and has several runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import ps_worker as ps
from ps_runtime.launch.cluster_shape import CheckpointPlan, ClusterShape, UpdateLogPlan
from tests.integration.command_line import run_here
from tests.integration.rows_alone import Rows

pytestmark = [pytest.mark.timeout(180), pytest.mark.thorough]

IDS, DIM = 600, 64
NORM = 0.05
"""Of the clipped gradients: all are longer."""

BOUND_MB = 2
"""So small that a server with two of the three partitions begins a segment in each timeline, and so
large that none goes.
"""


class Taste(nn.Module):
    """Rows below a layer."""

    def __init__(self, client: ps.Client) -> None:
        super().__init__()
        rows: dict[str, Any] = {"partitions": 3, "max_rows": 400, "init": ps.Uniform(0.5)}
        self.users = ps.Embedding(client, "users", DIM, optimizer=ps.Adam(lr=0.1), **rows)
        torch.manual_seed(0)
        self.head = nn.Linear(DIM, 1)

    def forward(self, users: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.users(users))
        return scores.sum()


class Training:
    """One worker, whose updates are clipped: they wait for their scale."""

    def __init__(self, client: ps.Client) -> None:
        self._client = client
        self._model = Taste(client)
        self._optimizer = ps.DistributedOptimizer(
            client, self._model, ps.Adam(lr=0.01), clip_norm=NORM
        )

    def steps(self, count: int) -> Rows:
        """Take some; the rows at the end."""
        for _ in range(count):
            draws = torch.Generator().manual_seed(self._optimizer.clock)
            self._optimizer.zero_grad()
            self._model(torch.randint(IDS, (IDS // 2,), generator=draws)).backward()
            self._optimizer.step()
        return np.array(self._client.pull_rows(self._client.table("users"), np.arange(IDS)))


@dataclass
class Restored:
    """What was left of a cluster that still runs.

    Attributes:
        checkpoints: before the restore, after it, and after a run was removed.
        pulled: of `users` at the end, and of the table of this name in the run 'nightly'.
    """

    logs: Path
    checkpoints: list[str]
    pulled: list[Rows]


@pytest.fixture(scope="module")
def restored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restored]:
    root = tmp_path_factory.mktemp("restored")
    logs = root / "logs"
    shape = ClusterShape(
        2,
        1,
        checkpoints=CheckpointPlan(str(root / "checkpoints")),
        update_log=UpdateLogPlan(str(logs), BOUND_MB),
    )
    with ps.LocalCluster.of(shape) as cluster:
        client = ps.connect(cluster.address)
        training = Training(client)
        training.steps(4)
        checkpoints = [client.checkpoint().wait().url]
        training.steps(3)  # of which the restore leaves nothing
        client = client.restore(checkpoints[0])
        training = Training(client)
        training.steps(5)
        checkpoints.append(client.checkpoint().wait().url)
        nightly = one_night(cluster.address)
        ended = run_here("runs", "remove", "nightly", "--scheduler", cluster.address, cwd=root)
        assert ended.returncode == 0, ended.stderr
        pulled = training.steps(8)
        checkpoints.append(client.checkpoint().wait().url)
        yield Restored(logs, checkpoints, [pulled, nightly])
        client.close()


def one_night(address: str) -> Rows:
    """Three steps of a run with a table of the same name."""
    with ps.connect(address, run="nightly", world_size=1) as worker:
        table = worker.create_embedding("users", 4, optimizer=ps.FTRL(lr=0.3), partitions=2)
        draws = np.random.default_rng(0)
        for _ in range(3):
            rows = draws.standard_normal((20, 4)).astype(np.float32)
            worker.wait(worker.push_rows(table, draws.integers(IDS, size=20), rows))
        return np.array(worker.pull_rows(table, np.arange(IDS)))


def check_export(logs: Path, pattern: str, pulled: Rows, cwd: Path) -> str:
    """Its rows are those that were pulled; what the command complains of."""
    ended = run_here("replay", str(logs), "--table", pattern, "--export", "model", cwd=cwd)
    assert ended.returncode == 0, ended.stderr
    found = safetensors.torch.load_file(cwd / "model")
    ids = found["users/ids"].numpy()
    assert 0 < len(ids) == len(set(ids.tolist())) < IDS
    assert found["users/rows"].numpy().tobytes() == pulled[ids].tobytes()
    return ended.stderr


def test_the_newest_timeline_is_replayed(restored: Restored, tmp_path: Path) -> None:
    """It begins with the restored rows."""
    said = check_export(restored.logs, "users", restored.pulled[0], tmp_path)
    assert said == f"pushpull: 1 earlier runs in {restored.logs} are passed over\n"


@pytest.mark.parametrize("which", [1, 2])
def test_it_is_what_a_checkpoint_has(restored: Restored, which: int, tmp_path: Path) -> None:
    url = restored.checkpoints[which]
    command = "replay", str(restored.logs), "--against", url
    for pattern in ("users", "model*"):
        ended = run_here(*command, "--table", pattern, cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "equal, bit for bit, at clock " in ended.stdout


def test_a_run_that_was_removed_is_still_in_the_log(restored: Restored, tmp_path: Path) -> None:
    check_export(restored.logs, "nightly:*", restored.pulled[1], tmp_path)
    both = run_here("replay", str(restored.logs), "--table", "*[:u]*", cwd=tmp_path)
    assert both.returncode == 2
    assert "matches tables of run 'nightly' and of the run without a name" in both.stderr
    command = "replay", str(restored.logs), "--against", restored.checkpoints[2]
    unnamed = run_here(*command, cwd=tmp_path)
    assert unnamed.returncode == 0, unnamed.stderr
    assert unnamed.stdout.count("equal, bit for bit, at clock ") == 2
    assert "run 'nightly': its tables are left out without --table\n" in unnamed.stderr


def test_a_clipped_gradient_has_the_norm_that_it_was_cut_to(
    restored: Restored, tmp_path: Path
) -> None:
    """That of rows and parameters together: their sums wait in the log for the update's scale."""
    command = "--table", "[um][so][ed][re]*", "--every", "1", "--json", "shown.json"
    ended = run_here("replay", str(restored.logs), *command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    versions = json.loads((tmp_path / "shown.json").read_text())["versions"]
    assert [each["clock"] for each in versions] == list(range(4, 18))
    norms = [each["gradient_norm"] for each in versions[1:]]
    assert norms == pytest.approx([NORM] * 13, rel=1e-4)
    assert all(0 < each["row_count"] <= 402 for each in versions)


def test_a_log_whose_beginning_is_gone_begins_with_snapshots(
    restored: Restored, tmp_path: Path
) -> None:
    """As when the bound has dropped it: the rows come from these."""
    copied = Path(shutil.copytree(restored.logs, tmp_path / "logs"))
    by_server = [sorted(directory.glob("*.log")) for directory in copied.iterdir()]
    *earlier, newest = max(by_server, key=len)
    assert len(earlier) > 1, "one of the timeline before, and one of this"
    for segment in earlier:
        segment.unlink()
    check_export(copied, "users", restored.pulled[0], tmp_path)
    first = run_here("replay", str(copied), "--table", "users", cwd=tmp_path)
    assert "the log has versions 4 to " not in first.stdout
    assert newest.exists()
