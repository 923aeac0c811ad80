"""Workers that seal the steps of several tables together, whatever befalls the servers (S4)."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_simulation import FEW, run_seeds


class TogetherSimulation(FailoverSimulation):
    """One seed in which all tables take part in a worker's step, or none does."""

    often: ClassVar[frozenset[str]] = frozenset({
        "steps sealed together", "refused beside others", "refused", "given_back", "failovers",
        "ranges taken over", "checkpoints",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    may_group = False

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        super().__init__(seed, narrate=narrate)
        self.layout.settings.seals_together = True


@pytest.mark.timeout(300)
def test_steps_of_several_tables_are_taken_on_all_or_on_none(sim_seeds: tuple[int, ...]) -> None:
    """No clock waits for ever, at the smallest gate bound, either."""
    run_seeds(TogetherSimulation, sim_seeds[:FEW])
