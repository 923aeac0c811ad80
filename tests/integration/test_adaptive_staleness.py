"""A bound that moves, on a real cluster: a slow worker raises it, a loss that rises lowers it.

Computation is emulated by the clients' setting `compute`: 20 ms a step at worker 0, 3 ms at the
others. What makes it as fast as they are is that they keep step with it, by a table under BSP.
"""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import ps_worker as ps
from tests.integration.command_line import run_here
from tests.integration.lane_cluster import until

pytestmark = pytest.mark.slow

WORKERS = 3
TABLE = "model/0/float32"
COMPUTE = ("20ms", "3ms", "3ms")
MARGIN_COUNT = 30
"""Steps between the word that all keep step and the first that they do."""


class Training:
    """Workers of one cluster that train one model, each in a thread, until they are told to end."""

    def __init__(self, cluster: ps.LocalCluster, bounds: str) -> None:
        self.cluster = cluster
        self.bounds = bounds
        self.clients = [
            ps.connect(cluster.address, rank=rank, compute=COMPUTE[rank], request_deadline_s=20.0)
            for rank in range(WORKERS)
        ]
        self.loss = 1.0
        self.together_from = 2**50
        self.clocks = [0] * WORKERS
        self.ended = threading.Event()
        self.threads: list[Future[None]] = []

    def train(self, rank: int) -> None:
        """Worker `rank`'s script; nobody leaves before all have ended."""
        client = self.clients[rank]
        model = torch.nn.Linear(8, 4)
        optimizer = ps.DistributedOptimizer(
            client, model, ps.SGD(lr=1e-4), consistency=self.bounds, name="model"
        )
        pace = client.create_table("pace", 64, optimizer=ps.SGD(lr=0.0), consistency="bsp")
        while not self.ended.is_set():
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            try:
                optimizer.step()
                self.clocks[rank] += 1
                client.report(loss=self.loss)
                if self.clocks[rank] >= self.together_from:
                    client.push_pull(pace, np.zeros(64, np.float32))
            except ps.PushpullError:
                if not self.ended.is_set():
                    raise

    def keep_step(self) -> None:
        """From some clock on, all take their steps together."""
        self.together_from = max(self.clocks) + MARGIN_COUNT

    @property
    def bound(self) -> int:
        """Where the bound is, as the scheduler's metrics say."""
        url = f"http://{self.cluster.http_address}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        pattern = r'^pushpull_scheduler_staleness_bound\{table="(\S+)"\} (\S+)$'
        found = dict(re.findall(pattern, text, re.MULTILINE))
        for thread in self.threads:
            if thread.done():
                thread.result()
        return int(float(found[TABLE])) if found else -1

    @property
    def setting(self) -> str:
        """The same, as a worker sees it."""
        client = self.clients[1]
        return str(client.consistency_of(client.table(TABLE)))

    def until_bound(self, low: int, high: int) -> None:
        until(lambda: low <= self.bound <= high, f"a bound of {low} to {high}")


@contextmanager
def training(bounds: str) -> Iterator[Training]:
    with (
        ps.local_cluster(servers=2, workers=WORKERS) as cluster,
        ThreadPoolExecutor(WORKERS) as pool,
    ):
        found = Training(cluster, bounds)
        try:
            found.threads += [pool.submit(found.train, rank) for rank in range(WORKERS)]
            yield found
        finally:
            found.ended.set()
            for client in found.clients:
                client.close(leave=False)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUSHPULL_ADAPTATION_INTERVAL_S", "0.2")
    monkeypatch.setenv("PUSHPULL_HEARTBEAT_INTERVAL_S", "0.1")


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_a_slow_worker_raises_it_to_the_most_and_one_that_keeps_up_lets_it_come_back(
    tmp_path: Path,
) -> None:
    with training("ssp:1..6") as cluster:
        cluster.until_bound(6, 6)
        until(lambda: cluster.setting == "ssp:1..6@6", "the workers see it")
        for command in (("tables", "list"), ("status",)):
            shown = run_here(*command, "--scheduler", cluster.cluster.address, cwd=tmp_path)
            assert "ssp:1..6@6" in shown.stdout, shown.stderr
        cluster.keep_step()
        for bound in (4, 2, 1):
            cluster.until_bound(1, bound)
        until(lambda: cluster.setting == "ssp:1..6", "the workers see it")


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_a_loss_that_rises_lowers_it_while_workers_wait_and_a_fixed_setting_ends_it() -> None:
    with training("ssp:1..6") as cluster:
        cluster.until_bound(6, 6)
        cluster.loss = 8.0
        cluster.until_bound(1, 3)
        cluster.clients[0].set_consistency(TABLE, "ssp:3")
        assert cluster.bound == -1, "no such series any more"
        clock = cluster.clocks[0]
        until(lambda: cluster.clocks[0] > clock + 30, "training goes on")
        assert cluster.setting == "ssp:3"
