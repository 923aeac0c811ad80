"""What the gate promises at any timing: the same bits every time, and waits that cost little."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import ps_worker as ps
from ps_worker.spec.values import BlockValues
from tests.integration.lane_cluster import lane_cluster, until

pytestmark = pytest.mark.slow

RUNS = 20
WORKERS = 3
STEPS = 6
ELEMENTS = 1000
BLOCK = 64
DEADLINE_S = 60.0

Floats = npt.NDArray[np.float32]


def _gradients(rank: int) -> Floats:
    draw = np.random.default_rng(rank)
    return draw.normal(size=(STEPS, ELEMENTS)).astype(np.float32)


def _one_process() -> Floats:
    """The same with torch: gradients summed in rank order, one multiply, one optimizer."""
    values = torch.zeros(ELEMENTS, requires_grad=True)
    optimizer = torch.optim.Adam([values], lr=0.1)
    parts = [_gradients(rank) for rank in range(WORKERS)]
    for step in range(STEPS):
        total = torch.from_numpy(parts[0][step].copy())
        for part in parts[1:]:
            total += torch.from_numpy(part[step])
        values.grad = total * (1.0 / WORKERS)
        optimizer.step()
    return values.detach().numpy()


def _train(workers: list[ps.Client], run: int) -> list[Floats]:
    """One run; who pushes when, and which blocks first, is another draw each time."""
    draw = random.Random(run)
    tables = [
        worker.create_table(
            f"run {run}",
            ELEMENTS,
            optimizer=ps.Adam(lr=0.1),
            block_elements=BLOCK,
            kernels="exact",
        )
        for worker in workers
    ]
    gradients = [_gradients(rank) for rank in range(WORKERS)]
    values: list[Any] = []
    for step in range(STEPS):
        blocks = range(tables[0].table.block_count)
        left = [(rank, block) for rank in range(WORKERS) for block in blocks]
        draw.shuffle(left)
        for rank, block in left:
            part = gradients[rank][step][BLOCK * block : BLOCK * (block + 1)]
            handle = workers[rank].tables.begin_step(tables[rank])
            handle.push_blocks([BlockValues(block, part.view(np.uint8).data, b"")])
        for rank in draw.sample(range(WORKERS), WORKERS):
            workers[rank].seal(tables[rank])
        values = [worker.pull(table) for worker, table in zip(workers, tables, strict=True)]
    return values


@pytest.mark.thorough
def test_bsp_is_the_same_bits_every_time_whatever_the_order_of_arrival() -> None:
    """G4, over two servers."""
    with ps.local_cluster(servers=2, workers=WORKERS) as cluster:
        workers = [ps.connect(cluster.address, rank=rank) for rank in range(WORKERS)]
        ends = [_train(workers, run) for run in range(RUNS)]
        for worker in workers:
            worker.close(leave=False)
    expected = _one_process()
    for run in ends:
        for values in run:
            np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))


def _rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def _thread_count(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_a_thousand_waiting_pulls_cost_no_thread_and_little_memory() -> None:
    """Four workers ask 250 times each for what the fifth has not sealed yet."""
    with lane_cluster(servers=1, workers=5) as cluster:
        (server,) = cluster.servers
        workers = [ps.connect(cluster.address, rank=rank) for rank in range(5)]
        tables = [
            worker.create_table("w", 64, optimizer=ps.SGD(lr=1.0), block_elements=64)
            for worker in workers
        ]
        for worker, table in zip(workers[:4], tables, strict=False):
            worker.push(table, np.ones(64, np.float32))
        pid = server.process.pid
        before = _rss_bytes(pid), _thread_count(pid)
        done: list[Any] = []
        tickets = [
            worker.pull(table, callback=done.append, timeout_s=DEADLINE_S)
            for _ in range(250)
            for worker, table in zip(workers[:4], tables, strict=False)
        ]
        until(
            lambda: server.metric("pushpull_server_parked_pulls") == len(tickets),
            "all pulls wait at the server",
        )
        assert _thread_count(pid) == before[1]
        assert _rss_bytes(pid) - before[0] < 50_000_000
        workers[4].push(tables[4], np.ones(64, np.float32))
        for ticket, worker in zip(tickets, workers[:4] * 250, strict=True):
            worker.wait(ticket, timeout_s=DEADLINE_S)
        until(lambda: len(done) == len(tickets), "every callback has run")
        assert all((values == -1.0).all() for values in done)
        for worker in workers:
            worker.close(leave=False)
