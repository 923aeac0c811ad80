"""Servers that are killed and come back with their update logs: nothing is lost (G1, S13)."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from ps_core.cluster_view import ClusterView, Role, Session
from ps_core.errors import InvalidConfig, PushpullError, Recovering
from ps_core.keys import NodeId, RangeId
from ps_core.tables.table import Table
from scheduler.machine.cluster import Decision
from scheduler.machine.state import RangesFailedOver, Registration, Transition, UpdateLogClaim
from tests.sim.calamities import Plan
from tests.sim.logged import LoggedServer, SimLog, fresh_part
from tests.sim.replicated import LEASE_S, Place, ReplicatedServer
from tests.sim.stalls import StallingSimulation
from tests.sim.test_simulation import WORKERS, run_seeds

pytestmark = pytest.mark.slow

WHILE_DEAD_S = (0.1, 1.0, 5.0, 12.0)
AGAIN = 0.5
"""Of those who come back: what killed them does so again."""
REBOOTED = 0.3
"""Of those who come back where others have copies: their machines were started again."""
AGAIN_AFTER_S = (0.2, 1.0, 5.0)
CUT = 0.5
"""Of the seeds: the power of all servers fails; their logs are synced."""
CUT_AT_FAILOVER = 0.6
"""Of these: after a backup was promoted."""
CUT_AFTER_S = 2.0
CUT_AGAIN = 0.4
"""And again, while they come back."""
CUT_AGAIN_AFTER_S = (0.5, 4.0, 12.0)
CUT_TAKES_S = (0.0, 0.3, LEASE_S)
"""At most, from the first server's death to the last one's."""
MOST_REFUSALS = 30
"""Of one that comes back, a second apart: another may have its address until it is silent, which is
found a lease after the scheduler was started again.
"""


class LogSimulation(StallingSimulation):
    """One seed in which every server keeps a log, and whoever is killed comes back."""

    often: ClassVar[frozenset[str]] = frozenset({
        "fault: killed", "servers restarted", "ranges read from a log", "log snapshots",
        "frames let go", "ranges ended in a log", "lost", "duplicated", "checkpoints",
        "came back without its ranges", "came back with its ranges", "gone",
        "killed again", "frames of the taken over", "disks stalled", "disks stalled for long",
        "disks crawled", "logs given up", "waited for a disk to come back",
        "power cuts", "power cuts of replicas",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"frames lost", "withheld ranges ended"})
    medians: ClassVar[dict[str, int]] = {"messages": 1_500, "servers restarted": 1}
    server_kind: ClassVar[type[LoggedServer]] = LoggedServer
    may_cut: ClassVar[bool] = True

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self.next_log: SimLog | None = None
        self._boots = random.Random(f"boots of {seed}")
        self._comings = itertools.count()
        self._refusals: Counter[LoggedServer] = Counter()
        self._coming: set[LoggedServer] = set()
        """Servers that died, and come back."""
        self._least_in_sync = random.Random(f"in sync of {seed}").choice((1, 2))
        self._cuts = random.Random(f"cuts of {seed}")
        self._is_cut = self.may_cut and self._cuts.random() < CUT
        self._is_cut_at_failover = self._is_cut and self._cuts.random() < CUT_AT_FAILOVER
        super().__init__(seed, narrate=narrate)
        if self._is_cut and not self._is_cut_at_failover:
            self.world.after(self._cuts.uniform(0.5, self.plan.calm_s), self._cut_power)

    @cached_property
    def plan(self) -> Plan:
        """What happens: with one replica nobody but the log has anything."""
        replica_count = self.world.draw.choice((1, 1, 2))
        least = min(self._least_in_sync, replica_count)
        return replace(super().plan, replica_count=replica_count, min_in_sync=least)

    def asking(self, index: int, role: Role) -> Registration:
        """What one of the first nodes registers with."""
        asking = super().asking(index, role)
        if role is not Role.SERVER:
            return asking
        log = SimLog(self.world, index)
        self.logs.append(log)
        return replace(asking, update_log=UpdateLogClaim(log.log_id))

    def made(self, node_id: NodeId, place: Place) -> ReplicatedServer:
        """A server, with its log."""
        log = self.next_log or self.logs[len(self.servers)]
        place = place._replace(log=log)
        made = self.server_kind(self.world, node_id, self.layout.settings, WORKERS, place)
        made.on_log_failure = self.log_failed
        return made

    def may_lose(self, server: ReplicatedServer, *, for_good: bool) -> bool:
        """Whoever is killed comes back. Where others have copies too it is one at a time, as
        without logs, unless all die: one that has a range alone may not have a base of it yet.
        """
        if self.plan.replica_count > 1:
            return super().may_lose(server, for_good=for_good)
        return not server.is_dead

    def kill(self, server: ReplicatedServer) -> None:
        """It comes back some time later, with what its log has."""
        dead = self.crash(server)
        self._coming.add(dead)
        after_s = self.world.draw.choice(WHILE_DEAD_S) * (0.5 + self.world.draw.random())
        self.world.after(after_s, lambda: self._come_with_log(dead))

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        if isinstance(transition, RangesFailedOver) and self._is_cut_at_failover:
            self._is_cut_at_failover = False
            self.world.after(CUT_AFTER_S * self._cuts.random(), self._cut_power)

    def _cut_power(self) -> None:
        """All servers die, before the scheduler misses one of them, or as it does."""
        if self.calamities.is_calm:
            return
        takes_s = self._cuts.choice(CUT_TAKES_S)
        self.world.counts["power cuts"] += 1
        self.world.counts["power cuts of replicas"] += self.plan.replica_count > 1
        self.world.say(f"POWER CUT within {takes_s} s")
        for server in self.living:
            self.world.after(takes_s * self._cuts.random(), lambda s=server: self._lose_power(s))  # type: ignore[misc]
        if self._cuts.random() < CUT_AGAIN:
            after_s = self._cuts.choice(CUT_AGAIN_AFTER_S) * (0.5 + self._cuts.random())
            self.world.after(after_s, self._cut_power)

    def _lose_power(self, server: ReplicatedServer) -> None:
        if not server.is_dead:
            self.kill(server)

    def crash(self, server: ReplicatedServer) -> LoggedServer:
        """It is dead, and some of what was on its way to its log is not in it."""
        assert isinstance(server, LoggedServer)
        server.kill()
        return server

    def restart(self) -> None:
        """Nobody else comes."""

    def _reboots(self, log: SimLog) -> bool:
        """Whether its machine was started again: others have its ranges then."""
        if self.plan.replica_count == 1 or self._boots.random() >= REBOOTED or self._is_cut:
            return False
        living = {server.node_id for server in self.living} - self.lost()
        kept = log.begins().keys() & {r.range_id for r in self.ranges_to_keep()}
        ranges = [r for r in self.told_view.ranges if r.range_id in kept]
        return all(living.intersection(r.in_sync) for r in ranges)

    def _come_with_log(self, dead: LoggedServer, *, has_booted: bool = False) -> None:
        log = dead.log
        if log.answers_within_s:  # it cannot be read, nor may its lock be free
            self.world.counts["waited for a disk to come back"] += 1
            again_s = log.answers_within_s + 0.01
            self.world.after(again_s, lambda: self._come_with_log(dead, has_booted=has_booted))
            return
        node = self.scheduler._state.members[dead.node_id].registration
        if not has_booted and self._reboots(log):
            log.reboot()
        asking = replace(
            node,
            registration_id=f"log {next(self._comings)}".encode().ljust(16),
            address=self.address_again(dead),
            update_log=log.claim(),
            waited_s=0.0,
        )
        self._register_with(dead, asking)

    def address_again(self, dead: LoggedServer) -> str:
        """Where it comes: it is free, since who comes has its log."""
        return self.scheduler._state.members[dead.node_id].registration.address

    def _register_with(self, dead: LoggedServer, asking: Registration) -> None:
        try:
            decision = self.scheduler.register(asking, self.world.now_s)
        except (Recovering, InvalidConfig) as error:
            self._refused(dead, error)
        else:
            self._comes_with_log(dead, decision)

    def _refused(self, dead: LoggedServer, error: PushpullError) -> None:
        """Under another id it may be too early for its address; nothing else is in its way."""
        assert "'s address is" in error.message and "has already" in error.message, (  # noqa: PT018
            f"S13: who comes back with the log of server {dead.node_id} is refused: {error!r}"
        )
        self._refusals[dead] += 1
        self.world.counts["came too early for its address"] += 1
        assert self._refusals[dead] <= MOST_REFUSALS, (
            f"LIVE: who comes back with the log of server {dead.node_id} is refused again and "
            f"again: {error!r}"
        )
        self.world.after(1.0, lambda: self._come_with_log(dead, has_booted=True))

    @property
    def told_view(self) -> ClusterView:
        """The newest view that anybody was told."""
        view: ClusterView = self.scheduler.view
        return view

    def _comes_with_log(self, dead: LoggedServer, decision: Decision[Session]) -> None:
        self.come_with(dead.log, decision)
        self._coming.discard(dead)

    def come_with(self, log: SimLog, decision: Decision[Session]) -> None:
        """A server was registered, which goes on with that log."""
        self.next_log = log
        self.join(decision)
        self.next_log = None
        view = self.told_view
        self.see_first(self.servers[decision.reply.node_id], view)
        mine = [r for r in view.ranges if r.primary == decision.reply.node_id]
        counts = self.world.counts
        counts["came back with its ranges"] += bool(mine)
        counts["came back without its ranges"] += len(mine) < len(log.begins())
        self._may_die_again(decision.reply.node_id)

    def see_first(self, server: ReplicatedServer, view: ClusterView) -> None:
        """What a server is told that has come with a log, before it serves at all."""
        server.observe(view)

    def _may_die_again(self, node_id: NodeId) -> None:
        """What it was given back is lost with it, unless the log has that it went on."""
        draw = self.world.draw
        if draw.random() > AGAIN:
            return

        def strike() -> None:
            server = self.servers[node_id]
            is_at_it = not (server.is_dead or self.calamities.is_calm)
            if is_at_it and self.may_lose(server, for_good=True):
                self.world.counts["killed again"] += 1
                self.world.say(f"KILLED AGAIN server {node_id}")
                self.kill(server)

        self.world.after(draw.choice(AGAIN_AFTER_S) * (0.5 + draw.random()), strike)

    def server(self, node_id: NodeId) -> ReplicatedServer:
        """One of the servers."""
        made = super().server(node_id)
        assert isinstance(made, LoggedServer)
        if self.next_log is not None:
            made.came_late = True
            tables, range_count = self.logged_tables(), len(self.scheduler.view.ranges)
            made.known = tables, range_count
            made.recover(fresh_part(tables, range_count))
        return made

    def logged_tables(self) -> Sequence[Table]:
        """Those that logs may have something of, and say what they are."""
        view: ClusterView = self.scheduler.view
        return view.tables

    def withheld_in(self, log: SimLog) -> set[RangeId]:
        """What must be ended in it yet."""
        return log.withheld

    def _is_quiet(self) -> bool:
        """Whoever has died has come back."""
        return (
            not self._coming
            and super()._is_quiet()
            and all(
                server.log.writer is server and not self.withheld_in(server.log)
                for server in self.living
                if isinstance(server, LoggedServer)
            )
        )


@pytest.mark.timeout(300)
def test_whoever_comes_back_with_its_log_has_lost_nothing(sim_seeds: tuple[int, ...]) -> None:
    """Whatever was answered is there once, though nobody else had it."""
    run_seeds(LogSimulation, sim_seeds)
