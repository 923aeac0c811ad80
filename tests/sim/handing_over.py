"""Ranges that are handed over, and what befalls those who take part, at each step (S9).

    advised --seen--> stopped --drained--> asked --granted--> seen by the target, and by the former

More servers come than there are at first: they have nothing, so that primaries are spread unevenly.
Whoever takes part is killed, paused or cut off a moment after a hand-over is advised or granted:
before or after it has seen that, and with what it asks or is asked on its way. Workers miss views.

Oracles, beside those of failover: G2, HELD, EQUAL and LIVE, of which `is_even` is one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

from ps_core.cluster_view import RangeAssignment
from ps_core.keys import NodeId, RangeId
from scheduler.machine.state import HandOversAdvised, RangesHandedOver, Transition
from tests.sim.actors import SimWorker
from tests.sim.calamities import Plan
from tests.sim.replicated import LEASE_S
from tests.sim.scheduled import SCHEDULER
from tests.sim.test_failover import FailoverSimulation
from tests.sim.world import Link

MOMENTS_S = (0.0, 0.3, 1.0, 2.5)
"""After which something befalls who takes part, at most."""
FOR_S = (0.3, 1.0, LEASE_S, 2 * LEASE_S, 15.0)
BLIND_S = 20.0


class HandingOver(FailoverSimulation):
    """A simulation in which servers come, to which ranges are handed over."""

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self.fates = random.Random(f"hand-overs of {seed}")
        self._strikes_left = self.fates.choice((0, 1, 2, 3, 5))
        self._patience = self.fates.choice((0.3, 0.6, 0.9))
        self._blind_until_s: dict[int, float] = {}
        self._advised: set[tuple[RangeId, NodeId]] = set()
        super().__init__(seed, narrate=narrate)
        for _ in range(self.fates.choice((1, 1, 2))):
            self.world.after(self.fates.random() * self.fates.choice((1.0, 8.0)), self.restart)

    @cached_property
    def plan(self) -> Plan:
        """What happens: little else, and few servers at first."""
        plan = super().plan
        count = min(plan.strike_count, self.fates.choice((0, 1, 2)))
        fewest = max(plan.replica_count, plan.min_in_sync, 2)
        return replace(
            plan,
            server_count=self.fates.choice((fewest, plan.server_count)),
            strike_count=max(count, 1),
            worker_deaths=min(plan.worker_deaths, count),
        )

    # --- what befalls who takes part

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        ranges = self.scheduler.view.ranges
        if isinstance(transition, HandOversAdvised):
            advised = {(r.range_id, r.hand_over_to) for r in ranges if r.hand_over_to is not None}
            for range_id, target in sorted(advised - self._advised):
                is_copied = target not in ranges[range_id].backups
                self.world.counts["hand-overs to who is copied to first"] += is_copied
                self._may_befall(ranges[range_id], (ranges[range_id].primary, target))
            self._advised = advised
        if isinstance(transition, RangesHandedOver):
            for range_id in transition.range_ids:
                both = transition.primary, ranges[range_id].primary
                self._may_befall(ranges[range_id], both)

    def _may_befall(
        self, assignment: RangeAssignment, both: tuple[NodeId | None, NodeId | None]
    ) -> None:
        """One of both, or of the others that have the range."""
        fates = self.fates
        if self._strikes_left <= 0 or fates.random() > self._patience:
            return
        self._strikes_left -= 1
        others = sorted({*assignment.in_sync} - set(both))
        roles = [("former", both[0]), ("target", both[1])]
        role, victim = fates.choice([*roles, *(("other", each) for each in others[:1])])
        strike = fates.choice((self._kill_one, self._pause_one, self._cut_off_one, self._deafen))
        moment_s = fates.choice(MOMENTS_S) * fates.random()
        assert victim is not None
        self.world.after(moment_s, lambda: self._befalls(role, victim, strike))
        if fates.random() < 0.3:
            worker = fates.choice(self.workers)
            self.world.after(moment_s, lambda: self._blind(worker))

    def _befalls(self, role: str, victim: NodeId, strike: Callable[[NodeId], bool]) -> None:
        if self.calamities.is_calm or victim not in self.servers:
            return
        self.world.counts[f"struck in a hand-over: {role}"] += strike(victim)

    def _kill_one(self, node_id: NodeId) -> bool:
        calamities = self.calamities
        return calamities._kill(calamities._victim(for_good=True, node_id=node_id))

    def _pause_one(self, node_id: NodeId) -> bool:
        calamities = self.calamities
        return calamities._pause(calamities._victim(node_id=node_id))

    def _cut_off_one(self, node_id: NodeId) -> bool:
        """From all, or from the scheduler."""
        others = self._others(node_id) if self.fates.random() < 0.5 else []
        return self._cut(
            node_id, [link for other in (SCHEDULER, *others) for link in _ways(node_id, other)]
        )

    def _deafen(self, node_id: NodeId) -> bool:
        """It is not heard, or hears nothing."""
        others = [SCHEDULER, *self._others(node_id)]
        links: list[Link] = [(node_id, other) for other in others]
        if self.fates.random() < 0.5:
            links = [(other, node_id) for other in others]
        kept = self.fates.choice((links, links[:1], links[1:]))
        return self._cut(node_id, kept)

    def _others(self, node_id: NodeId) -> list[NodeId]:
        return [server.node_id for server in self.living if server.node_id != node_id]

    def _cut(self, node_id: NodeId, links: list[Link]) -> bool:
        calamities = self.calamities
        if calamities._victim(node_id=node_id) is None:
            return False
        for_s = self.fates.choice(FOR_S) * (0.5 + self.fates.random())
        calamities.away[node_id] += 1
        self.world.after(for_s + 2.0, lambda: calamities.away.subtract([node_id]))
        return calamities._cut(links, for_s)

    # --- workers that miss views

    def _blind(self, worker: SimWorker) -> None:
        if not self.calamities.is_calm:
            self.world.counts["workers that miss views"] += 1
            self._blind_until_s[worker.rank] = self.world.now_s + BLIND_S * self.fates.random()

    def _tell_worker(self, worker: SimWorker) -> None:
        """Not what it misses."""
        until_s = self._blind_until_s.pop(worker.rank, 0.0)
        if until_s <= self.world.now_s:
            super()._tell_worker(worker)
            return
        if worker.rank not in self._blind_until_s:
            self.world.after(until_s - self.world.now_s, partial(self._tell_worker, worker))
        self._blind_until_s[worker.rank] = until_s


def _ways(one: NodeId, other: object) -> list[Link]:
    return [(one, other), (other, one)]
