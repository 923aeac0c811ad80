"""What befalls a cluster beside what else does, some of it in each seed: see `mixing`.

Oracles are those of every feature.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from tests.sim.calamities import Plan
from tests.sim.departing import Departures
from tests.sim.mixing import Mixed
from tests.sim.test_departures import DepartureReplacementSimulation
from tests.sim.test_growth import GrowthHandOverSimulation
from tests.sim.test_in_turn import InTurnRestartSimulation
from tests.sim.test_late_joins import LateJoinSimulation
from tests.sim.test_logs_beside import LogRestartSimulation
from tests.sim.test_restores import (
    Restoration,
    RestoredSimulation,
    RestoreSimulation,
    TimelineStrikes,
)
from tests.sim.test_runs import RunSimulation
from tests.sim.test_runs_emptied import EmptiedSimulation
from tests.sim.test_scheduler_restarts import RestartSimulation
from tests.sim.test_simulation import run_seeds
from tests.sim.test_two_lost import PAIRS, Pairs

pytestmark = pytest.mark.slow

FEW_SEEDS = 4
_ALONE = frozenset({"together", "batches", "loops", "narrow"})
"""What there may be where few servers have a range."""
_MIXED = (*(f"mixed in: {what}" for what in _ALONE), "several decided at once")
_IN_PAIRS = ("mixed in: pairs", "two lost in a row")


class MixedReplacementSimulation(Mixed, GrowthHandOverSimulation):
    """One seed in which workers are replaced, and more come, and ranges are handed over."""

    often: ClassVar[frozenset[str]] = frozenset({
        *_MIXED, *_IN_PAIRS, "gone", "replacements", "joined", "workers beyond the first",
        "steps sealed together", "failovers after a join",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()


class MixedRestartSimulation(Mixed, RestartSimulation):
    """One seed in which the scheduler dies, and another goes on from its journal."""

    often: ClassVar[frozenset[str]] = frozenset({
        *_MIXED, *_IN_PAIRS, "scheduler started again", "steps sealed together", "checkpoints",
    })  # fmt: skip


class _TimelinePairs(TimelineStrikes, Pairs):
    """What befalls one timeline."""


class MixedRestoreSimulation(Mixed, RestoreSimulation):
    """One seed in which the cluster is restored: this is its first timeline."""

    often: ClassVar[frozenset[str]] = frozenset({
        *_MIXED, *_IN_PAIRS, "restored in place", "restored elsewhere", "ranges loaded",
        "steps sealed together",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    strikes = _TimelinePairs

    def restored(self, began: Restoration) -> RestoredSimulation:
        """The timeline that follows."""
        return _MixedRestoredSimulation(began)


class _MixedRestoredSimulation(RestoredSimulation, MixedRestoreSimulation):
    """A timeline that began with a checkpoint."""

    @cached_property
    def plan(self) -> Plan:
        """What happens: two are lost in a row where there are three."""
        plan = super().plan
        if plan.replica_count > 2:
            return plan
        return replace(plan, kinds=tuple(kind for kind in plan.kinds if kind not in PAIRS))


class MixedRunSimulation(Mixed, RunSimulation):
    """One seed in which runs share the servers."""

    often: ClassVar[frozenset[str]] = frozenset({
        *_MIXED, *_IN_PAIRS, "runs begun", "runs removed", "trained in a run", "gone",
        "steps sealed together",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "runs begun": 1}


class MixedLogSimulation(Mixed, LogRestartSimulation):  # type: ignore[misc]
    """One seed in which servers keep update logs, and the scheduler a journal."""

    often: ClassVar[frozenset[str]] = frozenset({
        *_MIXED, *_IN_PAIRS, "came back with its ranges", "ranges read from a log",
        "log snapshots", "power cuts", "disks stalled", "scheduler started again",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()


class _DeparturePairs(Departures, Pairs):
    """Servers are told to stop, too."""


class MixedDepartureSimulation(Mixed, DepartureReplacementSimulation):
    """One seed in which servers are told to stop, and workers are replaced."""

    often: ClassVar[frozenset[str]] = frozenset({
        *_MIXED, *_IN_PAIRS, "told to stop", "let go", "gone", "joined", "steps sealed together",
    })  # fmt: skip
    strikes = _DeparturePairs


class MixedEmptiedSimulation(Mixed, EmptiedSimulation):
    """One seed in which ranges lose all holders when a run was removed, and effects fail."""

    often: ClassVar[frozenset[str]] = frozenset({
        *_MIXED, "runs removed", "ranges unplaced", "ranges placed anew",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    may_mix = _ALONE
    has_few_ranges = False  # others are emptied, and placed anew


class MixedTableSimulation(Mixed, LateJoinSimulation):
    """One seed in which tables are created while workers come and are replaced."""

    often: ClassVar[frozenset[str]] = frozenset({
        *_MIXED, *_IN_PAIRS, "late tables", "joined", "gone", "late tables joined",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    has_few_ranges = False  # others are placed late


class MixedInTurnSimulation(Mixed, InTurnRestartSimulation):
    """One seed in which tables are stepped in turn, and workers and schedulers die."""

    often: ClassVar[frozenset[str]] = frozenset({
        "mixed in: batches", "mixed in: loops", *_IN_PAIRS, "places found", "places followed",
        "scheduler started again", "joined", "gone",
    })  # fmt: skip
    may_mix = _ALONE - {"together"} | {"pairs"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind",
    [
        MixedReplacementSimulation,
        MixedRestartSimulation,
        MixedRestoreSimulation,
        MixedRunSimulation,
        MixedLogSimulation,
        MixedDepartureSimulation,
        MixedEmptiedSimulation,
        MixedTableSimulation,
        MixedInTurnSimulation,
    ],
)
def test_training_goes_on_whatever_meets(sim_seeds: tuple[int, ...], kind: type[Mixed]) -> None:
    run_seeds(kind, sim_seeds[:FEW_SEEDS])
