"""Workers that push and pull as one, in some seeds (S21): as `WorkerGroup`, under BSP.

The gradient that a leader pushes is its group's mean. Every member seals, with the number of
members as scale. Some followers read for themselves, as after a pull that has failed.

Oracles:
    PART, SUM   (`arithmetic`) The members' sum is divided by the number of all workers.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace

from ps_core.consistency import parsed
from ps_core.keys import TableId
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec

_SHARE = 0.15
"""Of the seeds that may have groups."""
_LEADERS = (0, 0, 0), (0, 0, 2), (0, 1, 0), (0, 1, 1)
_SKIPS = 0.1
_KINDS = OptimizerKind.SGD, OptimizerKind.ADAM


@dataclass(frozen=True)
class Groups:
    """The groups of one seed.

    Attributes:
        seed: which.
        leaders: of each rank; none: no worker is in a group.
        step_count: how many steps each worker makes.
        pulled: the newest clock that a leader (by table and rank) has pulled.
    """

    seed: int = 0
    leaders: tuple[int, ...] = ()
    step_count: int = 0
    pulled: dict[tuple[TableId, int], int] = field(default_factory=lambda: defaultdict(int))

    @classmethod
    def drawn(cls, seed: int) -> Groups:
        """Those of a seed that may have some."""
        draw = random.Random(f"groups of {seed}")
        if draw.random() >= _SHARE:
            return cls()
        return cls(seed, draw.choice(_LEADERS), draw.randint(6, 12))

    def size(self, rank: int) -> int:
        """How many the members of that worker's group are."""
        return self.leaders.count(self.leaders[rank]) if self.leaders else 1

    def is_followed(self, rank: int) -> bool:
        """Whether another worker pushes and pulls for that one."""
        return bool(self.leaders) and self.leaders[rank] != rank

    def skip(self, table: Table, clock: int, rank: int) -> bool:
        """Whether that worker's group skips a step."""
        key = f"skips of {self.seed}, {table.table_id}, {clock}, {self.leaders[rank]}"
        return random.Random(key).random() < _SKIPS


def in_groups(spec: TableSpec) -> TableSpec:
    """A table that groups may train."""
    kind = spec.optimizer.kind
    optimizer = spec.optimizer if kind in _KINDS else OptimizerSpec(OptimizerKind.SGD)
    return replace(spec, consistency=parsed("bsp"), optimizer=optimizer)
