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
from ps_core.cluster_view import ClusterView, Role, Session
from ps_core.errors import InvalidConfig, Recovering
from ps_core.keys import NodeId
from scheduler.machine.cluster import Decision
from scheduler.machine.state import ClusterSettings, Registration
from tests.sim.calamities import Plan
from tests.sim.logged import LoggedServer, SimLog
from tests.sim.replicated import Place, ReplicatedServer
from tests.sim.server import SimServer
from tests.sim.test_logs import LogSimulation
from tests.sim.test_restores import Restoration, RestoredSimulation, RestoreSimulation
from tests.sim.test_scheduler_restarts import RestartSimulation
from tests.sim.test_simulation import run_seeds
from tests.sim.timelines import Address, TimelineServer

pytestmark = pytest.mark.slow

FEW_SEEDS = 4
REPLICA_COUNTS = (1, 1, 2)
"""Of clusters that are started from a checkpoint."""


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
            self._asked_to_admit(asking, lambda decision: self._comes_with_log(dead, decision))
        except (Recovering, InvalidConfig) as error:
            self._attempts[dead] += 1
            self._refused(dead, error)


class LoggedTimelineServer(TimelineServer, LoggedServer):
    """A server of one timeline, with a log."""


class LogRestoration(Restoration):
    """The time until there is a cluster again, whose servers come with the logs that they have."""

    def _elsewhere(self) -> ClusterSettings:
        """Another cluster: often nobody but logs has what one server has."""
        settings, draw = super()._elsewhere(), self.world.draw
        replica_count = draw.choice(REPLICA_COUNTS)
        least = min(settings.min_in_sync, replica_count)
        return replace(settings, replica_count=replica_count, min_in_sync=least)


class LogRestoreSimulation(LogSimulation, RestoreSimulation):  # type: ignore[misc]
    """One seed in which a cluster is restored whose servers keep logs: this is its first timeline.
    Whoever is killed comes back with its log, and so does who registers again in the newer
    timeline: of the older one's log it goes on with nothing.
    """

    often: ClassVar[frozenset[str]] = frozenset({
        "restored in place", "restored elsewhere", "ranges loaded", "registered again",
        "log snapshots", "frames let go", "disks stalled", "disks stalled for long",
        "stalled while values are loaded", "ranges read from a log", "came back with its ranges",
        "restored ranges read from a log", "came with the log of an older timeline",
        "killed while values are loaded", "handed over while the log waits for it",
        "logs given up",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"failovers while values are loaded"})
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "ranges loaded": 4}
    server_kind = LoggedTimelineServer

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self.all_logs = self.logs_before()
        super().__init__(seed, narrate=narrate)

    def logs_before(self) -> list[SimLog]:
        """Those of older timelines, to which those of this one are added."""
        return []

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

    def stalled(self, server: LoggedServer) -> None:
        """Its disk does not answer."""
        self.world.counts["stalled while values are loaded"] += self._is_loading(server)

    def _is_loading(self, server: LoggedServer) -> bool:
        parts = server.machine.shards.values()
        return self.number > 1 and any(not part.state.initialized for part in parts)

    # --- who comes with which log

    def asking(self, index: int, role: Role) -> Registration:
        """What a node registers with: a server with a log of its own."""
        asking = RestoreSimulation.asking(self, index, role)
        if role is not Role.SERVER:
            return asking
        log = SimLog(self.world, 0)
        log.log_id = len(self.all_logs).to_bytes(15) + bytes(1)
        self.all_logs.append(log)
        return replace(asking, update_log=log.claim())

    def asking_at(self, address: Address) -> Registration:
        """What the server process there registers with: its log may be of an older timeline."""
        asking, log = super().asking_at(address), address.log
        if log is None or log.answers_within_s or log.writer is not None:
            return asking
        self.world.counts["came with the log of an older timeline"] += bool(log.frames)
        return replace(asking, update_log=log.claim())

    def made(self, node_id: NodeId, place: Place) -> ReplicatedServer:
        """A server at that place, with the log that it registered with."""
        claim = self.scheduler._state.members[node_id].registration.update_log
        assert claim is not None
        (log,) = [log for log in self.all_logs if log.log_id == claim.log_id]
        log.begin_timeline(self.scheduler.settings.timeline)
        if log not in self.logs:
            self.logs.append(log)
        made = RestoreSimulation.made(self, node_id, place._replace(log=log))
        assert isinstance(made, LoggedTimelineServer)
        made.address.log = log
        made.on_log_failure = self.log_failed
        return made

    def server(self, node_id: NodeId) -> ReplicatedServer:
        """One of the servers."""
        made = super().server(node_id)
        restored = {t.table_id for t in self.logged_tables() if t.restored_clock is not None}
        for replica in made.replication.replicas.values():
            copies = [copy for t, copy in replica.copies.items() if t in restored]
            is_whole = any(copy.facts.initialized for copy in copies)
            self.world.counts["restored ranges read from a log"] += is_whole
        return made

    def kill(self, server: SimServer) -> None:
        """It comes back some time later, with what its log has."""
        assert isinstance(server, LoggedServer)
        self.world.counts["killed while values are loaded"] += self._is_loading(server)
        super().kill(server)

    def free_addresses(self) -> list[Address]:
        """Whoever was there comes back."""
        return []

    def _come_with_log(self, dead: LoggedServer, *, has_booted: bool = False) -> None:
        assert isinstance(dead, TimelineServer)
        if not self.is_past:
            super()._come_with_log(dead, has_booted=has_booted)
        elif dead in self._coming:
            self._coming.discard(dead)
            self.newest.come(dead.address)

    def _register_with(self, dead: LoggedServer, asking: Registration) -> None:
        def register() -> None:
            if self.is_past:
                self._come_with_log(dead)
            else:
                super(LogRestoreSimulation, self)._register_with(dead, asking)

        self._reach(register)

    def _comes_with_log(self, dead: LoggedServer, decision: Decision[Session]) -> None:
        assert isinstance(dead, TimelineServer)
        self.addresses[decision.reply.node_id] = dead.address
        super()._comes_with_log(dead, decision)

    # --- restores

    def restoration(self) -> Restoration:
        """The time until there is a cluster again."""
        return LogRestoration(self)

    def restored(self, began: Restoration) -> RestoredSimulation:
        """The timeline that follows."""
        return _LogRestoredSimulation(began)


class _LogRestoredSimulation(RestoredSimulation, LogRestoreSimulation):  # type: ignore[misc]
    """A timeline that began with a checkpoint."""

    def logs_before(self) -> list[SimLog]:
        """Those of older timelines."""
        assert isinstance(self.began.before, LogRestoreSimulation)
        return self.began.before.all_logs


@pytest.mark.timeout(300)
def test_a_scheduler_that_dies_gives_logs_their_ranges_back(sim_seeds: tuple[int, ...]) -> None:
    """Whoever comes back with its log while it is away, or as it decides that."""
    run_seeds(LogRestartSimulation, sim_seeds[:FEW_SEEDS])


@pytest.mark.timeout(300)
def test_restored_values_are_in_a_log_before_they_are_seen(sim_seeds: tuple[int, ...]) -> None:
    """Whenever its disk stalls, while they are loaded too."""
    run_seeds(LogRestoreSimulation, sim_seeds[:FEW_SEEDS])
