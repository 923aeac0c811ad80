"""Workers share a data set out, while they, servers and the scheduler die, and restores come (S20).

Oracles: those of `tests.sim.sharing`, and of the simulations that it happens beside.
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.sim.sharing import Sharing
from tests.sim.test_restores import Restoration, RestoredSimulation
from tests.sim.test_restores_kept import KeptRestoreSimulation, _KeptRestoredSimulation
from tests.sim.test_simulation import QUICK_SEEDS, run_seeds

pytestmark = pytest.mark.slow

FEW_SEEDS = 4


class ShardSimulation(Sharing):
    """One seed."""

    often: ClassVar[frozenset[str]] = frozenset({
        "shards issued", "shards returned", "issued again", "waits for shards", "passes seen over",
        "checkpoints of shards", "scheduler started again", "died before a lease was written",
        "gone", "replacements", "started again at once", "failovers",
    })  # fmt: skip
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "passes seen over": 2}


class ShardRestoreSimulation(Sharing, KeptRestoreSimulation):
    """One seed in which the cluster is restored: this is its first timeline."""

    often: ClassVar[frozenset[str]] = frozenset({
        "shards issued", "shards returned", "passes seen over", "checkpoints of shards",
        "restored within a pass", "restored in place", "restored elsewhere",
        "scheduler started again", "ranges loaded",
    })  # fmt: skip
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "ranges loaded": 4}

    def restored(self, began: Restoration) -> RestoredSimulation:
        """The timeline that follows."""
        return _RestoredShards(began)


class _RestoredShards(_KeptRestoredSimulation, ShardRestoreSimulation):
    """A timeline that began with a checkpoint."""

    def __init__(self, began: Restoration) -> None:
        super().__init__(began)
        self.world.counts["restored within a pass"] += bool(self.shared.restored)


@pytest.mark.timeout(300)
def test_each_shard_of_a_pass_is_done_once(sim_seeds: tuple[int, ...]) -> None:
    run_seeds(ShardSimulation, sim_seeds[:QUICK_SEEDS] if len(sim_seeds) > 1 else sim_seeds)


@pytest.mark.timeout(300)
def test_a_restored_cluster_goes_on_within_its_pass(sim_seeds: tuple[int, ...]) -> None:
    run_seeds(ShardRestoreSimulation, sim_seeds[:FEW_SEEDS] if len(sim_seeds) > 1 else sim_seeds)
