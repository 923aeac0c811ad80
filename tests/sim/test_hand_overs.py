"""Ranges are handed over until primaries are spread evenly, whatever befalls meanwhile (S9)."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.sim.handing_over import HandingOver
from tests.sim.test_departures import DepartureSimulation
from tests.sim.test_replacements import ReplacementSimulation
from tests.sim.test_scheduler_restarts import RestartSimulation
from tests.sim.test_simulation import run_seeds

FEW_SEEDS = 4

_STRUCK = tuple(f"struck in a hand-over: {role}" for role in ("former", "target", "other"))


class HandOverSimulation(HandingOver):
    """One seed in which ranges are handed over, beside failover."""

    often: ClassVar[frozenset[str]] = frozenset({
        *_STRUCK, "hand-overs advised", "hand-overs", "ranges handed over", "ranges taken over",
        "hand-overs to who is copied to first", "workers that miss views", "equal replicas",
        "failovers", "checkpoints", "changed",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"backups spared"})
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "ranges handed over": 1}


class HandOverReplacementSimulation(HandingOver, ReplacementSimulation):
    """One seed in which workers are replaced too."""

    often: ClassVar[frozenset[str]] = frozenset({"hand-overs", "ranges handed over", "joined"})
    seldom: ClassVar[frozenset[str]] = frozenset()
    medians: ClassVar[dict[str, int]] = {"messages": 2_000}


class HandOverRestartSimulation(HandingOver, RestartSimulation):
    """One seed in which the scheduler dies, and another goes on from its journal."""

    often: ClassVar[frozenset[str]] = frozenset({
        "hand-overs", "ranges handed over", "scheduler started again",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    medians: ClassVar[dict[str, int]] = {"messages": 2_000}


class HandOverDepartureSimulation(HandingOver, DepartureSimulation):
    """One seed in which servers are told to stop too."""

    often: ClassVar[frozenset[str]] = frozenset({"hand-overs", "ranges handed over", "let go"})
    seldom: ClassVar[frozenset[str]] = frozenset()
    medians: ClassVar[dict[str, int]] = {"messages": 2_000}


@pytest.mark.timeout(300)
def test_primaries_are_even_again_and_nothing_is_lost(sim_seeds: tuple[int, ...]) -> None:
    """Whatever befalls those who take part."""
    run_seeds(HandOverSimulation, sim_seeds)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind",
    [HandOverReplacementSimulation, HandOverRestartSimulation, HandOverDepartureSimulation],
)
def test_so_it_is_beside_other_faults(sim_seeds: tuple[int, ...], kind: type[HandingOver]) -> None:
    run_seeds(kind, sim_seeds[:FEW_SEEDS])
