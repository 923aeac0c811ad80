"""Faults of a cluster at drawn moments of a training: which, and how they are done."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ps_runtime.launch.launcher import RoleProcess
from tests.integration.lane_cluster import Served
from tests.integration.replicated_cluster import ReplicatedCluster

KINDS = ("server", "scheduler", "both", "pause", "stop", "come", "log")
MOMENTS = ("before", "in", "during")
"""Of a step: before it begins; between its gradients and its end; while it goes on from there."""

HEAL_S = 60.0
"""In which a lost server is found out, and its ranges are copied."""

_OF_REPLICAS = ("server", "both", "pause", "stop")
"""Faults of which replicated ranges alone know nothing."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault.

    Attributes:
        kind: "server": SIGKILL for one. "scheduler": SIGKILL, and it is started again. "both": the
            two at once. "pause": a server stands still until others serve what it did. "stop":
            SIGTERM for a server. "come": another server is started. "log": SIGKILL for a server,
            which is started again with its update log.
        step: the step of the worker that does it.
        rank: that worker.
        moment: of its step.
    """

    kind: str
    step: int
    rank: int = 0
    moment: str = "before"

    def __str__(self) -> str:
        return f"{self.kind} by {self.rank} {self.moment} {self.step}"

    __repr__ = __str__


def drawn_faults(
    draw: random.Random,
    first: Sequence[Fault],
    steps: range,
    workers: int,
    has_logs: bool,
    spare: int,
) -> tuple[Fault, ...]:
    """`first`, and up to two more in these steps.

    Args:
        spare: the servers that may be lost beside those that `first` takes.
    """
    found = list(first)
    for _ in range(draw.choice((0, 1, 1, 2))):
        kinds = ["scheduler", "scheduler", "come", *(["log", "log"] if has_logs else [])]
        kind = draw.choice([*kinds, *_OF_REPLICAS] if spare > 0 else kinds)
        spare -= kind in ("server", "both", "stop")
        step = draw.randrange(steps.start, steps.stop)
        found.append(Fault(kind, step, draw.randrange(workers), draw.choice(MOMENTS)))
    return tuple(sorted(found, key=lambda fault: (fault.step, fault.moment)))


class Faults:
    """Does the faults of a cluster. One at a time: each begins once the one before is over."""

    def __init__(self, cluster: ReplicatedCluster, faults: Sequence[Fault]) -> None:
        self._cluster = cluster
        self._left = list(faults)
        self._lock = threading.Lock()
        self._beside = ThreadPoolExecutor(1)
        self._doing: list[Future[None]] = []
        self._scheduler_begun = False
        self._begun: list[RoleProcess] = []

    def at(self, rank: int, step: int, moment: str) -> None:
        """Do what is to be done at this moment of a worker."""
        due = [f for f in tuple(self._left) if (f.rank, f.step, f.moment) == (rank, step, moment)]
        for fault in due:
            self._left.remove(fault)
            if moment == "during":
                self._doing.append(self._beside.submit(self._do, fault))
            else:
                self._do(fault)

    def end(self) -> None:
        """Wait for those that are done beside a step; raises what one of them raised."""
        for doing in self._doing:
            doing.result()
        self._beside.shutdown()

    def _do(self, fault: Fault) -> None:
        with self._lock:
            self._settle()
            getattr(self, f"_{fault.kind}")(fault.step)

    def _settle(self) -> None:
        """What the fault before has begun is there."""
        if self._scheduler_begun:
            self._scheduler_begun = False
            self._cluster.scheduler_served()
        for process in self._begun:
            self._cluster.served(process)
        self._begun.clear()

    def _server(self, number: int) -> None:
        self._cluster.kill(self._one(number))

    def _scheduler(self, _: int) -> None:
        self._cluster.kill_scheduler()
        self._begin_scheduler()

    def _both(self, number: int) -> None:
        victim = self._one(number)
        self._cluster.kill_scheduler()
        self._cluster.kill(victim)
        self._begin_scheduler()

    def _begin_scheduler(self) -> None:
        self._cluster.begin_scheduler_again()
        self._scheduler_begun = True

    def _pause(self, number: int) -> None:
        victim = self._one(number)
        victim.process.send(signal.SIGSTOP)
        try:
            self._cluster.taken_over_from(victim)
        finally:
            victim.process.send(signal.SIGCONT)

    def _stop(self, number: int) -> None:
        self._cluster.stop(self._one(number))

    def _come(self, _: int) -> None:
        self._begun.append(self._cluster.begin())

    def _log(self, number: int) -> None:
        victim = self._cluster.living[number % len(self._cluster.living)]
        self._cluster.kill(victim)
        self._begun.append(self._cluster.begin_again(victim))

    def _one(self, number: int) -> Served:
        """A server that may be lost: each range has another living one that holds it."""
        self._cluster.views.catch_up()
        self._cluster.healed(HEAL_S)
        return self._cluster.living[number % len(self._cluster.living)]
