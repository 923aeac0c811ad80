"""Several features in one world, of which each seed draws some: what each does alone, other kinds
show.

    together   workers seal the steps of several tables together (S4)
    batches    entries come several in a message, and are decided together (S15), of few ranges
    loops      event loops of servers are blocked or slow, and works are stuck (G1 to G4)
    pairs      two of three holders of a range are lost in a row (G1, S8)
    narrow     streams between servers are full with few records
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from scheduler.machine.state import ClusterSettings
from tests.sim.calamities import LOOPS, Calamities, Plan
from tests.sim.test_batches import RANGES, WINDOW_BLOCKS
from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_loops import WINDOWS
from tests.sim.test_two_lost import PAIRS, Pairs
from tests.sim.world import World

_SHARES = {"together": 0.5, "batches": 0.5, "loops": 0.4, "pairs": 0.4, "narrow": 0.3}
"""Of the seeds."""


class Mixed(FailoverSimulation):
    """A simulation to which each seed adds features.

    Attributes:
        strikes: what befalls servers, where they are lost in pairs too.
        may_mix: what there may be.
        has_few_ranges: whether entries that come together are often of one range.
    """

    strikes: ClassVar[type[Pairs]] = Pairs
    may_mix: ClassVar[frozenset[str]] = frozenset(_SHARES)
    has_few_ranges: ClassVar[bool] = True
    may_group = False  # nobody in a group seals tables together

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        draw = random.Random(f"mix of {seed}")
        drawn = [what for what, share in _SHARES.items() if draw.random() < share]
        self._mix = self.may_mix.intersection(drawn)
        self._range_count = draw.choice(RANGES)
        super().__init__(seed, narrate=narrate)
        self.layout.settings.seals_together = "together" in self._mix
        if "narrow" in self._mix:
            self.world.window_bytes = min(WINDOWS)

    def settings(self) -> ClusterSettings:
        """Of the cluster."""
        settings = super().settings()
        if "batches" in self._mix and self.has_few_ranges:
            return replace(settings, range_count=self._range_count)
        return settings

    def world_of(self, seed: int, *, narrate: bool) -> World:
        """Where it happens."""
        world = super().world_of(seed, narrate=narrate)
        if "batches" in self._mix:
            world.has_batches, world.window_blocks = True, WINDOW_BLOCKS
        world.say(f"MIX {sorted(self._mix)}")
        for what in self._mix:
            world.counts[f"mixed in: {what}"] += 1
        return world

    @cached_property
    def plan(self) -> Plan:
        """What happens: what is added comes first, but for what takes a server away."""
        plan, draw = super().plan, self.world.draw
        added: list[str] = []
        if "pairs" in self._mix:
            added += draw.sample(PAIRS, 2)
            count = max(plan.server_count, draw.choice((4, 4, 5)))
            plan = replace(plan, server_count=count, replica_count=3)
        if "loops" in self._mix:
            added += draw.sample(LOOPS, 2)
        draw.shuffle(added)
        first, *others = plan.kinds
        kinds = (*added, first, *others) if "pairs" in self._mix else (first, *added, *others)
        return replace(plan, kinds=kinds, strike_count=plan.strike_count + len(added))

    def calamities_of(self, plan: Plan) -> Calamities:
        """What befalls it, as planned."""
        if "pairs" in self._mix:
            return self.strikes(self, plan)
        return super().calamities_of(plan)
