"""All workers are new, and load what they begin with, while servers fail over (S16 beside S6, S8).

The first workers train, and are all killed at once. Others come for them, at once or when they are
declared gone, one after the other; most bring what all bring. One beyond the first may come too,
whenever it likes.

Oracles: see `tests.sim.loading`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from ps_core.cluster_view import ClusterView, Node, Role, Session
from ps_core.consistency import parsed
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import TableSpec
from ps_worker.spec.late_joiners import ALL_HERE_WITHIN_S
from scheduler.machine.checkpoints import CHECKPOINTS_FEATURE
from scheduler.machine.cluster import Decision
from scheduler.machine.state import Registration
from tests.sim.actors import SimWorker, Waits
from tests.sim.calamities import Plan
from tests.sim.loading import Brings, Load, Said, Terms, loading
from tests.sim.scheduled import LOOK_S, VIEW_DELAY_S
from tests.sim.test_replacements import ReplacementSimulation
from tests.sim.test_simulation import WORKERS, run_seeds
from tests.sim.training import begin_anew

pytestmark = pytest.mark.slow

FEW_SEEDS = 4
_UNLIKE = 0.3
"""Of the seeds: not all bring the same."""
_BEYOND = 0.3
"""Of the seeds: another worker comes, beyond the first."""
_NEVER_STEP = 0.3
"""Of the seeds: the first workers die before anybody's first step."""
_TRAIN_S = (0.2, 3.0, 10.0)
"""For how long the first workers do, at most."""
_WITHIN_S = ALL_HERE_WITHIN_S - 2 * VIEW_DELAY_S
"""Who joins within this of each other knows of all others in time."""
_COME_S = (0.2, 3.0, 12.0)
"""In which the others come, at most."""
_FOLLOW_S = (0.0, 0.0, 10.0)
"""After one is declared gone another comes within this: some train by then that bring nothing."""


