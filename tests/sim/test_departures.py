"""Servers that are told to stop leave when others have all that they hold (G1, S8)."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from tests.sim.calamities import Plan
from tests.sim.departing import TELLS, Departing
from tests.sim.test_logs import LogSimulation
from tests.sim.test_replacements import ReplacementSimulation
from tests.sim.test_scheduler_away import AwaySimulation
from tests.sim.test_simulation import run_seeds

FEW_SEEDS = 4


def with_tells(plan: Plan, draw: random.Random) -> Plan:
    """The plan, and servers that are told to stop."""
    tells = draw.sample(TELLS, draw.choice((1, 2, 3)))
    return replace(plan, kinds=(*tells, *plan.kinds[:2]))


class DepartureSimulation(Departing):
    """One seed in which servers are told to stop, beside what else befalls them."""

    often: ClassVar[frozenset[str]] = frozenset({
        *(f"fault: {kind}" for kind in TELLS), "told to stop", "let go", "stayed for now",
        "left when others had all", "left unheard", "a holder died beside who was told",
        "failovers", "joined ranges", "equal replicas",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"left, and heard of it late"})
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "let go": 1, "joined ranges": 1}

    @cached_property
    def plan(self) -> Plan:
        """What happens."""
        return with_tells(super().plan, self.world.draw)


class DepartureAwaySimulation(Departing, AwaySimulation):
    """One seed in which the scheduler is away too."""

    often: ClassVar[frozenset[str]] = frozenset({
        "scheduler paused", "scheduler died", "told to stop", "let go", "left unheard",
        "failovers",
    })  # fmt: skip
    medians: ClassVar[dict[str, int]] = {"messages": 2_000}

    @cached_property
    def plan(self) -> Plan:
        """What happens."""
        return with_tells(super().plan, self.world.draw)


class DepartureLogSimulation(Departing, LogSimulation):
    """One seed in which servers keep update logs too."""

    often: ClassVar[frozenset[str]] = frozenset({
        "told to stop", "let go", "came back with its ranges", "came back without its ranges",
        "ranges read from a log", "bases",
    })  # fmt: skip
    medians: ClassVar[dict[str, int]] = {"messages": 1_500}

    @cached_property
    def plan(self) -> Plan:
        """What happens."""
        return with_tells(super().plan, self.world.draw)


class DepartureReplacementSimulation(Departing, ReplacementSimulation):
    """One seed in which workers are replaced too."""

    often: ClassVar[frozenset[str]] = frozenset({"told to stop", "let go", "gone", "joined"})
    medians: ClassVar[dict[str, int]] = {"messages": 2_000}

    @cached_property
    def plan(self) -> Plan:
        """What happens."""
        return with_tells(super().plan, self.world.draw)


@pytest.mark.timeout(300)
def test_who_is_told_to_stop_leaves_and_nothing_is_lost(sim_seeds: tuple[int, ...]) -> None:
    """Whatever else befalls the others, within what is promised."""
    run_seeds(DepartureSimulation, sim_seeds[:FEW_SEEDS])
