"""What a worker sends to a server at once comes in one message, as on a push stream (S15).

A server decides all of it before it does any of what follows, and tells its backups once. In most
seeds there are few ranges: what comes together is of one range, then.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import ClassVar

import pytest

from scheduler.machine.state import ClusterSettings
from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_replacements import ReplacementSimulation
from tests.sim.test_simulation import QUICK_SEEDS, Simulation, run_seeds
from tests.sim.world import World

pytestmark = pytest.mark.slow

WINDOW_BLOCKS = 8
"""That a worker may have on their way to a server: more than elsewhere."""
RANGES = (2, 3, 8)


class Batched(Simulation):
    """One seed of it."""

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self._range_count = random.Random(f"ranges of {seed}").choice(RANGES)
        super().__init__(seed, narrate=narrate)

    def settings(self) -> ClusterSettings:
        """Of the cluster."""
        return replace(super().settings(), range_count=self._range_count)

    def world_of(self, seed: int, *, narrate: bool) -> World:
        """Where it happens."""
        world = super().world_of(seed, narrate=narrate)
        world.has_batches, world.window_blocks = True, WINDOW_BLOCKS
        return world


class BatchSimulation(Batched, FailoverSimulation):
    """One seed in which servers fail over."""

    often: ClassVar[frozenset[str]] = frozenset({
        "entries that came with others", "several decided at once", "failovers", "eager steps",
        "ranges taken over", "joined ranges", "refused", "given_back", "scaled updates",
        "equal replicas", "checkpoints", "changed", "discarded", "rejected",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()


class BatchReplacementSimulation(Batched, ReplacementSimulation):
    """One seed in which workers are replaced, too."""

    often: ClassVar[frozenset[str]] = frozenset({
        "entries that came with others", "several decided at once", "failovers", "gone", "joined",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [BatchSimulation, BatchReplacementSimulation])
def test_what_comes_together_is_decided_in_its_order(
    sim_seeds: tuple[int, ...], kind: type[FailoverSimulation]
) -> None:
    run_seeds(kind, sim_seeds[:QUICK_SEEDS])
