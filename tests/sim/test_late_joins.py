"""Tables that are made while workers come and are replaced, servers die and schedulers do
(S6 beside S8 and S18).

Who comes joins the tables that there are, and has those that are made later from their beginning.
So may one that was there for none of them: a table may be made while its join of another is under
way, and rank 0 may die before it has given a table its values, which another in its place gives.

Oracles: those of late tables, and of what they are beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from tests.sim.actors import SimWorker, Waits
from tests.sim.scheduled import LOOK_S
from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_growth import GrowthSimulation
from tests.sim.test_late_tables import LATE_STEPS, LateTableSimulation
from tests.sim.test_scheduler_restarts import RestartSimulation
from tests.sim.test_simulation import WORKERS, _spec, run_seeds
from tests.sim.training import training

pytestmark = pytest.mark.slow

FEW_SEEDS = 4


class LateJoinSimulation(LateTableSimulation, GrowthSimulation):
    """One seed in which workers come, and are replaced."""

    often: ClassVar[frozenset[str]] = frozenset({
        "late tables", "ranges placed late", "late tables that were trained", "joined", "gone",
        "replacements", "workers beyond the first", "failovers after a join",
        "late tables joined", "late tables had from the beginning",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"values of another in rank 0"})
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "late tables": 2}

    def _start_late(self, worker: SimWorker, view_number: int) -> None:
        if any(server.view_number < view_number for server in self.living):
            self.world.after(LOOK_S, lambda: self._start_late(worker, view_number))
            return
        incarnation = worker.incarnation

        def joined_after() -> dict[int, int]:
            own = {table.table_id for table in worker.layout.tables}
            return {t: c for t, c in self._joined_after(incarnation).items() if t in own}

        worker.joined_after = joined_after  # type: ignore[assignment]
        worker.start(self._late_program(worker, list(self.layout.tables)))

    def _late_program(self, worker: SimWorker, known: Sequence[Table]) -> Waits:
        """What one that comes later does: as the others, with the tables that it finds."""
        worker.layout.tables[:] = [table for table in known if table not in self.late]
        yield from training(worker, self.truth, self.world.draw.randint(2, 8))
        for index in range(self._late_count):
            yield lambda index=index: len(self.late) > index  # type: ignore[misc]
            table, counts = self.late[index], self.world.counts
            ranges = table.blocks_by_range(self.layout.range_count)
            yield lambda ranges=ranges: set(ranges) <= worker.layout.owner.keys()  # type: ignore[misc]
            worker.layout.tables[:] = [table]
            worker.clocks[table.table_id] = 0
            yield lambda t=table: t.table_id in worker.joined_after()  # type: ignore[misc]
            is_begun = table.spec.rows is not None or self._is_given(table)
            worker.is_late_joiner = table in known and is_begun
            counts["late tables joined"] += worker.is_late_joiner
            counts["late tables had from the beginning"] += table not in known
            counts["values of another in rank 0"] += worker.rank == 0 and not is_begun
            yield from training(worker, self.truth, LATE_STEPS)

    def _is_given(self, table: Table) -> bool:
        """Whether somebody has sealed its initial values."""
        contributions = self.truth.contributions
        grads = [g for b in range(table.block_count) for g in contributions[table.table_id, b]]
        return any(grad.clock == 0 for grad in grads)

    def _has_initial_values(self, run: str) -> bool:
        """Nobody has to give what another has begun to give."""
        tables = self.layout.tables
        self.layout.tables = [t for t in tables if t not in self.late or self._is_given(t)]
        try:
            return super()._has_initial_values(run)
        finally:
            self.layout.tables = tables


class LateJoinRestartSimulation(LateJoinSimulation, RestartSimulation):  # type: ignore[misc]
    """One seed in which the scheduler dies, too: a table is there when it is durable."""

    often: ClassVar[frozenset[str]] = frozenset({
        "late tables", "late tables that were trained", "joined", "gone", "replacements",
        "scheduler started again", "late tables joined", "late tables had from the beginning",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset()
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "late tables": 2}

    def _make(self, spec: TableSpec | None = None) -> None:
        """Until it is told: a scheduler that dies before has not made it."""
        draw, now_s = self.world.draw, self.world.now_s
        if spec is None:
            drawn = _spec(draw, 1, self._numbers, may_have_rows=True)
            spec = replace(drawn, name=f"late-{len(self.late)}").validated()
        made = [table for table in self.told_view.tables if table.spec.name == spec.name]
        if made:
            self.world.counts["late tables"] += 1
            self._open(made[0])
            if len(self.late) < self._late_count and not self._is_over():
                self.world.after(draw.expovariate(1 / self._every_s), self._make)
            return
        session = draw.choice(self.sessions[-WORKERS:])
        if self.is_there and session.incarnation in self.members:
            self._publish(self.scheduler.create_table(session, spec, now_s).transitions)
        if not self._is_over():
            self.world.after(LOOK_S, lambda: self._make(spec))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [LateJoinSimulation, LateJoinRestartSimulation])
def test_who_comes_trains_what_was_made_before_and_after(
    sim_seeds: tuple[int, ...], kind: type[FailoverSimulation]
) -> None:
    run_seeds(kind, sim_seeds[:FEW_SEEDS])
