"""Tables whose consistency changes again and again in the simulated cluster (S6).

Every promise of a setting holds for the clocks that it belongs to, whatever came before, and
nothing is lost, applied twice, or waited for without end.
"""

from __future__ import annotations

import pytest

from tests.sim.scheduled import ScheduledSimulation
from tests.sim.test_simulation import run_seeds

pytestmark = pytest.mark.slow


def test_every_clock_has_its_setting(sim_seeds: tuple[int, ...]) -> None:
    """G1, G3, G4 under settings that change while steps, promises and views are on their way."""
    run_seeds(ScheduledSimulation, sim_seeds)
