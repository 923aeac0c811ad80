"""What is counted as having befallen a simulation has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.calamities import Calamities
from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_scheduler_away import AwaySimulation


@pytest.mark.parametrize(("most", "struck"), [(0, "paused"), (1, "worker killed")])
def test_a_worker_that_is_not_killed_is_not_counted(most: int, struck: str) -> None:
    simulation = FailoverSimulation(0)
    plan = replace(simulation.plan, kinds=("killed", "worker killed"), worker_deaths=most)
    calamities = Calamities(simulation, plan)
    calamities._strike("worker killed")
    counts = simulation.world.counts
    found = [kind for kind in ("paused", "worker killed") if counts[f"fault: {kind}"]]
    assert found == [struck]
    assert len(calamities.dead_workers) == sum(w.is_down for w in simulation.workers) == most


def test_a_worker_whose_end_nobody_would_say_lives_and_is_not_counted() -> None:
    simulation = AwaySimulation(0)
    simulation._is_dead = True
    simulation.calamities._strike("worker killed")
    assert simulation.world.counts["fault: worker killed"] == 0
    assert not any(worker.is_down for worker in simulation.workers)
