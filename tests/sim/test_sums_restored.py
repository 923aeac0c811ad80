"""Tables of sums and groups of workers beside update logs and restores (S12, S21, S13, S10).

A checkpoint has no sums: who goes on from it pulls that of the first clock after it. Oracles are
those of what they are beside.
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.sim.summing import Summing
from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_logs_beside import (
    LogRestartSimulation,
    LogRestoreSimulation,
    _LogRestoredSimulation,
)
from tests.sim.test_restores import Restoration, RestoredSimulation
from tests.sim.test_simulation import run_seeds

pytestmark = pytest.mark.slow

FEW_SEEDS = 4
_SUMMED = ("with a table of sums", "checkpoints with a table of sums", "steps of groups")


class SumRestoreSimulation(Summing, LogRestoreSimulation):  # type: ignore[misc]
    """One seed in which a cluster is restored whose servers keep logs."""

    often: ClassVar[frozenset[str]] = frozenset({
        *_SUMMED, "restored in place", "restored elsewhere", "ranges loaded",
        "ranges read from a log", "restored ranges read from a log", "failovers",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    medians: ClassVar[dict[str, int]] = {"messages": 1_500, "ranges loaded": 4}

    def restored(self, began: Restoration) -> RestoredSimulation:
        """The timeline that follows."""
        return _SumRestoredSimulation(began)


class _SumRestoredSimulation(_LogRestoredSimulation, SumRestoreSimulation):  # type: ignore[misc]
    """A timeline that began with a checkpoint."""


class SumLogSimulation(Summing, LogRestartSimulation):  # type: ignore[misc]
    """One seed in which servers keep logs, and the scheduler a journal."""

    often: ClassVar[frozenset[str]] = frozenset({
        *_SUMMED, "scheduler started again", "came back with its ranges", "ranges read from a log",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    medians: ClassVar[dict[str, int]] = {"messages": 1_500}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [SumRestoreSimulation, SumLogSimulation])
def test_sums_go_on_from_logs_and_checkpoints(
    sim_seeds: tuple[int, ...], kind: type[FailoverSimulation]
) -> None:
    run_seeds(kind, sim_seeds[:FEW_SEEDS])
