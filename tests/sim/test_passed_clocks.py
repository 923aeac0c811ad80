"""A clock of BSP that nobody lives to take a step of, among asynchronous ones: it is passed (S6).

All workers take the last step before it, but one of them is cut off from a server: only ranges of
the other servers give values for the BSP step. All die. Who comes first joins beyond that step, and
the ranges of that server, which are a clock behind, pass it. Servers are killed, paused and cut off
all the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import pytest

from ps_core.change import TableChange
from ps_core.consistency import Consistency, parsed
from ps_core.errors import Fenced, InvalidConfig
from ps_core.keys import NodeId
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_server.ranges.range_state import RangeState
from scheduler.machine.changes import ChangeRequest
from tests.sim.actors import SimWorker, Waits
from tests.sim.calamities import Plan
from tests.sim.test_replacements import ReplacementSimulation
from tests.sim.test_simulation import WORKERS, run_seeds

pytestmark = pytest.mark.slow

FEW_SEEDS = 4
_STEPS = 12
_LOOK_S = 0.01
"""How often it is looked whether they are there: a message takes as long."""
_PATIENCE_S = 60.0


class PassedClockSimulation(ReplacementSimulation):
    """One seed in which all workers die before a clock of BSP."""

    has_checkpoints = False  # at one, a worker waits for the others
    often: ClassVar[frozenset[str]] = frozenset({
        "all died before a clock of BSP", "gone", "replacements", "joined", "failovers",
        "started again at once", "newcomers' steps under asp",
    })  # fmt: skip
    seldom: ClassVar[frozenset[str]] = frozenset({"newcomers' steps under bsp"})
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "failovers": 1, "changed": 2}

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        super().__init__(seed, narrate=narrate)
        self.is_steady = True  # but for what this has in store
        self._script = random.Random(f"clocks of BSP in {seed}")
        script = self._die_before_a_clock_of_bsp()
        self.world.after(5.0 * self._script.random(), lambda: self._go_on(script))

    @cached_property
    def plan(self) -> Plan:
        """What happens: no worker dies but as is written here."""
        return replace(super().plan, worker_deaths=0)

    def specs(self, seed: int) -> list[TableSpec]:
        """The tables: asynchronous ones."""
        asp = parsed("asp")
        return [replace(spec, consistency=asp).validated() for spec in super().specs(seed)]

    def step_count(self) -> int:
        """Nobody leaves early."""
        return _STEPS

    def _go_on(self, script: Waits, holds: Callable[[], bool] = lambda: True) -> None:
        """Run it each time that what it waits for holds."""
        if self.calamities.is_calm:
            return
        if holds():
            following = next(script, None)
            if following is None:
                return
            holds = following
        self.world.after(_LOOK_S, lambda: self._go_on(script, holds))

    def _die_before_a_clock_of_bsp(self) -> Waits:
        table = max(self.layout.tables, key=lambda table: table.block_count)
        late, ahead, *_ = workers = self._script.sample(self.workers, WORKERS)
        begins = self._script.choice((2, 3, 4))
        yield lambda: self._is_set(table, parsed("bsp"), begins)
        last = self._clock_of_change(table)  # before those of BSP
        until = last + self._script.choice((1, 1, 2))
        yield lambda: self._is_set(table, parsed("asp"), until)
        yield lambda: len(set(self._seals_of(late, table, last).values())) == 2
        lacking = [node for node, has in self._seals_of(late, table, last).items() if not has]
        self.world.cut[late.end, self._script.choice(lacking)] += 1
        yield lambda: self._is_given(table, last + 1)
        self.world.counts["all died before a clock of BSP"] += 1
        self._die(ahead)
        self.world.after(self._script.random(), lambda: self._return_as_itself(ahead))
        yield lambda: self._is_followed(ahead, table)
        for worker in workers:
            self._die(worker)

    def _is_set(self, table: Table, consistency: Consistency, after_clock: int) -> bool:
        """Ask for it, and say whether it is so."""
        now_s, name = self.world.now_s, table.spec.name
        wanted = ChangeRequest(name, consistency, after_clock, now_s + _PATIENCE_S)
        try:
            decision = self.scheduler.set_consistency(self._askers(table)[0], wanted, now_s)
        except (Fenced, InvalidConfig):
            return False
        self._publish(decision.transitions)
        return isinstance(decision.reply, TableChange)

    def _clock_of_change(self, table: Table) -> int:
        change = self.scheduler.view.tables_by_id[table.table_id].change
        assert change is not None
        return change.after_clock

    def _primary_parts(self, table: Table) -> Iterator[tuple[NodeId, RangeState]]:
        """The table's parts, and where they are."""
        for server in self.living:
            for range_id in server.replication.primaries:
                part = server.machine.shards.get((table.table_id, range_id))
                if part is not None:
                    yield server.node_id, part.state

    def _seals_of(self, worker: SimWorker, table: Table, clock: int) -> dict[NodeId, bool]:
        """Which servers have its seal of that clock for all their ranges."""
        found: dict[NodeId, bool] = {}
        for node_id, state in self._primary_parts(table):
            known = state.workers.get(worker.incarnation)
            has = known is not None and known.sealed_clock >= clock
            found[node_id] = has and found.get(node_id, True)
        return found

    def _is_given(self, table: Table, clock: int) -> bool:
        """Whether a range has given values for a step of that clock."""
        return any(state.read_clock >= clock for _, state in self._primary_parts(table))

    def _is_followed(self, worker: SimWorker, table: Table) -> bool:
        """Whether another one of its rank has joined the table."""
        joins = self.scheduler.view.tables_by_id[table.table_id].joins
        return any(j.rank == worker.rank and j.incarnation > worker.incarnation for j in joins)

    def _die(self, worker: SimWorker) -> None:
        if not worker.finished and not worker.is_down:
            self.calamities.dead_workers.append(worker)
            worker.stop()


@pytest.mark.timeout(300)
def test_a_clock_of_bsp_that_nobody_is_in_is_passed(sim_seeds: tuple[int, ...]) -> None:
    """S6: who joins beyond it trains on, in every range."""
    run_seeds(PassedClockSimulation, sim_seeds[:FEW_SEEDS])