class LoadSimulation(ReplacementSimulation):
    """One seed in which all workers are started again, and load."""

    max_workers = WORKERS + 1
    may_have_rows = False
    often: ClassVar[frozenset[str]] = frozenset({
        "all workers killed", "replacements", "joined", "gone", "started again at once",
        "loads in place", "loads at one clock", "loads refused by servers",
        "clocks that were disputed",
        "workers beyond the first", "failovers", "fault: killed", "equal replicas",
        "checkpoints", "loads at the start",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({
        "loads that waited in vain", "loads that may not be", "clocks passed with an edit",
    })  # fmt: skip
    medians: ClassVar[dict[str, int]] = {"messages": 1_500, "replacements": 3, "joined": 3}

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self._draw = draw = random.Random(f"loads of {seed}")
        self.loads: dict[SimWorker, Load] = {}
        self._views: dict[SimWorker, ClusterView] = {}
        self._steps_before: dict[SimWorker, int] = {}
        self._is_struck = False
        self._is_to_come = draw.random() < _BEYOND
        self._never_step = draw.random() < _NEVER_STEP
        self._reads = draw.random() < 0.2
        super().__init__(seed, narrate=narrate)
        self.is_steady = True
        for worker in self.workers:
            worker.bad_share = 0.02
        self._terms = Terms(
            Said(self.truth),
            {t.table_id: tuple(b for b in range(t.block_count) if draw.random() < 0.7)
             for t in self.layout.tables},
            draw.random() < 0.4,
            lambda worker: self._views[worker],
            self.loads,
            draw,
        )  # fmt: skip
        self._odd_rank = draw.randrange(WORKERS) if draw.random() < _UNLIKE else -1
        self._odd = draw.choice((Brings.NOTHING, Brings.NOTHING, Brings.ANOTHER))
        self._come_s = draw.choice(_COME_S)
        self._follow_s = draw.choice(_FOLLOW_S)
        self._strike_s = draw.choice(_TRAIN_S) * draw.random()
        self.world.after(self._strike_s, self._kill_all)
        if self._is_to_come:
            self.world.after(self._strike_s + 30.0 * draw.random(), self._come_beyond)

    @cached_property
    def plan(self) -> Plan:
        """What happens: no worker dies but all at once, and servers do meanwhile."""
        plan = super().plan
        kinds = tuple(kind for kind in plan.kinds if kind != "worker killed")
        return replace(plan, kinds=kinds, worker_deaths=0, calm_s=10.0 + 40.0 * self._draw.random())

    def specs(self, seed: int) -> list[TableSpec]:
        """Tables that take edits."""
        found = []
        for spec in super().specs(seed):
            optimizer = spec.optimizer
            if optimizer.kind not in (OptimizerKind.SGD, OptimizerKind.ADAM):
                optimizer = OptimizerSpec(OptimizerKind.SGD, (("momentum", 0.5),))
            changed = replace(spec, optimizer=optimizer, consistency=parsed("bsp"))
            found.append(changed.validated())
        return found

    def step_count(self) -> int:
        """More than they get to."""
        return 200

    def program(self, worker: SimWorker) -> Waits:
        """What one of the first workers does: in some seeds nobody gets beyond the first step."""
        if self._never_step:
            yield from begin_anew(worker, self.truth, {}, reads=self._reads)
            yield lambda: False
        yield from super().program(worker)

    def _strikes_now(self, of: Sequence[SimWorker]) -> bool:
        """No worker is slow: who is killed stays so."""
        del of
        return False

    # --- all are started again

    def _kill_all(self) -> None:
        """When there are values that outlive everybody: nobody else could give them."""
        given = self.workers[0].ended
        if any((table.table_id, 0) not in given for table in self.layout.tables):
            self.world.after(LOOK_S, self._kill_all)
            return
        self._is_struck = True
        self.world.say("ALL WORKERS KILLED")
        self.world.counts["all workers killed"] += 1
        whoever = () if self._never_step else (None,)
        at_once = self._draw.choice((*whoever, *self.workers[:WORKERS]))
        for worker in self.workers[:WORKERS]:
            if worker.finished:
                continue
            self.calamities.dead_workers.append(worker)
            worker.stop()
            if worker is at_once or self._draw.random() < 0.6:
                back_s = (0.1 if worker is at_once else self._come_s) * self._draw.random()
                self.world.after(back_s, lambda w=worker: self._return_as_itself(w))  # type: ignore[misc]

    def _trains(self, run: str) -> bool:
        del run
        return self._is_struck and not self._is_ending

    def _follow(self, node: Node) -> None:
        """Another worker comes for one that is gone, now or later."""
        self.world.after(self._follow_s * self._draw.random(), lambda: self._replace(node.rank))

    def _come_beyond(self) -> None:
        if not self._is_struck:
            self.world.after(LOOK_S, self._come_beyond)
            return
        self.world.counts["workers beyond the first"] += 1
        asking = Registration(
            b"beyond".ljust(16),
            Role.WORKER,
            requested_rank=WORKERS,
            features=(CHECKPOINTS_FEATURE,),
        )
        self._admitted(asking, self._takes_over)

    def _takes_over(self, decision: Decision[Session]) -> None:
        self._is_to_come = self._is_to_come and decision.reply.rank != WORKERS
        super()._takes_over(decision)

    def _start_late(self, worker: SimWorker, view_number: int) -> None:
        if any(server.view_number < view_number for server in self.living):
            self.world.after(LOOK_S, lambda: self._start_late(worker, view_number))
            return
        self._views[worker] = self.scheduler.view
        brings = self._odd if worker.rank == self._odd_rank else Brings.THE_SAME
        self.loads[worker] = load = Load(brings)
        worker.start(loading(worker, load, self._terms))

    def _tell_worker(self, worker: SimWorker) -> None:
        super()._tell_worker(worker)
        view = self.scheduler.view

        def arrive() -> None:
            before = self._views.get(worker)
            if before is not None and before.view_number < view.view_number:
                self._views[worker] = view

        self.world.after(self.world.draw.random() * VIEW_DELAY_S, arrive)

    # --- the end

    def _is_over(self) -> bool:
        newest = self.scheduler._state.workers_by_rank("")
        is_all = self._is_struck and not self._is_to_come and len(self.loads) >= WORKERS
        return is_all and len(newest) >= WORKERS and super()._is_over()

    def _check_end(self) -> None:
        super()._check_end()
        loads = list(self.loads.values())
        assert all(worker.finished for worker in self.loads), "LIVE"
        brought = {load.brings for load in loads}
        joined_s = [load.joined_s for load in loads]
        if brought == {Brings.THE_SAME} and len(loads) == WORKERS:
            is_in_time = max(joined_s) - min(joined_s) < _WITHIN_S
            first = loads[0].clocks
            is_one = bool(first) and all(load.clocks == first for load in loads)
            assert is_one or not is_in_time, f"LOAD: {loads}"
            self.world.counts["loads at one clock"] += is_one


@pytest.mark.timeout(300)
def test_who_was_started_again_loads_with_all_others(sim_seeds: tuple[int, ...]) -> None:
    """At one clock, or nobody does."""
    run_seeds(LoadSimulation, sim_seeds[:FEW_SEEDS])
