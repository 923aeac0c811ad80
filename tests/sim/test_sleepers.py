"""A table that no worker steps, as that of a frozen layer is, while workers come and are replaced.

Every worker reads it at its start. Nothing of it ever forms, so nobody may wait for that.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import pytest

from ps_core.consistency import Consistency, parsed
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from tests.sim.test_newcomers import NewcomerSimulation
from tests.sim.test_replacements import ReplacementSimulation
from tests.sim.test_restores import Restoration, RestoredSimulation
from tests.sim.test_restores_kept import (
    FEW_SEEDS,
    KeptRestoreSimulation,
    _KeptRestoredSimulation,
)
from tests.sim.test_simulation import QUICK_SEEDS, Simulation, _spec, run_seeds
from tests.sim.truth import Settings

pytestmark = pytest.mark.slow

_SLEEPER = "sleeper"
_ITS_SETTINGS = ("bsp", "bsp", "bsp", "ssp:1", "asp")


class Sleeping(Simulation):
    """One seed in which a table sleeps from the beginning to the end. None has backup workers:
    those who skip clocks do so on tables that sleep, too, each as many as it must.
    """

    def specs(self, seed: int) -> list[TableSpec]:
        """The tables; the last one sleeps."""
        numbers = random.Random(f"sleepers of {seed}")
        sleeper = _spec(numbers, 0, numbers)
        its = parsed(numbers.choice(_ITS_SETTINGS))
        sleeper = replace(sleeper, name=_SLEEPER, consistency=its).validated()
        return [*(_without_backups(spec) for spec in super().specs(seed)), sleeper]

    def truth_settings(self, tables: Iterable[Table]) -> Settings:
        """They know which table sleeps."""
        known = super().truth_settings(tables)
        known.asleep |= {t.table_id for t in tables if t.spec.name == _SLEEPER}
        return known

    def drawn_consistency(self, draw: random.Random) -> Consistency:
        """One that an operator may want."""
        found = super().drawn_consistency(draw)
        return replace(found, backup_workers=0, grace_ms=0) if found.backup_workers else found


def _without_backups(spec: TableSpec) -> TableSpec:
    if not spec.consistency.backup_workers:
        return spec
    return replace(spec, consistency=parsed("bsp")).validated()


class SleepingNewcomerSimulation(Sleeping, NewcomerSimulation):
    """One seed in which more workers come."""

    often: ClassVar[frozenset[str]] = frozenset({
        "newcomers' steps under bsp", "newcomers", "joined", "left", "joined what sleeps",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()


class SleepingReplacementSimulation(Sleeping, ReplacementSimulation):
    """One seed in which workers die and are replaced, while servers fail over."""

    often: ClassVar[frozenset[str]] = frozenset({
        "gone", "replacements", "joined", "newcomers' steps under bsp", "joined what sleeps",
        "failovers after a join",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"replaced again", "steps that are passed"})


class SleepingRestoreSimulation(Sleeping, KeptRestoreSimulation):
    """One seed in which the scheduler dies, and the cluster is restored: its first timeline."""

    often: ClassVar[frozenset[str]] = frozenset({
        "gone", "replacements", "joined", "joined what sleeps", "scheduler started again",
        "restored in place", "restored elsewhere", "ranges loaded",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()

    def restored(self, began: Restoration) -> RestoredSimulation:
        """The timeline that follows."""
        return _SleepingRestoredSimulation(began)


class _SleepingRestoredSimulation(SleepingRestoreSimulation, _KeptRestoredSimulation):
    """A timeline that began with a checkpoint: the table sleeps on."""

    def specs(self, seed: int) -> list[TableSpec]:
        """The tables of the checkpoint."""
        return [_without_backups(spec) for spec in _KeptRestoredSimulation.specs(self, seed)]


@pytest.mark.timeout(300)
def test_what_sleeps_is_in_checkpoints(sim_seeds: tuple[int, ...]) -> None:
    """S10: who comes to what is restored joins it there, too."""
    run_seeds(SleepingRestoreSimulation, sim_seeds[:FEW_SEEDS])


def test_who_comes_trains_beside_what_sleeps(sim_seeds: tuple[int, ...]) -> None:
    """S6: it joins a table that nobody steps where the others are."""
    run_seeds(SleepingNewcomerSimulation, sim_seeds[:QUICK_SEEDS])


@pytest.mark.timeout(300)
def test_who_replaces_trains_beside_what_sleeps(sim_seeds: tuple[int, ...]) -> None:
    """S6, whatever server is next."""
    run_seeds(SleepingReplacementSimulation, sim_seeds[:QUICK_SEEDS])
