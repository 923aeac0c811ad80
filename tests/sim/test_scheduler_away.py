"""The scheduler is paused, late, or dies for good, with changes open, while servers die: training
goes on (G8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest

from ps_core.cluster_view import ClusterView
from ps_core.keys import NodeId
from tests.sim.actors import SimWorker
from tests.sim.replicated import LEASE_S
from tests.sim.scheduled import SCHEDULER
from tests.sim.server import SimServer
from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_simulation import run_seeds
from tests.sim.world import Link

pytestmark = pytest.mark.slow

LOOK_S = 0.05
PATIENCE_S = 5.0
"""That it waits for a change to be open before it goes."""
LATE_S = 6.0
"""By how much messages of a scheduler that is late may be late: it takes living primaries for
silent."""


def _ended(view: ClusterView) -> set[NodeId]:
    return {node.node_id for node in view.ended_workers}


class AwaySimulation(FailoverSimulation):
    """One seed in which the scheduler is away: now and then, or from some time on for good."""

    often: ClassVar[frozenset[str]] = frozenset({
        "scheduler paused", "scheduler late", "scheduler died", "away with a change open",
        "away with a cut open", "changes taken, heard of by asking",
        "changes given up, heard of by asking", "gone", "failovers", "checkpoints",
        "struck while it was late", "primary heard late", "backup killed beside",
        "ranges suspended", "primary again",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"killed while it was away"})
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "failovers": 1}

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self._is_away = self._is_dead = False
        self._waiting: list[Callable[[], None]] = []
        self._advised_view = 0  # the last that advises a hand-over
        super().__init__(seed, narrate=narrate)
        draw = self.world.draw
        self._dies = draw.random() < 0.6
        self.change_every_s = draw.choice((0.5, 1.0, 3.0))
        self.world.after(draw.random() * 15.0, lambda: self._go(self._pause, PATIENCE_S))
        dies_s = draw.choice((self.plan.calm_s, self.plan.calm_s, draw.random() * 30.0))
        self.world.after(dies_s + 0.1, lambda: self._go(self._die, 3 * PATIENCE_S))

    # --- its life

    @property
    def is_there(self) -> bool:  # type: ignore[override]
        """Whether it does anything."""
        return not self._is_away

    def _reach(self, action: Callable[[], None]) -> None:
        if not self._is_away:
            action()
        elif not self._is_dead:
            self._waiting.append(action)

    def _go(self, how: Callable[[], bool], patience_s: float) -> None:
        """Now, if something is proposed, or soon."""
        if self._is_dead or self._is_over():
            return
        is_open = any(self.scheduler._state.proposals)
        if self._is_away or (not is_open and patience_s > 0) or not how():
            self.world.after(LOOK_S, lambda: self._go(how, patience_s - LOOK_S))
            return
        for table in self.scheduler.view.tables:
            if table.proposed is not None and not self.is_there:
                what = "cut" if table.proposed.checkpoint else "change"
                self.world.counts[f"away with a {what} open"] += 1

    def _pause(self) -> bool:
        draw = self.world.draw
        if self.calamities.is_calm:
            return True
        for_s = draw.choice((1.0, 4.0, 8.0, 20.0)) * (0.5 + draw.random())
        kind = draw.random()
        if kind >= 0.8 and self._hear_late():
            pass
        elif kind < 0.3:
            self.world.counts["scheduler late"] += 1
            self.world.say(f"SCHEDULER LATE for {for_s:.1f} s")
            late = list(self.servers)
            links = [*((SCHEDULER, n) for n in late), *((n, SCHEDULER) for n in late)]
            for link in links:
                self.world.slow[link] = LATE_S
            self.world.after(for_s, lambda: self._be_in_time(links))
            if draw.random() < 0.6:
                self.world.after(draw.random() * for_s, self._strike_beside)
        else:
            self.world.counts["scheduler paused"] += 1
            self.world.say(f"SCHEDULER PAUSED for {for_s:.1f} s")
            self._is_away = True
            self.world.after(for_s, self._come_back)
        following_s = for_s + draw.random() * 15.0
        self.world.after(following_s, lambda: self._go(self._pause, PATIENCE_S))
        return True

    def _hear_late(self) -> bool:
        """The scheduler does not hear a primary for some more than a lease, in which a backup of it
        dies, soon enough to be made primary in its place first.
        """
        draw, living = self.world.draw, {server.node_id for server in self.living}
        found = [
            (r.primary, backup)
            for r in self.scheduler.view.ranges
            for backup in r.backups
            if r.primary is not None and {r.primary, backup} <= living
        ]
        if not found:
            return False
        primary, backup = draw.choice(found)
        self.world.counts["primary heard late"] += 1
        self.calamities._cut([(primary, SCHEDULER)], LEASE_S + 0.5 + 2.0 * draw.random())
        self.world.after(draw.uniform(0.3, LEASE_S + 0.5), lambda: self._lose(backup))
        return True

    def _lose(self, node_id: NodeId) -> None:
        server = self.servers[node_id]
        is_over = server.is_dead or self.calamities.is_calm or not self.is_there
        if not is_over and self.may_lose(server, for_good=True):
            self.world.counts["backup killed beside"] += 1
            self.calamities._kill(server)

    def _strike_beside(self) -> None:
        """While it takes living servers for silent one is, which it cannot tell."""
        if self.is_there and not self.calamities.is_calm:
            self.world.counts["struck while it was late"] += 1
            self.calamities.strike_server()

    def _be_in_time(self, links: Sequence[Link]) -> None:
        for link in links:
            self.world.slow.pop(link, None)

    def _come_back(self) -> None:
        """It goes on with what has come meanwhile; its clock has run on."""
        if self._is_dead or not self._is_away:
            return
        self.world.say("SCHEDULER BACK")
        self._is_away = False
        waiting, self._waiting = self._waiting, []
        if self.world.draw.random() < 0.5:
            self._publish(self.scheduler.tick(self.world.now_s).transitions)
        for action in waiting:
            self._reach(action)

    def _die(self) -> bool:
        """For good, if nothing needs it: what has died is replaced, and all know who serves what.

        Who dies later is not replaced, so nobody does.
        """
        if not self._dies or self._is_over():
            return True
        view, dead = self.scheduler.view, self.calamities.dead_workers
        is_gone = all(worker.incarnation in self.truth.gone for worker in dead)
        living = {server.node_id for server in self.living} - self.lost()
        if not is_gone or any(server.asks or server.asked for server in self.living):
            return False
        wanted = min(self.plan.replica_count, len(living))
        backup_count = max(wanted, self.plan.min_in_sync) - 1  # else nothing is committed again
        held = [r for r in view.ranges if r.primary is not None]
        if any(len(r.backups) < backup_count or r.catching_up for r in held):
            return False
        if any(not {r.primary, *r.backups} <= living for r in held):
            return False
        if any(self._behind(server, view) for server in self.living):
            return False
        held_up = (s.replication for s in self.living)
        if any(each.waits or each.has_unconfirmed or each.is_handing_over for each in held_up):
            return False  # it waits for who is away
        for worker in self.workers:
            if worker.layout.epoch != self.layout.epoch:
                return False
        self.world.say("SCHEDULER DIED")
        self.world.counts["scheduler died"] += 1
        self._is_away = self._is_dead = True
        return True

    def _behind(self, server: SimServer, view: ClusterView) -> bool:
        """Whether it does not know who serves what, or who is gone, or is to get a view that
        advises a hand-over: it would ask who does not answer.
        """
        known = getattr(server, "_view", None)
        if known is None or known.view_number < self._advised_view:
            return True
        return known.ranges != view.ranges or _ended(known) != _ended(view)

    # --- what is as it was before

    def may_lose(self, server: SimServer, *, for_good: bool) -> bool:
        """Nobody comes in the place of who is lost for good."""
        return not (for_good and self._is_dead) and super().may_lose(server, for_good=for_good)  # type: ignore[arg-type]

    def kill(self, server: SimServer) -> None:
        """For good."""
        self.world.counts["killed while it was away"] += self._is_away
        super().kill(server)  # type: ignore[arg-type]

    def kill_worker(self, worker: SimWorker) -> None:
        """Not when nobody would say that it is gone."""
        if self._is_dead:
            self.calamities.dead_workers.remove(worker)
        else:
            super().kill_worker(worker)

    def _tell(self, server: SimServer, view: ClusterView) -> None:
        if self._is_away:
            return
        if any(r.hand_over_to is not None for r in view.ranges):
            self._advised_view = view.view_number
        late_s = self.world.slow.get((SCHEDULER, server.node_id), 0.0)
        if late_s:
            delay_s = self.world.draw.random() * late_s
            self.world.after(delay_s, lambda: super(AwaySimulation, self)._tell(server, view))
        else:
            super()._tell(server, view)

    def _check_end(self) -> None:
        """Who looks after all is there again: training has ended without."""
        self._is_dead = False
        self._come_back()
        super()._check_end()


@pytest.mark.timeout(300)
def test_training_goes_on_without_the_scheduler(sim_seeds: tuple[int, ...]) -> None:
    """What is proposed when it goes is settled by the servers."""
    run_seeds(AwaySimulation, sim_seeds)
