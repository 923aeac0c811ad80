"""Hybrid runs that a worker leaves, is late in, or is interrupted in: of two workers, each a
process, that take the steps which the test orders. Each case is a run of its own of one cluster.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import ps_worker as ps
from tests.integration.command_line import environment
from tests.integration.hybrid_jobs import Trainer
from tests.integration.lane_cluster import LaneCluster, lane_cluster
from tests.integration.warm_processes import warm_context

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

WORKERS = 2
DEADLINE_S = 60.0
PATIENCE = {
    "PUSHPULL_HEARTBEAT_INTERVAL_S": "0.2",
    "PUSHPULL_LEASE_S": "1.0",
    "PUSHPULL_WORKER_TIMEOUT_S": "2.5",
}
REMEDY = "start all of them again, together, from the last checkpoint"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LaneCluster]:
    with lane_cluster(servers=1, workers=WORKERS, environment=PATIENCE) as cluster:
        yield cluster


# --- a worker


def live(address: str, run: str, rank: int, deadline_s: float, pipe: Connection) -> None:
    """Do what is ordered, and say what comes of it."""
    torch.set_num_threads(1)
    trainer: Trainer | None = None
    clock = 0
    with ps.connect(address, run=run, rank=rank, request_deadline_s=deadline_s) as client:
        while True:
            try:
                order = pipe.recv()
                if order == "make":
                    trainer = Trainer(client, "plain", "model")
                    pipe.send("made")
                elif order == "fail":
                    raise ValueError("the script's own")
                elif trainer is None or order == "leave":
                    break
                elif order == "values":
                    pipe.send(trainer.values)
                elif order == "wait on":
                    pipe.send("begins")
                    trainer.optimizer.step()
                    clock += 1
                    pipe.send(clock)
                else:
                    pipe.send("begins")
                    trainer.train(range(clock, clock + 1))
                    clock += 1
                    pipe.send(clock)
            except (ps.PushpullError, KeyboardInterrupt) as error:
                pipe.send((type(error).__name__, str(error)))
    pipe.send("left")


@dataclass
class Worker:
    """A worker's process, and the pipe to it."""

    process: BaseProcess
    pipe: Connection

    def hear(self) -> Any:
        assert self.pipe.poll(DEADLINE_S), "the worker says nothing"
        return self.pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def workers(cluster: LaneCluster, run: str, deadline_s: float = 60.0) -> Iterator[list[Worker]]:
    """All workers of a run, with the optimizer made, and one step taken."""
    context = warm_context()
    with ExitStack() as stack:
        found = []
        for rank in range(WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=live, args=(cluster.address, run, rank, deadline_s, theirs), daemon=True
            )
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            stack.callback(ours.close)
            found.append(Worker(process, ours))
        assert [ordered(found, "make", worker) for worker in found] == ["made"] * WORKERS
        assert stepped(found) == [1] * WORKERS
        yield found


def ordered(found: list[Worker], order: str, answering: Worker) -> Any:
    """What one answers to an order that all are given, with the first."""
    if answering is found[0]:
        for worker in found:
            worker.pipe.send(order)
    return answering.hear()


def stepped(found: list[Worker]) -> list[Any]:
    """The clock of each, after a step of all."""
    assert [ordered(found, "step", worker) for worker in found] == ["begins"] * WORKERS
    return [worker.hear() for worker in found]


def begun(worker: Worker) -> None:
    """It is in a step, which others do not take."""
    worker.pipe.send("step")
    assert worker.hear() == "begins"


# --- one of them ends


@pytest.mark.thorough
def test_a_worker_that_is_killed_ends_the_step_of_the_others(cluster: LaneCluster) -> None:
    with workers(cluster, "killed") as (first, victim):
        begun(first)
        victim.signal(signal.SIGKILL)
        kind, said = first.hear()
        assert kind == "WorkerLost"
        assert "a worker has ended, or its connection has" in said
        assert REMEDY in said


@pytest.mark.thorough
def test_a_worker_whose_script_fails_is_named(cluster: LaneCluster) -> None:
    with workers(cluster, "failed") as (first, victim):
        begun(first)
        victim.pipe.send("fail")
        kind, said = first.hear()
        assert kind == "WorkerLost"
        assert said.startswith("worker 1 was declared gone: its process has ended")
        assert REMEDY in said


def test_a_worker_that_leaves_before_the_others_is_named(cluster: LaneCluster) -> None:
    with workers(cluster, "left") as (first, victim):
        begun(first)
        victim.pipe.send("leave")
        assert victim.hear() == "left"
        kind, said = first.hear()
        assert kind == "WorkerLost"
        assert said.startswith("worker 1 has left the cluster")


# --- one of them is late


@pytest.mark.thorough
def test_a_step_that_is_waited_for_in_vain_or_interrupted_is_taken_by_the_next_call(
    cluster: LaneCluster,
) -> None:
    with workers(cluster, "late", deadline_s=5.0) as (first, late):
        begun(first)
        kind, said = first.hear()
        assert kind == "WaitExpired"
        assert "a worker has not come to this step within 5 s" in said
        first.pipe.send("wait on")
        assert first.hear() == "begins"
        first.signal(signal.SIGINT)
        kind, _ = first.hear()
        assert kind == "KeyboardInterrupt"
        late.pipe.send("step")
        assert late.hear() == "begins"
        first.pipe.send("wait on")
        assert first.hear() == "begins"
        assert [first.hear(), late.hear()] == [2, 2]
        assert stepped([first, late]) == [3, 3]
        for worker in (first, late):
            worker.pipe.send("values")
        values, others = first.hear(), late.hear()
        assert [name for name in values if not torch.equal(values[name], others[name])] == []


SCRIPT = """
import signal, os, sys
import torch
import pushpull as ps

with ps.connect() as client:
    model = torch.nn.Sequential(
        ps.Embedding(client, "rows", 4, optimizer=ps.SGD(lr=0.1)), torch.nn.Linear(4, 1)
    )
    local = torch.optim.SGD(model[1].parameters(), lr=0.1)
    optimizer = ps.HybridOptimizer(client, model, local)
    for step in range(4):
        model(torch.arange(3)).sum().backward()
        if step == 2 and client.rank == 1:
            print("pauses", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.thorough
def test_a_process_ends_though_a_worker_is_paused(cluster: LaneCluster, tmp_path: Path) -> None:
    """In interpreters of their own: gloo would keep one from ending."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    variables = environment() | {"PUSHPULL_SCHEDULER": cluster.address, "PUSHPULL_RUN": "paused"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "pushpull", "worker", "--rank", str(rank), str(script)],
            env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(WORKERS)
    ]  # fmt: skip
    try:
        _, said = started[0].communicate(timeout=DEADLINE_S)
    finally:
        for process in started:
            process.kill()
    assert started[1].communicate()[0] == "pauses\n"
    assert started[0].returncode == 75
    gone = re.search(r"WorkerLost: worker 1 was declared gone after [\d.]+ s of silence", said)
    assert gone, said
    assert REMEDY in said
