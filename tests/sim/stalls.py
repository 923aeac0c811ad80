"""Disks of update logs that take what they are given, and do not answer for a while (S13).

    answers --stalls for less than `LOG_STALL_S`--> answers
       |    --crawls: each operation takes seconds--> answers
       +--stalls for longer--> its server ends; comes back when the disk answers

What the disk was given when its server ended may be in the log, all of it or a part. A server is
often paused while its disk stalls, and dies now and then.

Oracles, in `tests.sim.logged`:
    S13    A disk is given up only if its server was awake for `LOG_STALL_S`, and it did nothing.
    LIVE   A server that is awake waits no longer than that for its disk.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from ps_core.cluster_view import Session
from ps_core.keys import NodeId
from scheduler.machine.cluster import Decision
from tests.sim.logged import LoggedServer, SimLog
from tests.sim.scheduled import SCHEDULER
from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_simulation import WORKERS

STALLING = 0.6
"""Of the seeds."""
SHORT_S = (2.0, 9.0, 18.0)
LONG_S = (24.0, 32.0, 45.0)
CRAWL_S = 40.0
AGAIN_S = 0.3
"""Until another is looked for, where none may be struck."""
FIRST_S = (1.0, 5.0, 12.0)
PAUSED, KILLED = 0.4, 0.15
"""Of the servers whose disks stall."""
SAYS_SO = 0.7
"""Of those that end so."""


class LogStalls:
    """What befalls the disks of one simulation, with draws of its own."""

    def __init__(self, stage: StallingSimulation, seed: object) -> None:
        self.draw = random.Random(f"stalls of {seed}")
        self._stage, self._world = stage, stage.world
        self._left_count = self.draw.randint(1, 4)
        self._kinds: dict[str, Callable[[LoggedServer], None]] = {
            "stalled": self._stall,
            "stalled for long": self._stall_for_long,
            "crawled": self._crawl,
        }
        if self.draw.random() < STALLING:
            self._world.after(self.draw.choice(FIRST_S) * self.draw.random(), self._strike)
        self._world.after(stage.plan.calm_s, self.end)

    def end(self) -> None:
        """All disks answer, and go on to."""
        for log in self._stage.logs:
            log.be_well()

    def _strike(self) -> None:
        stage, draw = self._stage, self.draw
        if not stage.may_stall:
            return
        kind = draw.choice(
            ("stalled", "stalled", "stalled for long", "stalled for long", "crawled")
        )
        found = [
            server
            for server in stage.living
            if isinstance(server, LoggedServer) and server.log.is_well
        ]
        if kind == "stalled for long":
            found = [server for server in found if stage.may_lose(server, for_good=True)]
        if not found:
            self._world.after(AGAIN_S, self._strike)
            return
        victim = draw.choice(found)
        self._kinds[kind](victim)
        stage.stalled(victim)
        self._world.counts[f"disks {kind}"] += 1
        self._world.say(f"DISK of server {victim.node_id} {kind}: {victim.log.answers_within_s}")
        self._left_count -= 1
        if self._left_count:
            self._world.after(draw.choice((2.0, 8.0, 20.0)) * (0.5 + draw.random()), self._strike)

    def _stall(self, server: LoggedServer) -> None:
        for_s = self.draw.choice(SHORT_S) * (0.5 + 0.5 * self.draw.random())
        server.log.stall(for_s)
        self._befall(server, for_s)

    def _stall_for_long(self, server: LoggedServer) -> None:
        for_s = self.draw.choice(LONG_S) * (1.0 + 0.2 * self.draw.random())
        server.log.stall(for_s)
        given_up = self._stage.given_up
        given_up.add(server)
        self._world.after(for_s, lambda: given_up.discard(server))
        self._world.after(AGAIN_S, lambda: self._spare(server))
        self._befall(server, for_s)

    def _spare(self, server: LoggedServer) -> None:
        """Its disk answers after all once it is the last that has a range, or is about to be."""
        if server.is_dead or server not in self._stage.given_up:
            return
        is_about_to_be_alone = server.asks and self._stage.plan.replica_count > 1
        if self._stage.may_lose(server, for_good=False) and not is_about_to_be_alone:
            self._world.after(AGAIN_S, lambda: self._spare(server))
            return
        self._stage.given_up.discard(server)
        server.log.be_well()

    def _crawl(self, server: LoggedServer) -> None:
        server.log.crawl(CRAWL_S)
        self._befall(server, CRAWL_S)

    def _befall(self, server: LoggedServer, for_s: float) -> None:
        """What befalls the server while its disk does not answer."""
        fate, after_s = self.draw.random(), for_s * self.draw.random()
        if fate < PAUSED:
            self._world.after(after_s, lambda: self._pause(server))
        elif fate < PAUSED + KILLED:
            self._world.after(after_s, lambda: self._kill(server))

    def _may_strike(self, server: LoggedServer, *, for_good: bool) -> bool:
        stage = self._stage
        is_at_it = stage.may_stall and not (server.is_dead or server.is_paused)
        return is_at_it and stage.may_lose(server, for_good=for_good)

    def _pause(self, server: LoggedServer) -> None:
        if self._may_strike(server, for_good=False):
            self._world.counts["paused beside a stall"] += 1
            self._stage.calamities._pause(server)

    def _kill(self, server: LoggedServer) -> None:
        if self._may_strike(server, for_good=True):
            self._world.counts["killed beside a stall"] += 1
            self._stage.kill(server)


class StallingSimulation(FailoverSimulation):
    """A simulation in which servers keep update logs, and their disks stall.

    Attributes:
        logs: all there are.
        given_up: servers that will end, since their disks will not answer in time.
    """

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self.logs: list[SimLog] = []
        self.given_up: set[LoggedServer] = set()
        self._identities_of: dict[NodeId, Session] = {}
        super().__init__(seed, narrate=narrate)
        self._identities_of |= {s.node_id: s for s in self.sessions[:-WORKERS]}
        self.stalls = LogStalls(self, self.stalls_of(seed))

    def stalls_of(self, seed: int) -> object:
        """What the draws of stalls are of."""
        return seed

    @property
    def may_stall(self) -> bool:
        """Whether anything befalls disks yet."""
        return not self.calamities.is_calm

    def stalled(self, server: LoggedServer) -> None:
        """Its disk has begun not to answer."""

    def lost(self) -> set[NodeId]:
        """The servers whose copies do not count any more: some will end."""
        return super().lost() | {server.node_id for server in self.given_up}

    def log_failed(self, server: LoggedServer) -> None:
        """It ends, and says so; the scheduler may not hear it."""
        self.world.counts["logs given up"] += 1
        self.world.say(f"LOG GIVEN UP by server {server.node_id}")
        if self.stalls.draw.random() < SAYS_SO:
            link = server.node_id, SCHEDULER
            self.world.send("leaves", lambda: self._reach(lambda: self._leave_of(server)), link)
        self.kill(server)

    def _leave_of(self, server: LoggedServer) -> None:
        session = self._identities_of[server.node_id]
        with self._no_answer_for(session):
            left = self.scheduler.deregister(session, "its log has failed", self.world.now_s)
            self.world.counts["left as its log had failed"] += bool(left.transitions)
            self._publish(left.transitions)

    def join(self, decision: Decision[Session]) -> None:
        """A server has registered while the others train."""
        self._identities_of[decision.reply.node_id] = decision.reply
        super().join(decision)

    def _check_end(self) -> None:
        self.stalls.end()
        super()._check_end()
