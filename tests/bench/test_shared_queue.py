"""`ps_cli/bench/shared_queue.py` with a real cluster: so many batches are applied, whoever
trains.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import ps_worker as ps
from ps_cli.bench import shared_queue
from ps_cli.bench.shared_queue import Queue
from tests.integration.command_line import environment

WORKERS = 3
BATCHES = 200
TRAINED_BATCHES = 20
RUN_DEADLINE_S = 100.0

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def clients() -> Iterator[list[ps.Client]]:
    with ps.local_cluster(servers=1, workers=WORKERS) as cluster, ExitStack() as stack:
        yield [
            stack.enter_context(ps.connect(cluster.address, rank=rank)) for rank in range(WORKERS)
        ]


def applied(client: ps.Client) -> int:
    """How many batches a worker applies; every third that it takes is put back."""
    queue = Queue(client, BATCHES)
    kept_count = turn = 0
    while queue.take():
        turn += 1
        if turn % 3 == client.rank:
            queue.put_back()
        else:
            kept_count += 1
    return kept_count


def test_what_is_put_back_is_taken_again_and_nothing_beyond(clients: list[ps.Client]) -> None:
    with ThreadPoolExecutor(WORKERS) as pool:
        counts = list(pool.map(applied, clients))
    assert sum(counts) == BATCHES, counts
    assert all(counts), "every worker gets some"


def test_so_many_steps_are_applied_though_a_worker_is_too_late(tmp_path: Path) -> None:
    """The slow one's steps are discarded with a backup worker; without BSP each counts."""
    command = [
        sys.executable, "-m", "ps_cli", "compare", shared_queue.__file__,
        "--modes", "bsp:backup=1,asp", "--workers", "2",
        "--straggler", "permanent:1ms,150ms,rank=0",
        "--", "--batches", str(TRAINED_BATCHES), "--batch-size", "4",
    ]  # fmt: skip
    found = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True,
        timeout=RUN_DEADLINE_S, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    backup, asp = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))["runs"]
    for run in (backup, asp):
        steps = run["figures"]
        assert steps["step_count"] - steps["discarded_count"] == TRAINED_BATCHES, run["mode"]
        assert 0 < steps["quality"]["test accuracy"] <= 1
    assert 0 < backup["figures"]["discarded_count"] <= TRAINED_BATCHES / 3, "it leaves out clocks"
    assert asp["figures"]["discarded_count"] == 0
    slow, fast = [worker["step_count"] for worker in asp["figures"]["workers"]]
    assert slow < fast, "the fast one takes what the slow one does not"
