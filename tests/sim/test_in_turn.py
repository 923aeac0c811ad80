"""Scripts that step several tables in turn, each so many times, while workers come and are replaced
(S6).

As those of two models that are trained against each other: whoever comes begins with the loop, so
it must be at one place of all tables, as the others are when their loop begins. Some tables are
stepped from a later time of the loop on, as layers that are frozen at first.
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
from tests.sim.test_restores import Restoration, RestoredSimulation, RestoreSimulation
from tests.sim.test_scheduler_restarts import RestartSimulation
from tests.sim.test_simulation import QUICK_SEEDS, Simulation, run_seeds
from tests.sim.truth import Settings

pytestmark = pytest.mark.slow

_PACES = (1, 1, 2, 3)
_WAKES_IN = (0, 0, 0, 1, 2, 5)
_NOT_ALONE = 8
"""So often the first table is stepped at most before another one: else it is taken for alone."""

_MOSTLY_BSP = 0.6


class InTurn(Simulation):
    """One seed of such scripts. None has backup workers, who skip clocks on all tables alike."""

    def loop_of(self, seed: int) -> str:
        """Names the loop that is drawn."""
        return f"loops of {seed}"

    def specs(self, seed: int) -> list[TableSpec]:
        """The tables: two at least."""
        found = super().specs(seed)
        more = [replace(found[0], name="table-1")] if len(found) == 1 else []
        self.loops = random.Random(self.loop_of(seed))
        return [self._spec_in_turn(spec) for spec in (*found, *more)]

    def _spec_in_turn(self, spec: TableSpec) -> TableSpec:
        is_bsp = spec.consistency.backup_workers or self.loops.random() < _MOSTLY_BSP
        return replace(spec, consistency=parsed("bsp")).validated() if is_bsp else spec

    def drawn_consistency(self, draw: random.Random) -> Consistency:
        """One that an operator may want."""
        found = super().drawn_consistency(draw)
        return replace(found, backup_workers=0, grace_ms=0) if found.backup_workers else found

    def truth_settings(self, tables: Iterable[Table]) -> Settings:
        """They know the loop."""
        tables = list(tables)
        known = super().truth_settings(tables)
        for table in tables:
            known.paces[table.table_id] = self.loops.choice(_PACES)
        last = _NOT_ALONE // known.paces[tables[0].table_id] - 1
        for table in tables[1:]:
            known.wakes_in[table.table_id] = min(self.loops.choice(_WAKES_IN), last)
        known.has_save_points = self.loops.random() < 0.3
        return known


class InTurnNewcomerSimulation(InTurn, NewcomerSimulation):
    """One seed in which more workers come."""

    often: ClassVar[frozenset[str]] = frozenset({
        "newcomers' steps under bsp", "newcomers", "joined", "left", "places found",
        "places followed", "steps that are passed",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()


class InTurnReplacementSimulation(InTurn, ReplacementSimulation):
    """One seed in which workers die and are replaced, while servers fail over."""

    often: ClassVar[frozenset[str]] = frozenset({
        "gone", "replacements", "joined", "newcomers' steps under bsp", "failovers after a join",
        "places found", "places followed", "steps that are passed",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"replaced again"})


class InTurnRestartSimulation(InTurn, RestartSimulation):
    """One seed in which the scheduler dies, too: the next one hears of loops by heartbeats."""

    often: ClassVar[frozenset[str]] = frozenset({
        "gone", "replacements", "joined", "scheduler started again", "places found",
        "places followed", "steps that are passed",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()


class InTurnRestoreSimulation(InTurn, RestoreSimulation):
    """One seed in which the cluster is restored: this is its first timeline."""

    often: ClassVar[frozenset[str]] = frozenset({
        "restored in place", "restored elsewhere", "ranges loaded", "replacements", "joined",
        "places found", "places followed",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"steps that are passed"})

    def restored(self, began: Restoration) -> RestoredSimulation:
        """The timeline that follows."""
        return _InTurnRestoredSimulation(began)


class _InTurnRestoredSimulation(InTurnRestoreSimulation, RestoredSimulation):
    """A timeline that began with a checkpoint, perhaps in the middle of a loop, by a script whose
    loop is another.
    """

    def loop_of(self, seed: int) -> str:
        """Names a loop that is not the one of before."""
        return f"{super().loop_of(seed)} in timeline {self.number}"


def test_who_comes_begins_where_the_loops_of_the_others_do(sim_seeds: tuple[int, ...]) -> None:
    run_seeds(InTurnNewcomerSimulation, sim_seeds[:QUICK_SEEDS])


@pytest.mark.timeout(300)
def test_who_replaces_begins_where_the_loops_of_the_others_do(sim_seeds: tuple[int, ...]) -> None:
    """S6, whatever server is next."""
    run_seeds(InTurnReplacementSimulation, sim_seeds[:QUICK_SEEDS])


@pytest.mark.timeout(300)
def test_who_comes_while_the_scheduler_is_away_begins_there(sim_seeds: tuple[int, ...]) -> None:
    run_seeds(InTurnRestartSimulation, sim_seeds[:QUICK_SEEDS])


@pytest.mark.timeout(300)
def test_who_comes_to_a_restored_cluster_begins_there(sim_seeds: tuple[int, ...]) -> None:
    run_seeds(InTurnRestoreSimulation, sim_seeds[:QUICK_SEEDS])
