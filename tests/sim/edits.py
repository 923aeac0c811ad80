"""What scripts change of their parameters between two steps, in a third of the seeds (S16).

At some clocks of some tables every worker's step is an edit, in whatever setting: where it has no
step of all workers, the edit is refused. At others one worker changes something else, or nothing.

An edit in a block is an item of its list like a gradient: of nobody, alike at all workers. Most are
of optimizer state: what comes of it shows with the next gradient.

Oracle:
    EDIT   An edit is in a block where all workers meant it, under BSP without backup workers, and
           nowhere else. It is never beside a gradient of its clock.
    SUM    (`arithmetic`) What is laid beside changes nothing, until it is put in place.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ps_core.tables.optimizers import STEP_ARRAY, VALUES_ARRAY, OptimizerKind
from ps_core.tables.table import Table
from tests.sim.grads import EDIT, FIRST, LAID_VALUES, NAMES, SECOND, STEP, VALUES, Grad

_SEEDS = 3
_SHARE = 0.15
_LOADING_SEEDS = 6
_LOADING_SHARE = 0.6
"""In every second of these seeds state is loaded all the time: laid beside, and put in place."""
_DISPUTED = 0.4
_FIRST_LEAVERS = 5
"""Up to this clock nobody leaves who was there from the start."""
_ARRAYS = {
    OptimizerKind.SGD: {
        VALUES: "", STEP: STEP_ARRAY, FIRST: "momentum_buffer", LAID_VALUES: VALUES_ARRAY,
    },
    OptimizerKind.ADAM: {
        VALUES: "", STEP: STEP_ARRAY, FIRST: "exp_avg", SECOND: "exp_avg_sq",
        LAID_VALUES: VALUES_ARRAY,
    },
}  # fmt: skip
"""What is changed."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A clock of a table at which parameters are changed.

    Attributes:
        table: which table.
        clock: which.
        blocks: those with tensors that are.
        other: the rank that does not mean what the others do, if one does not.
        changes: whether that one changes something at all.
        array: what is changed: `grads.VALUES`, or optimizer state.
        names_alike: whether that one's seal names the edit as the others' do, and another array.
        number: of its name: what is laid beside under one is not put in place by another.
    """

    table: Table
    clock: int
    blocks: tuple[int, ...]
    other: int | None = None
    changes: bool = False
    array: int = VALUES
    names_alike: bool = False
    number: int = 0

    def is_of(self, rank: int) -> bool:
        """Whether the step of that rank is an edit."""
        return rank != self.other or self.changes

    def name(self, rank: int) -> bytes:
        """What its seal says."""
        is_another = rank == self.other and not self.names_alike
        return NAMES[1] if is_another else NAMES[self.number]

    def array_name(self, rank: int) -> str:
        """Which array its seal says; empty for values."""
        names = _ARRAYS[self.table.spec.optimizer.kind]
        if rank == self.other and self.names_alike:
            return names[VALUES if self.array else STEP]
        return names[self.array]

    def grad(self, rank: int, block: int, incarnation: int) -> Grad:
        """What a worker sends."""
        revision = EDIT + (rank == self.other) + 2 * self.array + 10 * self.number
        return Grad(self.clock, rank, block, revision, self.table.table_id, incarnation)

    def item(self, block: int, rank: int = 0) -> Grad:
        """What is in the block then; by what that rank means."""
        return item_of(self.grad(rank, block, 0))


def arrays_of(table: Table) -> tuple[int, ...]:
    """What an edit of the table may be of."""
    return tuple(_ARRAYS[table.spec.optimizer.kind])


def item_of(grad: Grad) -> Grad:
    """An edit as it is in a block, whoever's values were taken."""
    return Grad(grad.clock, 0, grad.block, grad.revision, grad.pulled, 0)


class Edits:
    """Those of one seed.

    Args:
        seed: which.
        worker_count: how many there are from the start.
        may_differ: whether workers may mean different things: then none of them dies, and no
            setting changes.
    """

    def __init__(self, seed: int, worker_count: int, *, may_differ: bool) -> None:
        self._seed = seed
        self._worker_count = worker_count
        self._may_differ = may_differ
        self._found: dict[tuple[int, int], Edit | None] = {}

    def at(self, table: Table, clock: int) -> Edit | None:
        """The edit of that clock, if there is one."""
        if self._seed % _SEEDS or clock < 1 or table.spec.optimizer.kind not in _ARRAYS:
            return None
        if table.spec.rows is not None:
            return None
        key = table.table_id, clock
        if key not in self._found:
            self._found[key] = self._drawn(table, clock)
        return self._found[key]

    def _drawn(self, table: Table, clock: int) -> Edit | None:
        draw = random.Random(f"edits of {self._seed}, {table.table_id}, {clock}")
        loads = not self._seed % _LOADING_SEEDS
        if draw.random() >= (_LOADING_SHARE if loads else _SHARE):
            return None
        blocks = tuple(b for b in range(table.block_count) if draw.random() < 0.7)
        if self._may_differ and clock < _FIRST_LEAVERS and draw.random() < _DISPUTED:
            other, array = draw.randrange(self._worker_count), self._array(draw, table)
            changes = draw.random() < 0.6
            return Edit(table, clock, blocks, other, changes, array, draw.random() < 0.5)
        number = draw.choice((0, 0, 0, 2))
        return Edit(table, clock, blocks, array=self._array(draw, table), number=number)

    @staticmethod
    def _array(draw: random.Random, table: Table) -> int:
        arrays = list(_ARRAYS[table.spec.optimizer.kind])
        return draw.choice((VALUES, STEP, *draw.choices(arrays, k=3)))
