"""`pushpull bench` from the outside; `tests/bench` runs each of its benchmarks."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ps_cli.bench.catalogue import BENCHMARKS
from tests.bench.cli import bench_environment, run_cli
from tests.integration.lane_cluster import until

pytestmark = [pytest.mark.timeout(180), pytest.mark.thorough]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("speed",), ("'speed'", *BENCHMARKS)),
        (("dense", "--json", "missing/dense.json"), ("missing/dense.json",)),
        (("optimizers", "--quick", "--json", "."), (". cannot be written: Is a directory",)),
        (("dense", "--lane", "carrier"), ("'carrier'", "grpc")),
        (("train", "--device", "tpu"), ("'tpu'", "cpu", "cuda")),
        (("dense", "--device", "cuda"), ("'cuda'", "dense", "cpu")),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    arguments: tuple[str, ...], named: tuple[str, ...], tmp_path: Path
) -> None:
    run = run_cli(*arguments, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert all(word in run.stderr for word in named)


@pytest.mark.parametrize(
    "arguments",
    [("bench", "checkpoint", "--quick"), ("plan", "--measure", "costs"), ("plan", "--check")],
)
def test_a_benchmark_that_is_terminated_leaves_no_folder(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """As after Ctrl-C: SIGTERM is all that a job's end may send."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    running = subprocess.Popen(
        [sys.executable, "-m", "ps_cli", *arguments],
        cwd=tmp_path,
        env={**bench_environment(), "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: any(temporary.glob("pushpull-*")), "the benchmark has a folder")
    running.terminate()
    assert running.wait(60) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == [temporary]
    assert not list(temporary.iterdir())


def test_help_names_every_benchmark(tmp_path: Path) -> None:
    run = run_cli("--help", cwd=tmp_path)
    assert run.returncode == 0
    assert all(name in run.stdout for name in BENCHMARKS)
