"""Two holders of a range die one right after the other; a third has all of it (G1, S8)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from ps_core.keys import NodeId
from tests.sim.calamities import Calamities, Plan
from tests.sim.replicated import LEASE_S, ReplicatedServer
from tests.sim.scheduled import SCHEDULER
from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_simulation import QUICK_SEEDS, run_seeds

pytestmark = pytest.mark.slow

AGAIN_S = 0.1
PAIRS = ("two killed", "heir out of sight")


class Pairs(Calamities):
    """The calamities, and servers that die in pairs."""

    def __init__(self, stage: FailoverSimulation, plan: Plan) -> None:
        super().__init__(stage, plan)
        self._beside = stage
        self._strikes["two killed"] = self._kill_two
        self._strikes["heir out of sight"] = self._hide_heir

    def _kill_two(self) -> bool:
        """A primary, and within a lease one of its backups: before another is promoted, mostly."""
        victim = self._victim(for_good=True)
        if victim is None or not victim.replication.primaries:
            return False
        draw, view = self._world.draw, self._beside.scheduler.view
        mine = [r for r in view.ranges if r.primary == victim.node_id and len(r.backups) > 1]
        if not mine:
            return False
        second = self._beside.servers[draw.choice(draw.choice(mine).backups)]
        self._lose(victim)
        until_s = self._world.now_s + LEASE_S
        self._world.after(draw.random() * LEASE_S, lambda: self._lose_too(second, until_s))
        return True

    def _hide_heir(self) -> bool:
        """The scheduler does not hear a primary, which others do; nor, a moment later and for not
        much longer than a lease, a backup of it, which hears the scheduler: so that one is promoted
        and deposed while it waits for the primary's lease to run out.
        """
        victim, draw, stage = self._victim(), self._world.draw, self._beside
        mine = [r for r in stage.scheduler.view.ranges if victim and r.primary == victim.node_id]
        candidates = [n for r in mine for n in r.backups if not stage.servers[n].is_dead]
        if victim is None or not candidates:
            return False
        heir, one = stage.servers[draw.choice(candidates)], victim.node_id
        self.away[one] += 1
        may_go_too = stage.may_lose(heir, for_good=False)
        self.away.subtract([one])
        if not may_go_too:
            return False
        self._leave(one, 3 * LEASE_S)
        self._cut([(one, SCHEDULER), (SCHEDULER, one)], 2.5 * LEASE_S)
        begins_s, for_s = draw.uniform(0.2, 1.5), LEASE_S + draw.random() * 1.5
        self._leave(heir.node_id, begins_s + for_s + 2.0)
        self._undo(begins_s, lambda: self._hide(heir, for_s))
        return True

    def _leave(self, node_id: NodeId, for_s: float) -> None:
        """The scheduler may not hear it for so long."""
        self.away[node_id] += 1
        self._world.after(for_s, lambda: self.away.subtract([node_id]))

    def _hide(self, server: ReplicatedServer, for_s: float) -> None:
        self._cut([(server.node_id, SCHEDULER)], for_s)

    def _lose_too(self, server: ReplicatedServer, until_s: float) -> None:
        """As soon as a third has all that it has: then it makes no difference to anybody."""
        if self.is_calm or server.is_dead or self._world.now_s > until_s:
            return
        if self._stage.may_lose(server, for_good=True):
            self._world.counts["two lost in a row"] += 1
            self._lose(server)
        else:
            self._world.after(AGAIN_S, lambda: self._lose_too(server, until_s))

    def _lose(self, server: ReplicatedServer) -> None:
        self._world.say(f"KILLED server {server.node_id}, of a pair")
        self._stage.kill(server)
        self._world.counts["fault: restarted"] += 1
        self._world.after(1.0 + self._world.draw.random() * 9.0, self._stage.restart)


class TwoLostSimulation(FailoverSimulation):
    """One seed with three replicas, of which two are lost in a row."""

    often: ClassVar[frozenset[str]] = FailoverSimulation.often | {"two lost in a row"}
    seldom: ClassVar[frozenset[str]] = frozenset({"deposed before it served"})
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "failovers": 1, "joined ranges": 1}

    @cached_property
    def plan(self) -> Plan:
        """What happens: a pair first."""
        plan = super().plan
        count = self.world.draw.choice((4, 4, 5))
        kinds = (*self.world.draw.sample(PAIRS, 2), *plan.kinds)
        return replace(
            plan,
            server_count=count,
            replica_count=3,
            kinds=kinds,
            strike_count=plan.strike_count + 3,
        )

    def calamities_of(self, plan: Plan) -> Calamities:
        """What befalls it, as planned."""
        return Pairs(self, plan)

    def _check_end(self) -> None:
        super()._check_end()
        for server in self.living:
            missing = server.replication.missing
            assert not missing, f"LOST: ranges {missing} are server {server.node_id}'s: no values"


@pytest.mark.timeout(300)
def test_a_third_holder_has_all(sim_seeds: tuple[int, ...]) -> None:
    """Whichever of the others die, and however soon."""
    run_seeds(TwoLostSimulation, sim_seeds[:QUICK_SEEDS])
