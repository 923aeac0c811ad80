"""The faults of a chaos run, and what is measured of each."""

from __future__ import annotations

import contextlib
import random
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

from ps_runtime.launch.launcher import RoleProcess
from tests.chaos.cluster import Chaos
from tests.integration.lane_cluster import Served

GOES_ON_S = 60.0
HEALS_S = 90.0
_PROBED_S = 0.1
_WHILE_S = 4.0

KILLED = "SIGKILL"
SCHEDULER_KILLED = "scheduler SIGKILL"
RESTARTED = "rolling restart"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Recovery:
    """One fault: seconds from it to the first committed push on the ranges that the server was
    primary of (by any worker, and by all), and until all ranges had their replicas again. The
    `worst_step_s` is the longest that was under way meanwhile, from its push to its commit.
    """

    kind: str
    role: str
    range_count: int
    first_s: float
    all_workers_s: float
    healed_s: float
    worst_step_s: float


class Faults:
    """Does things to a cluster, and measures how it goes on.

    Args:
        chaos: the cluster.
        draw: chooses the victims.
        say: says how it goes.

    Attributes:
        made: the cluster.
        recoveries: of each fault so far.
        under_way: the kind of the newest fault.
        quiet: when there was quiet after one, from when until when.
    """

    def __init__(self, chaos: Chaos, draw: random.Random, say: Say) -> None:
        self.made = chaos
        self._draw = draw
        self._say = say
        self._pause = Event()
        self.recoveries: list[Recovery] = []
        self.under_way = ""
        self.quiet: list[tuple[float, float]] = []

    def kill(self, quiet_s: float) -> None:
        """SIGKILL; another server is started in its place, and there is quiet for a while."""
        self.under_way = KILLED
        cluster = self.made.cluster
        victim = self._victim()
        ranges = len(cluster.primary_of(victim))
        victim.process.send(signal.SIGKILL)
        since_s = time.monotonic()
        begun = cluster.begin()
        first_s = self.made.workers.first_commits(since_s, GOES_ON_S)
        cluster.served(begun)
        self._healed(KILLED, victim.process, ranges, since_s, first_s)
        self._quiet(quiet_s)

    def kill_scheduler(self, quiet_s: float) -> None:
        """SIGKILL; it is started again from its journal, at its address. No range may move."""
        self.under_way = SCHEDULER_KILLED
        cluster = self.made.cluster
        before = cluster.views.catch_up()
        since_s = time.monotonic()
        cluster.kill_scheduler()
        cluster.begin_scheduler_again()
        first_s = self.made.workers.first_commits(since_s, GOES_ON_S)
        cluster.scheduler_served()
        self._healed(SCHEDULER_KILLED, cluster.scheduler, 0, since_s, first_s)
        self._quiet(quiet_s)
        after = cluster.views.catch_up()
        assert after.ranges == before.ranges, "a range moved when the scheduler came back"

    def roll(self, quiet_s: float) -> None:
        """SIGTERM to each server in turn: when it has ended another is started, and when that is
        ready the next one's turn comes, as Kubernetes does it.
        """
        for server in list(self.made.cluster.living):
            self._restart(server)
            self._quiet(quiet_s)

    def restart(self) -> None:
        """SIGTERM to any server; when it has ended another is started."""
        self._restart(self._draw.choice(self.made.cluster.living))

    def kill_and_return(self) -> None:
        """SIGKILL; the server is started again with its update log."""
        cluster = self.made.cluster
        victim, ranges, since_s = self._killed()
        begun = cluster.begin_again(victim)
        first_s = self.made.workers.first_commits(since_s, GOES_ON_S)
        cluster.served(begun)
        self._healed(KILLED, victim.process, ranges, since_s, first_s)

    def kill_for_a_while(self) -> None:
        """SIGKILL; the others go on alone for some leases, and then another server comes."""
        cluster = self.made.cluster
        victim, ranges, since_s = self._killed()
        first_s = self.made.workers.first_commits(since_s, GOES_ON_S)
        cluster.healed(HEALS_S)
        self._quiet(_WHILE_S)
        cluster.served(cluster.begin())
        self._healed(KILLED, victim.process, ranges, since_s, first_s)

    def _killed(self) -> tuple[Served, int, float]:
        """A server that was killed, the number of ranges that it was primary of, and when."""
        self.under_way = KILLED
        victim = self._victim()
        ranges = len(self.made.cluster.primary_of(victim))
        self.made.cluster.kill(victim)
        return victim, ranges, time.monotonic()

    def kill_both(self) -> None:
        """SIGKILL to the scheduler and any server; both are started again with what they wrote."""
        self.under_way = SCHEDULER_KILLED
        cluster = self.made.cluster
        victim = self._draw.choice(cluster.living)
        cluster.kill_scheduler()
        cluster.kill(victim)
        since_s = time.monotonic()
        cluster.begin_scheduler_again()
        begun = cluster.begin_again(victim)
        cluster.scheduler_served()
        first_s = self.made.workers.first_commits(since_s, GOES_ON_S)
        cluster.served(begun)
        self._healed(SCHEDULER_KILLED, victim.process, 0, since_s, first_s)

    def _restart(self, server: Served) -> None:
        self.under_way = RESTARTED
        cluster = self.made.cluster
        ranges = len(cluster.primary_of(server))
        since_s = time.monotonic()
        server.process.send(signal.SIGTERM)
        first_s = self.made.workers.first_commits(since_s, GOES_ON_S)
        ended = server.process.wait(HEALS_S)
        name = server.process.name
        assert ended is not None, f"{name} was sent SIGTERM {HEALS_S:g} s ago, and has not ended"
        assert ended.returncode == 0, f"{name} was sent SIGTERM, and ended with {ended.how}"
        _until_ready(cluster.served(cluster.begin()), HEALS_S)
        self._healed(RESTARTED, server.process, ranges, since_s, first_s)

    def _quiet(self, lasts_s: float) -> None:
        began_s = time.monotonic()
        self._pause.wait(lasts_s)
        self.quiet.append((began_s, time.monotonic()))

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
        network = self.made.network
        assert network is not None
        victim = self._victim()
        cut = network.cut(self.made.cluster.place(victim), way)
        self._during(f"network cut ({way})", victim, lasts_s, cut)

    def cut_between(self, lasts_s: float) -> None:
        """Two servers do not reach each other; everybody else reaches both."""
        network = self.made.network
        assert network is not None
        victim = self._victim()
        other = self._draw.choice([s for s in self.made.cluster.living if s is not victim])
        peer = other.address.rsplit(":", 1)[0]
        cut = network.cut(self.made.cluster.place(victim), "both", peer)
        self._during("cut between two servers", victim, lasts_s, cut)

    def _during(
        self,
        kind: str,
        victim: Served,
        lasts_s: float,
        fault: contextlib.AbstractContextManager[None],
    ) -> None:
        self.under_way = kind
        ranges = len(self.made.cluster.primary_of(victim))
        with fault:
            since_s = time.monotonic()
            first_s = self.made.workers.first_commits(since_s, GOES_ON_S)
            self._pause.wait(max(0.0, lasts_s - (time.monotonic() - since_s)))
        self._healed(kind, victim.process, ranges, since_s, first_s)

    def _victim(self) -> Served:
        """Any server that is primary of something: of others training takes little notice."""
        cluster = self.made.cluster
        return self._draw.choice([s for s in cluster.living if cluster.primary_of(s)])

    def _healed(
        self, kind: str, role: RoleProcess, ranges: int, since_s: float, first_s: list[float]
    ) -> None:
        workers = self.made.workers
        self.made.cluster.healed(HEALS_S)
        healed_s = time.monotonic() - since_s
        workers.first_commits(time.monotonic(), GOES_ON_S)
        worst_s = workers.worst_step_s(since_s)
        made = Recovery(kind, role.name, ranges, min(first_s), max(first_s), healed_s, worst_s)
        self.recoveries.append(made)
        self._say(
            f"{kind} of {role.name} ({ranges} ranges): goes on after {made.first_s:.2f} s "
            f"(all workers {made.all_workers_s:.2f} s), all replicas after {healed_s:.1f} s, "
            f"worst step {worst_s:.2f} s"
        )


def _until_ready(server: Served, deadline_s: float) -> None:
    """Ask its probe, as a kubelet does, until it is ready."""
    give_up_s = time.monotonic() + deadline_s
    pause = Event()
    while True:
        try:
            with urllib.request.urlopen(f"http://{server.http_address}/readyz", timeout=5):
                return
        except urllib.error.HTTPError as error:
            why = error.read().decode().strip()
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"{server.process.name} is not ready: {why}")
        pause.wait(_PROBED_S)
