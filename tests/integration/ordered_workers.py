"""Workers in processes of their own that take the steps which a test orders, one at a time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

import ps_worker as ps
from tests.integration.lane_cluster import LaneCluster
from tests.integration.warm_processes import warm_context

DEADLINE_S = 60.0
PATIENCE = {
    "PUSHPULL_HEARTBEAT_INTERVAL_S": "0.2",
    "PUSHPULL_LEASE_S": "1.0",
    "PUSHPULL_WORKER_TIMEOUT_S": "2.5",
}
REMEDY = "start all of them again, together, from the last checkpoint"

Make = Callable[[ps.Client], Any]
"""Makes what trains: with `train(range of steps)`, `values`, `optimizer` and perhaps `change`."""


def live(
    address: str, run: str, rank: int, make: Make, deadline_s: float, pipe: Connection
) -> None:
    """Do what is ordered, and say what comes of it."""
    torch.set_num_threads(1)
    trainer: Any = None
    ticket: Any = None
    clock = 0
    with ps.connect(address, run=run, rank=rank, request_deadline_s=deadline_s) as client:
        while True:
            try:
                order = pipe.recv()
                if order == "make":
                    trainer = make(client)
                    pipe.send("made")
                elif order == "fail":
                    raise ValueError("the script's own")
                elif trainer is None or order == "leave":
                    break
                elif order == "values":
                    pipe.send(trainer.values)
                elif order == "change":
                    trainer.change()
                    pipe.send("changed")
                elif order in ("checkpoint", "wait for it"):
                    ticket = client.checkpoint() if order == "checkpoint" else ticket
                    pipe.send(ticket.wait().number)
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
def begun_workers(
    cluster: LaneCluster, run: str, make: Make, count: int, deadline_s: float
) -> Iterator[list[Worker]]:
    """Processes of all workers of a run, which have been ordered nothing yet."""
    context = warm_context()
    with ExitStack() as stack:
        found = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=live,
                args=(cluster.address, run, rank, make, deadline_s, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            stack.callback(ours.close)
            found.append(Worker(process, ours))
        yield found


@contextmanager
def ordered_workers(
    cluster: LaneCluster, run: str, make: Make, count: int, deadline_s: float = 60.0
) -> Iterator[list[Worker]]:
    """All workers of a run, with the optimizer made, and one step taken."""
    with begun_workers(cluster, run, make, count, deadline_s) as found:
        assert [ordered(found, "make", worker) for worker in found] == ["made"] * count
        assert stepped(found) == [1] * count
        yield found


def ordered(found: list[Worker], order: str, answering: Worker) -> Any:
    """What one answers to an order that all are given, with the first."""
    if answering is found[0]:
        for worker in found:
            worker.pipe.send(order)
    return answering.hear()


def stepped(found: list[Worker]) -> list[Any]:
    """The clock of each, after a step of all."""
    assert [ordered(found, "step", worker) for worker in found] == ["begins"] * len(found)
    return [worker.hear() for worker in found]


def begun(worker: Worker) -> None:
    """It is in a step, which others do not take."""
    worker.pipe.send("step")
    assert worker.hear() == "begins"
