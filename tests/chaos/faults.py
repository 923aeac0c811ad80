"""The faults of a chaos run, and what is measured of each."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

from tests.chaos.cluster import Chaos
from tests.integration.lane_cluster import Served

GOES_ON_S = 60.0
HEALS_S = 90.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Recovery:
    """One fault: seconds from it to the first committed push on the ranges that the server was
    primary of (by any worker, and by all), and until all ranges had their replicas again.
    """

    kind: str
    server: str
    range_count: int
    first_s: float
    all_workers_s: float
    healed_s: float


class Faults:
    """Does things to a cluster, and measures how it goes on.

    Args:
        chaos: the cluster.
        draw: chooses the victims.
        say: says how it goes.
    """

    def __init__(self, chaos: Chaos, draw: random.Random, say: Say) -> None:
        self._chaos = chaos
        self._draw = draw
        self._say = say
        self._pause = Event()
        self.recoveries: list[Recovery] = []

    def kill(self, quiet_s: float) -> None:
        """SIGKILL; another server is started in its place, and there is quiet for a while."""
        cluster = self._chaos.cluster
        victim = self._victim()
        ranges = len(cluster.primary_of(victim))
        victim.process.send(signal.SIGKILL)
        since_s = time.monotonic()
        begun = cluster.begin()
        first_s = self._chaos.workers.first_commits(since_s, GOES_ON_S)
        cluster.served(begun)
        self._healed("SIGKILL", victim, ranges, since_s, first_s)
        self._pause.wait(quiet_s)

    def pause(self, lasts_s: float) -> None:
        """SIGSTOP, and SIGCONT."""
        victim = self._victim()

        @contextmanager
        def stopped() -> Iterator[None]:
            victim.process.send(signal.SIGSTOP)
            try:
                yield
            finally:
                victim.process.send(signal.SIGCONT)

        self._during("SIGSTOP", victim, lasts_s, stopped())

    def cut(self, way: str, lasts_s: float) -> None:
        """Drop what goes to the server, or comes from it, or both."""
        network = self._chaos.network
        assert network is not None
        victim = self._victim()
        cut = network.cut(self._chaos.cluster.place(victim), way)
        self._during(f"network cut ({way})", victim, lasts_s, cut)

    def cut_between(self, lasts_s: float) -> None:
        """Two servers do not reach each other; everybody else reaches both."""
        network = self._chaos.network
        assert network is not None
        victim = self._victim()
        other = self._draw.choice([s for s in self._chaos.cluster.living if s is not victim])
        peer = other.address.rsplit(":", 1)[0]
        cut = network.cut(self._chaos.cluster.place(victim), "both", peer)
        self._during("cut between two servers", victim, lasts_s, cut)

    def _during(
        self,
        kind: str,
        victim: Served,
        lasts_s: float,
        fault: contextlib.AbstractContextManager[None],
    ) -> None:
        ranges = len(self._chaos.cluster.primary_of(victim))
        with fault:
            since_s = time.monotonic()
            first_s = self._chaos.workers.first_commits(since_s, GOES_ON_S)
            self._pause.wait(max(0.0, lasts_s - (time.monotonic() - since_s)))
        self._healed(kind, victim, ranges, since_s, first_s)

    def _victim(self) -> Served:
        """Any server that is primary of something: of others training takes little notice."""
        cluster = self._chaos.cluster
        return self._draw.choice([s for s in cluster.living if cluster.primary_of(s)])

    def _healed(
        self, kind: str, victim: Served, ranges: int, since_s: float, first_s: list[float]
    ) -> None:
        self._chaos.cluster.healed(HEALS_S)
        healed_s = time.monotonic() - since_s
        self._chaos.workers.first_commits(time.monotonic(), GOES_ON_S)
        name = victim.process.name
        made = Recovery(kind, name, ranges, min(first_s), max(first_s), healed_s)
        self.recoveries.append(made)
        self._say(
            f"{kind} of {name} ({ranges} ranges): goes on after {made.first_s:.2f} s "
            f"(all workers {made.all_workers_s:.2f} s), all replicas after {healed_s:.1f} s"
        )
