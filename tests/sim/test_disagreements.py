"""A worker whose schedule of hyperparameters is another than the others' (S4).

Under BSP no update forms of two that disagree, and whoever waits for it is told so; a seal that
says another number than its eager pushes is refused.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from ps_core.consistency import Mode
from ps_core.tables.optimizers import Hyperparameters
from ps_core.tables.table import Table
from ps_worker.window.push_window import StepRefused
from tests.sim.actors import SimWorker
from tests.sim.arithmetic import numbers_of
from tests.sim.test_simulation import Simulation, run_seeds

PATIENCE_S = 60.0
"""After it has disagreed, the others have got as far as they can."""


class DisagreeingSimulation(Simulation):
    """One seed in which one worker has another rate at one clock of one table."""

    may_group = False
    often: ClassVar[frozenset[str]] = frozenset({
        "disagreed under bsp", "refused under bsp", "disagreed with its own eager step",
        "refused beside its eager step",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    may_sum = False
    may_differ = False

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        super().__init__(seed, narrate=narrate)
        draw = self.world.draw
        able = [t for t in self.layout.tables if numbers_of(t, 1) and not self._leaves(t)]
        self.table = draw.choice(able) if able else None
        self.clock, self.worker = draw.randint(1, 4), draw.choice(self.workers)
        self.other: Hyperparameters = (("lr", 3.0),)
        self.since_s: float | None = None
        self.refused: set[int] = set()
        if self.table is not None:
            self.worker.rates[self.table.table_id, self.clock] = self.other
            self.world.after(1.0, self._look)
        for worker in self.workers:
            worker.step_refused = partial(self._step_refused, worker)  # type: ignore[method-assign]

    def _leaves(self, table: Table) -> bool:
        """Whether no disagreement is to be seen: with backup workers the update takes the first
        one's numbers, and what is clipped is never eager.
        """
        is_clipped = table.table_id in self.layout.settings.clipped
        if table.spec.mode is Mode.BSP:
            return bool(table.spec.consistency.backup_workers)
        return is_clipped

    @property
    def _has_sealed(self) -> bool:
        assert self.table is not None
        return self.truth.sealed[self.table.table_id, self.worker.incarnation] >= self.clock

    def _look(self) -> None:
        if self.since_s is None and self._has_sealed:
            self.since_s = self.world.now_s
        self.world.after(1.0, self._look)

    def _step_refused(self, worker: SimWorker, effect: StepRefused) -> None:
        """As a client does, it ends."""
        assert self.table is not None
        assert effect.table_id == self.table.table_id, effect
        assert effect.clock == self.clock, effect
        self.refused.add(worker.rank)
        worker.stop()

    def _is_over(self) -> bool:
        is_late = self.since_s is not None and self.world.now_s > self.since_s + PATIENCE_S
        return is_late or super()._is_over()

    def _check_end(self) -> None:
        table = self.table
        if table is None or not self._has_sealed:
            return
        took_part = self.truth.took_part[table.table_id, self.clock]
        own = self.worker.incarnation
        sent = [
            grad
            for (table_id, _), grads in self.truth.contributions.items()
            for grad in grads
            if table_id == table.table_id and grad.clock == self.clock and grad.incarnation == own
        ]
        counts = self.world.counts
        if table.spec.mode is Mode.BSP and own in took_part and len(took_part) > 1:
            counts["disagreed under bsp"] += 1
            counts["refused under bsp"] += bool(self.refused)
            for server in self.cluster.values():
                for (table_id, range_id), part in server.machine.shards.items():
                    is_formed = part.state.clock >= self.clock
                    assert table_id != table.table_id or not is_formed, (
                        f"S4: range {range_id} formed clock {self.clock} of workers that disagree"
                    )
        elif (
            sent
            and own in took_part  # with an invalid block its seal skips, and says no numbers
            and self.layout.settings.eager.get((table.table_id, own, self.clock))
        ):
            counts["disagreed with its own eager step"] += 1
            assert self.worker.rank in self.refused, (
                f"S4: clock {self.clock} has other numbers than its eager pushes"
            )
            counts["refused beside its eager step"] += 1


def test_no_update_is_of_two_that_disagree(sim_seeds: tuple[int, ...]) -> None:
    """Each is told, and nothing is applied that they did not mean alike."""
    run_seeds(DisagreeingSimulation, sim_seeds)
