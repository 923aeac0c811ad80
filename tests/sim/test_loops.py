"""Servers whose event loop stands, or is slow, or whose works wait for a disk, while all else goes
on (G1 to G4, S8).
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from tests.sim.calamities import LOOPS, Plan
from tests.sim.peer_streams import RECORD_BYTES
from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_simulation import run_seeds
from tests.sim.world import WINDOW_BYTES

pytestmark = pytest.mark.slow

WINDOWS = (WINDOW_BYTES, 2 * RECORD_BYTES)
"""Of streams between servers, in a seed: records of large blocks fill them."""


class LoopSimulation(FailoverSimulation):
    """One seed in which loops are blocked and slow, and works stuck, beside what else befalls
    servers.
    """

    often: ClassVar[frozenset[str]] = frozenset({
        *(f"fault: {kind}" for kind in LOOPS), "late messages", "failovers", "ranges taken over",
        "ranges given up", "joined ranges", "equal replicas",
    })  # fmt: skip
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "joined ranges": 1}

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        super().__init__(seed, narrate=narrate)
        self.world.window_bytes = random.Random(f"windows of {seed}").choice(WINDOWS)

    @cached_property
    def plan(self) -> Plan:
        """What happens."""
        plan = super().plan
        kinds = (*LOOPS, *plan.kinds[:2])
        return replace(plan, kinds=kinds, strike_count=plan.strike_count + 1)


@pytest.mark.timeout(300)
def test_training_goes_on_beside_loops_that_stand(sim_seeds: tuple[int, ...]) -> None:
    """Nothing that a server does late is seen twice, lost, or seen of one that serves no more."""
    run_seeds(LoopSimulation, sim_seeds)
