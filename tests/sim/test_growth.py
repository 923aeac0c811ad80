"""Workers beyond the first come while servers fail over, schedulers die and others are replaced
(S6 beside S8, S9 and S18).

They may die or end in the middle of their work, as all may here, and say so: then they are gone at
once, while what they sent last is on its way. Nobody follows one beyond the first; its rank is
given anew.
"""

from __future__ import annotations

import random
from typing import ClassVar

import pytest

from ps_core.cluster_view import Role, Session
from ps_core.errors import Fenced
from ps_core.keys import Incarnation
from scheduler.machine.checkpoints import CHECKPOINTS_FEATURE
from scheduler.machine.cluster import Decision
from scheduler.machine.state import Registration
from tests.sim.actors import SimWorker
from tests.sim.handing_over import HandingOver
from tests.sim.scheduled import LOOK_S
from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_replacements import ReplacementSimulation
from tests.sim.test_scheduler_restarts import RestartSimulation
from tests.sim.test_simulation import WORKERS, run_seeds

pytestmark = pytest.mark.slow

FEW_SEEDS = 4
_BEYOND = 2
"""At a time, at most."""
_COMINGS = (1, 2, 3, 5)
_COME_S = (0.1, 2.0, 10.0, 40.0)
"""In which they come, at most."""
_SAYS_SO = 0.5
"""Of the workers that die: they end in the middle of their work, and say so ..."""
_WITHIN_S = 0.5
"""... as soon as this; else the scheduler finds it by itself."""


class GrowthSimulation(ReplacementSimulation):
    """One seed in which up to five more workers come, two at a time."""

    max_workers = WORKERS + _BEYOND
    often: ClassVar[frozenset[str]] = frozenset({
        "workers beyond the first", "gone beyond the first", "joined", "failovers after a join",
        "gone", "replacements", "ended unfinished", "left", "equal replicas", "checkpoints",
        *(f"newcomers' steps under {mode}" for mode in ("bsp", "ssp", "asp")),
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"ranks given anew", "steps that are passed"})
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "workers beyond the first": 1}

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self._growth = draw = random.Random(f"growth of {seed}")
        self._came_count = 0
        super().__init__(seed, narrate=narrate)
        for _ in range(draw.choice(_COMINGS)):
            self.world.after(draw.random() * draw.choice(_COME_S), self._grow)

    def _grow(self) -> None:
        """Another worker comes, if there is a place for it."""
        if self._is_ending or not self._trains(""):
            return
        if not self.is_there:
            self.world.after(LOOK_S, self._grow)
            return
        holders = self.scheduler._state.workers_by_rank("")
        taken = {rank for rank, node in holders.items() if node.state.is_member}
        free = [r for r in range(WORKERS, WORKERS + _BEYOND) if r not in taken]
        if free:
            self._came_count += 1
            asking = Registration(
                f"beyond {self._came_count}".encode().ljust(16),
                Role.WORKER,
                requested_rank=self._growth.choice(free),
                features=(CHECKPOINTS_FEATURE,),
            )
            self._admitted(asking, self._takes_over)

    def _takes_over(self, decision: Decision[Session]) -> None:
        rank, counts = decision.reply.rank, self.world.counts
        if rank >= WORKERS:
            counts["workers beyond the first"] += 1
            counts["ranks given anew"] += any(worker.rank == rank for worker in self.workers)
        super()._takes_over(decision)

    def _is_replaced(self, run: str, rank: int) -> bool:
        """Nobody follows one beyond the first; another may come."""
        if rank < WORKERS:
            return super()._is_replaced(run, rank)
        self.world.counts["gone beyond the first"] += 1
        self._grow()
        return True

    def _return_as_itself(self, worker: SimWorker) -> None:
        if worker.rank < WORKERS:  # those beyond have no identity
            super()._return_as_itself(worker)

    def kill_worker(self, worker: SimWorker) -> None:
        """For good, or for a while; it may have the time to say so."""
        super().kill_worker(worker)
        if worker not in self.paused and self._growth.random() < _SAYS_SO:
            self.world.after(_WITHIN_S * self._growth.random(), lambda: self._say_so(worker))

    def _say_so(self, worker: SimWorker) -> None:
        """As `DeregisterNode.unfinished`: it sends nothing more, and is gone at once."""
        if not worker.is_down:  # it dies a moment later
            worker.stop()
        session = self.first[Incarnation(worker.incarnation)]

        def arrive() -> None:
            try:
                ended = self.scheduler.deregister(
                    session, "SIGTERM", self.world.now_s, unfinished=True
                )
            except Fenced:  # another has come with its identity
                return
            self.world.counts["ended unfinished"] += 1
            self._publish(ended.transitions)

        self.world.send(f"worker {worker.rank} ends unfinished", lambda: self._reach(arrive))


class GrowthRestartSimulation(GrowthSimulation, RestartSimulation):
    """One seed in which the scheduler dies, too, and another goes on from its journal."""

    often: ClassVar[frozenset[str]] = frozenset({
        "workers beyond the first", "joined", "failovers after a join", "gone", "ended unfinished",
        "scheduler started again", "calls made again", "equal replicas",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "scheduler started again": 1}


class GrowthHandOverSimulation(HandingOver, GrowthSimulation):
    """One seed in which ranges are handed over, too."""

    often: ClassVar[frozenset[str]] = frozenset({
        "workers beyond the first", "joined", "hand-overs", "ranges handed over",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    medians: ClassVar[dict[str, int]] = {"messages": 2_000}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", [GrowthSimulation, GrowthRestartSimulation, GrowthHandOverSimulation]
)
def test_more_workers_train_on_whatever_server_is_next(
    sim_seeds: tuple[int, ...], kind: type[FailoverSimulation]
) -> None:
    """S6 and S8: each joins every table where the others are, whoever dies."""
    run_seeds(kind, sim_seeds[:FEW_SEEDS])
