"""Servers that are told to stop leave when others have all that they hold (G1, S8)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from ps_core.cluster_view import RangeAssignment, Session
from ps_core.errors import Fenced
from ps_core.keys import AssignmentEpoch, NodeId
from tests.sim.calamities import Calamities, Plan
from tests.sim.departing import ASK_AGAIN_S, TELLS, Departing, Departures
from tests.sim.logged import LoggedServer
from tests.sim.replicated import ReplicatedServer
from tests.sim.test_logs import LogSimulation
from tests.sim.test_replacements import ReplacementSimulation
from tests.sim.test_restores import (
    Restoration,
    RestoredSimulation,
    RestoreSimulation,
    TimelineStrikes,
)
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
    seldom: ClassVar[frozenset[str]] = frozenset({
        "left, and heard of it late", "a holder died as it was let go",
    })  # fmt: skip
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
    seldom: ClassVar[frozenset[str]] = AwaySimulation.seldom | {"stayed with the only copy"}
    medians: ClassVar[dict[str, int]] = {"messages": 2_000}

    @cached_property
    def plan(self) -> Plan:
        """What happens."""
        return with_tells(super().plan, self.world.draw)

    def restart(self) -> None:
        """A server that comes while there is no scheduler asks until there is one."""
        if self._is_dead:
            self.world.after(ASK_AGAIN_S, self.restart)
        else:
            super().restart()


class DepartureLogSimulation(Departing, LogSimulation):
    """One seed in which servers keep update logs too."""

    often: ClassVar[frozenset[str]] = frozenset({
        "told to stop", "let go", "came back with its ranges", "came back without its ranges",
        "ranges read from a log", "log snapshots", "disks stalled", "disks stalled for long",
        "disks crawled", "logs given up", "waited for a disk to come back",
    })  # fmt: skip
    medians: ClassVar[dict[str, int]] = {"messages": 1_500}

    @cached_property
    def plan(self) -> Plan:
        """What happens."""
        return with_tells(super().plan, self.world.draw)

    def _has_log(self, assignment: RangeAssignment, node_id: NodeId) -> bool:
        """Whether its primary's log has what was seen of it, or nobody has seen anything; and
        nobody who is taken for living is made primary when that server leaves.
        """
        others = set(assignment.in_sync) - {node_id}
        if assignment.primary is None or others & self.scheduler.view.living_servers:
            return False
        server, range_id = self.servers[assignment.primary], assignment.range_id
        assert isinstance(server, LoggedServer)
        seen, log = self.watch.seen_of(range_id), server.log
        if seen is None or log.goes_beyond(range_id, *seen):
            return True
        term, number = seen
        return log.has(range_id, AssignmentEpoch(term), number)


class DepartureReplacementSimulation(Departing, ReplacementSimulation):
    """One seed in which workers are replaced too."""

    often: ClassVar[frozenset[str]] = frozenset({"told to stop", "let go", "gone", "joined"})
    medians: ClassVar[dict[str, int]] = {"messages": 2_000}

    @cached_property
    def plan(self) -> Plan:
        """What happens."""
        return with_tells(super().plan, self.world.draw)


class _TimelineDepartures(TimelineStrikes, Departures):
    """What befalls one timeline, while it lasts: servers are told to stop too."""


class DepartureRestoreSimulation(Departing, RestoreSimulation):
    """One seed in which the cluster is restored, too: this is its first timeline. A server that was
    told to stop and hears that its timeline has ended ends, and registers nowhere.
    """

    often: ClassVar[frozenset[str]] = frozenset({
        "told to stop", "let go", "left an older timeline", "told while values are loaded",
        "restored in place", "restored elsewhere", "ranges loaded", "registered again",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "ranges loaded": 4}

    @cached_property
    def plan(self) -> Plan:
        """What happens."""
        return with_tells(super().plan, self.world.draw)

    def calamities_of(self, plan: Plan) -> Calamities:
        """What befalls it, as planned."""
        return _TimelineDepartures(self, plan)

    def restored(self, began: Restoration) -> RestoredSimulation:
        """The timeline that follows."""
        return _DepartureRestoredSimulation(began)

    def tell(self, server: ReplicatedServer) -> None:
        """SIGTERM."""
        if self.number > 1 and server.node_id not in self.told:
            parts = server.machine.shards.values()
            is_loading = any(not part.state.initialized for part in parts)
            self.world.counts["told while values are loaded"] += is_loading
        super().tell(server)

    @contextlib.contextmanager
    def _no_answer_for(self, session: Session) -> Iterator[None]:
        kind = RestoreSimulation if self.is_past else Departing
        with kind._no_answer_for(self, session):
            yield

    def _ended(self, node_id: NodeId, error: Fenced) -> None:
        """A server of an older timeline hears of the newer one."""
        server = self.servers[node_id]
        if node_id not in self.told or server.is_paused:
            super()._ended(node_id, error)
        else:
            self._end(server, "left an older timeline")


class _DepartureRestoredSimulation(RestoredSimulation, DepartureRestoreSimulation):
    """A timeline that began with a checkpoint."""


@pytest.mark.timeout(300)
def test_who_is_told_to_stop_leaves_and_nothing_is_lost(sim_seeds: tuple[int, ...]) -> None:
    """Whatever else befalls the others, within what is promised."""
    run_seeds(DepartureSimulation, sim_seeds[:FEW_SEEDS])
