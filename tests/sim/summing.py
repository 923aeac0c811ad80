"""Tables of sums (AGGREGATE), and workers in groups: so none of them dies."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from ps_core.consistency import parsed
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import TableSpec
from scheduler.machine.checkpoint_state import CheckpointMade
from scheduler.machine.state import Transition
from tests.sim.calamities import Plan
from tests.sim.test_failover import FailoverSimulation

_SUMS = 0.7
"""Of the seeds without groups: a table is of sums."""


class Summing(FailoverSimulation):
    """A simulation in which tables are of sums, or workers in groups."""

    may_sum: ClassVar[bool] = True
    may_group: ClassVar[bool] = True

    @cached_property
    def plan(self) -> Plan:
        """What happens."""
        return replace(super().plan, worker_deaths=0)

    def specs(self, seed: int) -> list[TableSpec]:
        """The tables: where nobody is in a group the first one is of sums, more often than not."""
        first, *others = super().specs(seed)
        wants = random.Random(f"sums of {seed}").random() < _SUMS
        if wants and not self.groups.leaders and first.rows is None:
            sums = OptimizerSpec(OptimizerKind.AGGREGATE)
            first = replace(first, optimizer=sums, consistency=parsed("bsp")).validated()
        is_of_sums = first.optimizer.kind is OptimizerKind.AGGREGATE
        self.world.counts["with a table of sums"] += is_of_sums
        return [first, *others]

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        if isinstance(transition, CheckpointMade):
            counts = self.world.counts
            counts["checkpoints with a table of sums"] += counts["with a table of sums"]
