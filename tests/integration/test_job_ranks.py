"""Workers that take their rank from the job that they are started in: torchrun's for real."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pushpull as ps
from pushpull.errors import InvalidConfig
from pushpull.types import LocalCluster
from tests.integration.command_line import environment

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0

SCRIPT = """
import os
import pushpull as ps

with ps.connect() as client:
    print(f"rank {client.rank} of {client.world_size}, torchrun's {os.environ.get('RANK')}")
"""

SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with ps.local_cluster(workers=2) as cluster:
        yield cluster


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(
    *command: str, cluster: LocalCluster, folder: Path, **added: str
) -> subprocess.CompletedProcess[str]:
    """A command that joins the cluster."""
    variables = environment() | {"PUSHPULL_SCHEDULER": cluster.address, **added}
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=DEADLINE_S,
        check=False,
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_torchruns_processes_have_its_ranks(cluster: LocalCluster, script: Path) -> None:
    done = run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("--no-python", sys.executable, "-m", "pushpull", "worker", str(script)),
        cluster=cluster, folder=script.parent, SLURM_PROCID="0", SLURM_STEP_ID="0",
        SLURM_NTASKS="1",  # of the machine
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert said == ["rank 0 of 2, torchrun's 0", "rank 1 of 2, torchrun's 1"]


@pytest.mark.thorough
def test_a_line_says_which_rank_was_taken(cluster: LocalCluster, script: Path) -> None:
    done = run(
        *(sys.executable, "-m", "pushpull", "worker", "--log-level", "info", str(script)),
        cluster=cluster, folder=script.parent, **SRUN,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("rank 1 of 2")
    expected = 'worker-1 event=rank_of_job rank=1 workers=2 source="SLURM_PROCID and SLURM_NTASKS'
    assert expected in done.stderr


def test_a_job_of_fewer_workers_than_the_cluster_waits_for_is_refused_at_once(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    refused = (
        r"the job has 1 workers .* started for 2 workers: start its scheduler with .*Slurm\)\. If "
        r"these do not count workers, give rank=, --rank or PUSHPULL_RANK, or unset them"
    )
    with pytest.raises(InvalidConfig, match=refused):
        ps.connect(cluster.address)
    with ps.connect(cluster.address, rank=0) as client:  # said to pushpull: the job is not asked
        assert client.rank == 0


@pytest.mark.thorough
def test_a_rank_that_two_have_is_refused_with_its_source(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    with (
        ps.connect(cluster.address),
        pytest.raises(InvalidConfig, match=r"rank 1 is taken.*SLURM_PROCID and SLURM_NTASKS"),
    ):
        ps.connect(cluster.address)
    assert os.environ["SLURM_PROCID"] == "1"
