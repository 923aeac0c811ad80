"""More workers than a simulated cluster was started for come while it trains, and go again.

Each joins every table by a scheduled change at a random moment, under every setting, while an
operator changes the settings and one worker may be killed or paused. Who has finished leaves the
cluster; its rank, beyond the first ones, may be given anew.
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from ps_core.cluster_view import Session
from scheduler.machine.state import ChangeCommitted, Transition
from tests.sim.actors import SimWorker
from tests.sim.scheduled import LOOK_S
from tests.sim.test_crashes import CrashSimulation
from tests.sim.test_simulation import SERVERS, WORKERS, run_seeds

pytestmark = pytest.mark.slow

MAX_WORKERS = WORKERS + 2


class NewcomerSimulation(CrashSimulation):
    """One seed in which up to four more workers come."""

    max_workers = MAX_WORKERS
    often: ClassVar[frozenset[str]] = frozenset({
        *(f"newcomers' steps under {mode}" for mode in ("bsp", "ssp", "asp")),
        "newcomers", "joined", "left", "killed", "gone", "newcomers' clipped steps under bsp",
        "checkpoints",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({
        "successors", "ranks given anew", "came before all values", "joined beyond a gap", "paused",
    })  # fmt: skip

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self.has_left: set[int] = set()
        super().__init__(seed, narrate=narrate)
        draw = self.world.draw
        self.is_struck = draw.random() < 0.5
        for number in range(draw.randint(1, 4)):
            at_s = draw.random() * draw.choice((0.1, 2.0, 10.0, 30.0))
            self.world.after(at_s, lambda number=number: self._grow(number))  # type: ignore[misc]
        self._say_goodbye()

    def _strike(self) -> None:
        if self.is_struck:
            super()._strike()

    def _grow(self, number: int) -> None:
        """Another worker comes, if there is a place for it."""
        holders = self.scheduler._state.workers_by_rank("")
        gone = [r for r, node in holders.items() if r < WORKERS and node.state.value == "gone"]
        taken = {r for r, node in holders.items() if node.state.is_member}
        free = [r for r in range(WORKERS, MAX_WORKERS) if r not in taken]
        if gone and self._may_come(min(gone)):
            worker = self._come(f"newcomer {number}")
        elif free and not gone:
            asked = self.world.draw.choice((None, free[-1]))
            worker = self._come(f"newcomer {number}", asked)
            self.world.counts["ranks given anew"] += worker.rank in holders
        else:
            return
        if self.world.draw.random() < 0.3 and not self.victim.is_down and not self.victim.finished:
            self.victim = worker

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        if isinstance(transition, ChangeCommitted) and transition.change.join is not None:
            join, table = transition.change.join, transition.table
            gaps = join.rank > WORKERS and join.rank - 1 not in {j.rank for j in table.joins}
            self.world.counts["joined beyond a gap"] += gaps

    def _is_heard(self, worker: SimWorker) -> bool:
        return worker.incarnation not in self.has_left and super()._is_heard(worker)

    def _say_goodbye(self) -> None:
        """Who has finished leaves the cluster, which its seals have told the servers already."""
        self.world.after(LOOK_S, self._say_goodbye)
        first = {session.incarnation: session for session in self.sessions[SERVERS:]}
        for worker in self.workers:
            is_new = worker.finished and worker.incarnation not in self.has_left
            if is_new and not worker.is_down and worker.fence is None:
                self.has_left.add(worker.incarnation)
                self._leave(worker, (first | self.late)[worker.incarnation])

    def _leave(self, worker: SimWorker, session: Session) -> None:
        worker.stop()  # nothing that is still under way to it matters
        self.world.counts["left"] += 1
        if session.rank >= WORKERS and self.world.draw.random() < 0.3:
            number = session.node_id  # of the place that is free now
            self.world.after(self.world.draw.random() * 2.0, lambda: self._grow(number))
        decision = self.scheduler.deregister(session, "done", self.world.now_s)
        self._publish(decision.transitions)


def test_they_join_every_table_where_the_others_are(sim_seeds: tuple[int, ...]) -> None:
    """S6: what each of them sealed is there, in its place, whoever dies or leaves meanwhile."""
    run_seeds(NewcomerSimulation, sim_seeds)
