"""What befalls the servers, links and workers of a simulation, and how long it lasts.

strike --for a while--> undone;  strikes end, and all that lasts is undone, when calm comes
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ps_core.keys import NodeId
from tests.sim.actors import SimWorker
from tests.sim.replicated import LEASE_S, Clock, ReplicatedServer
from tests.sim.scheduled import SCHEDULER
from tests.sim.world import Faults, Link, World

STRIKES = (
    "killed",
    "paused",
    "cut off",
    "out of sight",
    "deaf",
    "one way",
    "slow links",
    "worker killed",
)
LOOPS = ("blocked loop", "slow loop", "stuck works")
"""Strikes of seeds of their own: the process lives, and what it has to do does not get done."""
STUCK_S = (5.0, 20.0, 60.0)
DRIFTS = (0.0, 0.0, 0.002, 0.02)
"""By how much a clock may run faster or slower than the world's."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a seed has in store.

    Attributes:
        server_count: at the beginning.
        replica_count: of each range.
        min_in_sync: servers that must have what is committed.
        kinds: of strikes; the first is one that takes a server away.
        strike_count: how many there are.
        calm_s: when nothing more happens.
        drift: of the servers' clocks, at most.
        resets: whether connections between workers and servers break.
        worker_deaths: at most.
    """

    server_count: int
    replica_count: int
    min_in_sync: int
    kinds: tuple[str, ...]
    strike_count: int
    calm_s: float
    drift: float
    resets: bool
    worker_deaths: int = 1

    @classmethod
    def drawn(cls, draw: random.Random) -> Plan:
        """One of many."""
        first = draw.choice(("killed", "killed", "killed", "paused", "cut off", "out of sight"))
        others = [kind for kind in STRIKES if kind != first]
        return cls(
            server_count=draw.choice((3, 3, 4)),
            replica_count=draw.choice((2, 3)),
            min_in_sync=draw.choice((1, 1, 2)),
            kinds=(first, *draw.sample(others, draw.choice((2, 3)))),
            strike_count=draw.randint(3, 7),
            calm_s=30.0 + draw.random() * 60.0,
            drift=draw.choice(DRIFTS),
            resets=draw.random() < 0.5,
        )

    def clock(self, draw: random.Random) -> Clock:
        """Of one server."""
        return Clock(1.0 + draw.uniform(-self.drift, self.drift), draw.uniform(0.0, 1e6))


class Stage(Protocol):
    """Where it happens."""

    world: World
    workers: list[SimWorker]

    @property
    def living(self) -> list[ReplicatedServer]:
        """The servers that were not killed."""

    def may_lose(self, server: ReplicatedServer, *, for_good: bool) -> bool:
        """Whether every range that has lost a server still has one that lives and is heard."""

    def kill(self, server: ReplicatedServer) -> None:
        """For good."""

    def restart(self) -> None:
        """A server comes that was not there before."""

    def kill_worker(self, worker: SimWorker) -> None:
        """For good."""


class Calamities:
    """All that befalls one simulation."""

    def __init__(self, stage: Stage, plan: Plan) -> None:
        self.is_calm = False
        self.dead_workers: list[SimWorker] = []
        self._stage, self._world, self._plan = stage, stage.world, plan
        self.away: Counter[NodeId] = Counter()
        """Servers that the scheduler may not hear, by how many faults."""
        self._left_count = plan.strike_count
        self._links: list[Link] = []
        self._strikes: dict[str, Callable[[], bool]] = {
            "killed": lambda: self._kill(self._victim(for_good=True)),
            "paused": lambda: self._pause(self._victim()),
            "cut off": self._cut_off,
            "out of sight": self._out_of_sight,
            "deaf": self._deaf,
            "one way": self._one_way,
            "slow links": self._slow,
            "worker killed": self._kill_worker,
            "blocked loop": self._block,
            "slow loop": self._slow_down,
            "stuck works": self._stick,
        }
        draw = self._world.draw
        self._world.after(draw.random() * draw.choice((1.0, 5.0, 15.0)), self._strike_first)
        self._world.after(plan.calm_s, self.calm)

    def calm(self) -> None:
        """Nothing more happens, and what happened is undone."""
        self.is_calm = True
        self._world.say("CALM")
        self._world.cut.clear()
        self._world.slow.clear()
        self._world.faults = Faults.none()
        for server in self._stage.living:
            server.speed_up()
            server.wake()
            if server.works.is_stuck:
                server.works.stick(0.0)

    def strike_server(self, node_id: NodeId | None = None) -> None:
        """That one, or any, is killed or paused now, if it may be, beside all that is planned."""
        if self.is_calm:
            return
        is_killed = self._world.draw.random() < 0.5
        victim = self._victim(for_good=is_killed, node_id=node_id)
        if is_killed:
            self._world.counts["fault: killed"] += self._kill(victim)
        else:
            self._world.counts["fault: paused"] += self._pause(victim)

    def _strike_first(self) -> None:
        self._strike(self._plan.kinds[0])

    def _strike(self, kind: str) -> None:
        """Now if it can be, else a little later."""
        draw = self._world.draw
        if self.is_calm:
            return
        struck = self._possible(kind)
        if not self._strikes[struck]():
            if kind != self._plan.kinds[0]:
                kind = draw.choice(self._plan.kinds)
            self._world.after(0.25, lambda: self._strike(kind))
            return
        self._world.counts[f"fault: {struck}"] += 1
        self._left_count -= 1
        if self._left_count > 0:
            # Each kind once, then any.
            number = self._plan.strike_count - self._left_count
            kinds = self._plan.kinds
            following = kinds[number] if number < len(kinds) else draw.choice(kinds)
            delay_s = draw.choice((0.2, 2.0, 8.0)) * (0.5 + draw.random())
            self._world.after(delay_s, lambda: self._strike(following))

    def _possible(self, kind: str) -> str:
        """That kind; or a pause, where as many workers have died as are planned."""
        is_enough = len(self.dead_workers) >= self._plan.worker_deaths
        return "paused" if kind == "worker killed" and is_enough else kind

    def _undo(self, after_s: float, action: Callable[[], None]) -> None:
        def undo() -> None:
            if not self.is_calm:
                action()

        self._world.after(after_s, undo)

    # --- servers

    def _kill(self, victim: ReplicatedServer | None) -> bool:
        if victim is None:
            return False
        self._world.say(f"KILLED server {victim.node_id}")
        self._stage.kill(victim)
        self._may_come_back()
        return True

    def _may_come_back(self) -> None:
        """Another server takes the place of one that died, now and then."""
        draw, stage = self._world.draw, self._stage
        needed = max(self._plan.replica_count, self._plan.min_in_sync, 2)
        if len(stage.living) < needed or draw.random() < 0.6:
            self._world.counts["fault: restarted"] += 1
            self._world.after(1.0 + draw.random() * 9.0, stage.restart)

    def _victim(
        self, *, for_good: bool = False, node_id: NodeId | None = None
    ) -> ReplicatedServer | None:
        stage = self._stage
        living = [s for s in stage.living if node_id is None or s.node_id == node_id]
        found = [s for s in living if stage.may_lose(s, for_good=for_good)]
        return self._world.draw.choice(found) if found else None

    def _for_a_while(self, victim: NodeId | None = None) -> float:
        """How long it lasts; the victim is heard again a little later."""
        draw = self._world.draw
        for_s = draw.choice((1.0, LEASE_S, 2 * LEASE_S, 15.0)) + draw.random()
        if victim is not None:
            self.away[victim] += 1
            self._world.after(for_s + 2.0, lambda: self.away.subtract([victim]))
        return for_s

    def _pause(self, victim: ReplicatedServer | None) -> bool:
        if victim is None:
            return False
        for_s = self._for_a_while(victim.node_id)
        self._world.say(f"PAUSED server {victim.node_id} for {for_s:.1f} s")
        victim.pause()
        self._undo(for_s, victim.wake)
        return True

    def _block(self) -> bool:
        """Its loop stands for up to some leases, gets on with what has come, and stands again."""
        victim, draw = self._victim(), self._world.draw
        if victim is None:
            return False
        at_s = 0.0
        for _ in range(draw.randint(1, 4)):
            for_s = draw.choice((0.3, 0.9, 1.5, 3.0)) * LEASE_S * (0.5 + draw.random())
            self._undo(at_s, victim.pause)
            self._undo(at_s + for_s, victim.wake)
            at_s += for_s + draw.choice((0.01, 0.3, 1.0)) * draw.random()
        self._world.say(f"BLOCKED server {victim.node_id}, now and then for {at_s:.1f} s")
        self.away[victim.node_id] += 1
        self._world.after(at_s + 2.0, lambda: self.away.subtract([victim.node_id]))
        return True

    def _slow_down(self) -> bool:
        """Whatever comes takes its time: more comes than it gets done, and all is late."""
        victim, draw = self._victim(), self._world.draw
        if victim is None:
            return False
        takes_s, for_s = draw.choice((0.01, 0.05, 0.2)), self._for_a_while(victim.node_id)
        self._world.say(f"SLOW server {victim.node_id}: {takes_s} s each, for {for_s:.1f} s")
        victim.slow_down(takes_s)
        self._undo(for_s, victim.speed_up)
        return True

    def _stick(self) -> bool:
        """Its works wait for a disk that does not answer. It grants leases, and is heard."""
        victim, draw = self._victim(), self._world.draw
        if victim is None or victim.works.is_stuck:
            return False
        for_s = draw.choice(STUCK_S) * (0.5 + draw.random())
        self._world.say(f"STUCK works of server {victim.node_id}, for {for_s:.1f} s")
        self.away[victim.node_id] += 1
        self._world.after(for_s + 2.0, lambda: self.away.subtract([victim.node_id]))
        victim.works.stick(for_s)
        return True

    # --- links

    def _cut_off(self) -> bool:
        """From the scheduler and the other servers: workers still reach it."""
        victim = self._victim()
        if victim is None:
            return False
        others = [s.node_id for s in self._stage.living if s is not victim]
        for_s = self._for_a_while(victim.node_id)
        return self._cut(_both_ways(victim.node_id, [SCHEDULER, *others]), for_s)

    def _out_of_sight(self) -> bool:
        """Of the scheduler only."""
        victim = self._victim()
        if victim is None:
            return False
        for_s = self._for_a_while(victim.node_id)
        return self._cut(_both_ways(victim.node_id, [SCHEDULER]), for_s)

    def _deaf(self) -> bool:
        """To the scheduler and the other servers, who hear it: it misses views too."""
        victim = self._victim()
        if victim is None:
            return False
        others = [s.node_id for s in self._stage.living if s is not victim]
        for_s = self._for_a_while(victim.node_id)
        return self._cut([(other, victim.node_id) for other in (SCHEDULER, *others)], for_s)

    def _one_way(self) -> bool:
        draw, victim = self._world.draw, self._victim()
        others = [s.node_id for s in self._stage.living if s is not victim]
        if victim is None or not others:
            return False
        one, other = victim.node_id, draw.choice(others)
        worker = draw.choice(self._stage.workers).end
        choices: list[list[Link]] = [
            [(one, other)],
            [(other, one)],
            [(one, SCHEDULER)],
            [(SCHEDULER, one)],
            [(worker, one)],
            [(one, worker)],
            [(node_id, one) for node_id in others],
            [(one, node_id) for node_id in others],
            # A primary that the scheduler hears goes on alone, and the others join it anew.
            _both_ways(one, others),
            _both_ways(one, others),
        ]
        return self._cut(draw.choice(choices), self._for_a_while(one))

    def _cut(self, links: Sequence[Link], for_s: float) -> bool:
        self._world.say(f"CUT {links} for {for_s:.1f} s")
        for link in links:
            self._world.cut[link] += 1
            self._undo(for_s, lambda link=link: self._world.cut.subtract([link]))  # type: ignore[misc]
        return True

    def _slow(self) -> bool:
        """Messages between two servers, or all of one, come late; the scheduler may not hear it."""
        draw, victim = self._world.draw, self._victim()
        others: list[NodeId] = [s.node_id for s in self._stage.living if s is not victim]
        if victim is None or not others:
            return False
        one, other = victim.node_id, draw.choice(others)
        if draw.random() < 0.5:
            self._cut(_both_ways(one, [SCHEDULER]), self._for_a_while(one))
        links = draw.choice(([(one, other)], [(other, one)], _both_ways(one, others)))
        by_s = draw.choice((0.5, LEASE_S, 3 * LEASE_S))
        self._world.say(f"SLOW {links} by up to {by_s:.1f} s")
        for link in links:
            self._world.slow[link] = by_s
            self._undo(
                5.0 + draw.random() * 15.0,
                lambda link=link: self._faster(link),  # type: ignore[misc]
            )
        return True

    def _faster(self, link: Link) -> None:
        self._world.slow.pop(link, None)

    # --- workers

    def _kill_worker(self) -> bool:
        found = [w for w in self._stage.workers if not w.finished and not w.is_down]
        if not found:
            return False
        victim = self._world.draw.choice(found)
        self.dead_workers.append(victim)
        self._stage.kill_worker(victim)
        if victim not in self.dead_workers:  # nobody would say that it is gone
            return False
        self._world.say(f"KILLED worker {victim.rank}")
        return True


def _both_ways(one: NodeId, others: Sequence[object]) -> list[Link]:
    return [(one, other) for other in others] + [(other, one) for other in others]
