"""Update logs (S13), whose disks stall, beside a scheduler that dies (S18), and restores (S10).

Oracles are those of `tests.sim.test_logs`, and of what the logs are beside.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from ps_core import limits
from ps_core.cluster_view import ClusterView
from ps_core.errors import InvalidConfig, Recovering
from ps_core.keys import NodeId
from scheduler.machine.state import Registration
from tests.sim.calamities import Plan
from tests.sim.logged import LoggedServer, SimLog
from tests.sim.replicated import Place, ReplicatedServer
from tests.sim.stalls import StallingSimulation
from tests.sim.test_logs import LogSimulation
from tests.sim.test_restores import Restoration, RestoredSimulation, RestoreSimulation
from tests.sim.test_scheduler_restarts import RestartSimulation
from tests.sim.test_simulation import WORKERS, run_seeds
from tests.sim.timelines import Address, TimelineServer

pytestmark = pytest.mark.slow

FEW_SEEDS = 4


class LogRestartSimulation(LogSimulation, RestartSimulation):  # type: ignore[misc]
    """One seed in which servers keep logs, and the scheduler a journal."""

    often: ClassVar[frozenset[str]] = frozenset({
        "scheduler started again", "died before the write", "died in the write, which is lost",
        "came back with its ranges", "ranges read from a log", "log snapshots",
        "disks stalled", "disks stalled for long", "logs given up", "gone",
        "waited for a disk to come back",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"left as its log had failed"})
    medians: ClassVar[dict[str, int]] = {"messages": 1_500, "scheduler started again": 1}

    @property
    def told_view(self) -> ClusterView:
        """The newest view that anybody was told."""
        assert self._told_view is not None
        return self._told_view

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self._attempts: Counter[LoggedServer] = Counter()
        super().__init__(seed, narrate=narrate)

    def _register_with(self, dead: LoggedServer, asking: Registration) -> None:
        self._attempts[dead] += 1
        number = self._attempts[dead]
        self._reach(lambda: self._ask_with(dead, asking, number))

    def _ask_with(self, dead: LoggedServer, asking: Registration, number: int) -> None:
        """One attempt is under way: an earlier one is not made again."""
        if number != self._attempts[dead]:
            return
        try:
            self._asked_to_admit(asking, lambda decision: self._comes_with_log(dead.log, decision))
        except (Recovering, InvalidConfig):
            self._attempts[dead] += 1
            self.world.after(1.0, lambda: self._come_with_log(dead, has_booted=True))


class _LoggedTimelineServer(TimelineServer, LoggedServer):
    """A server of one timeline, with a log."""

    def kill(self) -> None:
        """It does and hears nothing any more."""
        super().kill()
        self.log.crash()


class LogRestoreSimulation(StallingSimulation, RestoreSimulation):
    """One seed in which a cluster is restored whose servers keep logs: this is its first timeline.
    Whoever ends does so for good; others come, with logs of their own.
    """

    often: ClassVar[frozenset[str]] = frozenset({
        "restored in place", "restored elsewhere", "ranges loaded", "registered again",
        "log snapshots", "frames let go", "disks stalled", "disks stalled for long",
        "stalled while values are loaded", "failovers", "joined ranges",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"logs given up"})
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "ranges loaded": 4}

    @cached_property
    def plan(self) -> Plan:
        """What happens: for so long that disks can be given up."""
        plan = super().plan
        return replace(plan, calm_s=plan.calm_s + limits.LOG_STALL_S)

    def stalls_of(self, seed: int) -> object:
        """What the draws of stalls are of."""
        return f"{seed}, timeline {self.number}"

    @property
    def may_stall(self) -> bool:
        """Whether anything befalls disks yet."""
        return not self.is_past and super().may_stall

    def made(self, node_id: NodeId, place: Place) -> ReplicatedServer:
        """A server at that place, with a log of its own."""
        log = SimLog(self.world, len(self.logs))
        self.logs.append(log)
        terms = (
            self.callers,
            self.addresses.setdefault(node_id, Address()),
            self.scheduler.settings.token_key,
        )
        made = _LoggedTimelineServer(
            self.world, node_id, self.layout.settings, WORKERS, place._replace(log=log), terms
        )
        made.on_log_failure = self.log_failed
        return made

    def log_failed(self, server: LoggedServer) -> None:
        """Another comes in its place."""
        super().log_failed(server)
        self.restart()

    def stalled(self, server: LoggedServer) -> None:
        """Its disk does not answer."""
        parts = server.machine.shards.values()
        is_loading = self.number > 1 and any(not part.state.initialized for part in parts)
        self.world.counts["stalled while values are loaded"] += is_loading

    def restored(self, began: Restoration) -> RestoredSimulation:
        """The timeline that follows."""
        return _LogRestoredSimulation(began)


class _LogRestoredSimulation(RestoredSimulation, LogRestoreSimulation):
    """A timeline that began with a checkpoint."""


@pytest.mark.timeout(300)
def test_a_scheduler_that_dies_gives_logs_their_ranges_back(sim_seeds: tuple[int, ...]) -> None:
    """Whoever comes back with its log while it is away, or as it decides that."""
    run_seeds(LogRestartSimulation, sim_seeds[:FEW_SEEDS])


@pytest.mark.timeout(300)
def test_restored_values_are_in_a_log_before_they_are_seen(sim_seeds: tuple[int, ...]) -> None:
    """Whenever its disk stalls, while they are loaded too."""
    run_seeds(LogRestoreSimulation, sim_seeds[:FEW_SEEDS])
