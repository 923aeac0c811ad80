"""What is pushed in a simulation, and what every block must hold in the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ps_core.change import TableChange
from ps_core.consistency import Consistency, Mode, StalePolicy
from ps_core.errors import PushpullError
from ps_core.keys import Incarnation, TableId
from ps_core.tables.optimizers import Hyperparameters
from ps_core.tables.table import Table
from tests.sim.arithmetic import Twin
from tests.sim.edits import Edit, Edits
from tests.sim.grads import Grad
from tests.sim.groups import Groups


class TrainingEnded(Exception):
    """A worker was told something that ends its training; the message is what."""


class TableFailed(Exception):
    """A worker was told that a table has failed."""


CLIP_SCALE = 0.5
"""What a worker's own gradient is scaled by, in tables that are clipped."""


def square(grad: Grad) -> float:
    """What a gradient adds to the norm; a whole number, so sums are exact."""
    return float(grad.clock * 100 + grad.rank * 10 + grad.revision + 1)


def scale_of(squares: Iterable[float]) -> float:
    """The scale that follows from all that was told; no two norms have the same."""
    return 1.0 / (1.0 + sum(squares))


class Body(NamedTuple):
    """What a push carries."""

    grad: Grad
    problem: PushpullError | None
    is_assign: bool
    is_eager: bool


class Settings:
    """Which consistency each clock of each table has, as it turned out."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._settings = {t.table_id: [(-1, t.spec.consistency)] for t in tables}
        self.may_change = False
        self.seals_together = False  # workers seal steps of several tables as one
        self.cuts_given_up: set[int] = set()  # by servers that did not hear the scheduler
        self.numbers: dict[TableId, int] = defaultdict(int)  # of the newest changes in force
        self.read_for: dict[TableId, int] = defaultdict(int)
        """The newest clock for which a worker was answered a read, under what was its setting."""
        self.clipped: set[TableId] = set()  # tables whose workers clip by the norm
        self.rates: dict[tuple[TableId, int, int], Hyperparameters] = {}
        """What workers (by incarnation) sealed a clock with."""
        self.eager: dict[tuple[TableId, int, int], bool] = {}
        """Whether a worker's step of a clock was eager."""
        self.amp: dict[tuple[TableId, int, int], float] = {}
        """What workers (by incarnation) scale their own gradient of a clock by; else 1."""
        self.scales: dict[tuple[TableId, int], float] = {}  # what BSP updates were scaled by
        self.skipped: set[tuple[TableId, int, Incarnation]] = set()
        """Steps (table, clock, worker) that no range may count."""
        self.edits = Edits(1, 0, may_differ=False)  # none
        self.groups = Groups()  # none
        self.asleep: set[TableId] = set()
        """Tables that no worker steps."""
        self.paces: dict[TableId, int] = {}
        """How many steps of each table a loop has, if more than one may be; none: one of each."""
        self.wakes_in: dict[TableId, int] = {}
        """In which time of the loop a table is stepped first; else in the first, 0."""
        self.has_save_points = False
        """Whether scripts say where their loops begin."""
        self.of_one: set[TableId] = set()
        """Tables of runs that have one worker."""
        self.unreadable: set[TableId] = set()
        """Tables of a checkpoint of which something cannot be read: they may fail."""
        self.stepped: dict[TableId, int] = defaultdict(int)
        """The newest clock of which a worker has sealed a step, and not said goodbye, or made an
        eager push."""

    def add(self, table: Table) -> None:
        """A table was made."""
        self._settings[table.table_id] = [(-1, table.spec.consistency)]

    def change(self, table_id: TableId, change: TableChange) -> None:
        """It is in force somewhere. What it makes void was not reached by anyone."""
        if change.number <= self.numbers[table_id]:  # its first range had taken it
            return
        self.numbers[table_id] = change.number
        settings = self._settings[table_id]
        read_for = self.read_for[table_id]
        assert change.after_clock >= read_for, (
            f"S6: {change} of table {table_id}: a read for clock {read_for} was answered"
        )
        while len(settings) > 1 and settings[-1][0] >= change.after_clock:
            settings.pop()
        settings.append((change.after_clock, change.consistency))

    def steps(self, table: Table, clock: int) -> None:
        """A worker takes a step of that clock."""
        self.stepped[table.table_id] = max(self.stepped[table.table_id], clock)

    def number_of(self, table_id: TableId) -> int:
        """The newest change that is in force."""
        return self.numbers[table_id]

    def at(self, table: Table, clock: int) -> Consistency:
        """The setting of a clock."""
        return [s for after, s in self._settings[table.table_id] if clock > after][-1]

    def takes_edit(self, edit: Edit) -> bool:
        """Whether it is in the blocks: its clock has a step of all workers, who all mean it."""
        return self.is_shared(edit.table, edit.clock) and edit.other is None

    def is_shared(self, table: Table, clock: int) -> bool:
        """Whether the steps of a clock are one step of all workers."""
        setting = self.at(table, clock)
        if table.table_id in self.of_one:
            return True
        return setting.mode is Mode.BSP and not setting.backup_workers

    def last_change(self, table: Table, clock: int) -> int:
        """The clock after which the setting of `clock` began; -1 if it is the first."""
        return max(after for after, _ in self._settings[table.table_id] if clock > after)

    def upto(self, table: Table, clock: int) -> list[Consistency]:
        """The settings of all clocks up to `clock`."""
        return [s for after, s in self._settings[table.table_id] if clock > after]

    def loses(self, table: Table, clock: int) -> bool:
        """Whether steps up to `clock` may have ended as DISCARDED or REJECTED, which their workers
        may not know yet.
        """
        return any(
            setting.backup_workers or setting.policy is StalePolicy.REJECT
            for setting in self.upto(table, clock)
        )

    def bounds(self, table: Table) -> list[int]:
        """Beyond which staleness steps may be turned away."""
        return [
            setting.bound
            for _, setting in self._settings[table.table_id]
            if setting.policy is StalePolicy.REJECT
        ]

    def scaled(self, table: Table, clock: int, scale: float) -> None:
        """An update was scaled: in every range by the same."""
        assert table.table_id in self.clipped
        assert self.at(table, clock).mode is Mode.BSP
        assert self.scales.setdefault((table.table_id, clock), scale) == scale

    def was_eager(self, table: Table, incarnation: int, clock: int) -> None:
        """A worker's step has pushes that were applied as they came."""
        self.eager[table.table_id, incarnation, clock] = True

    def contribution_scale(self, table: Table, incarnation: int, clock: int) -> float:
        """What a worker's gradient of a clock is scaled by, before anything else."""
        return self.amp.get((table.table_id, incarnation, clock), 1.0)

    def clip_scale(self, table: Table, clock: int) -> float:
        """What a worker's own gradient is clipped by, where that is no matter of the sum."""
        is_own = table.table_id in self.clipped and clock > 0
        return CLIP_SCALE if is_own and self.at(table, clock).mode is not Mode.BSP else 1.0

    def is_always_bsp(self, table: Table) -> bool:
        """Whether no clock has another."""
        return all(s.mode is Mode.BSP for _, s in self._settings[table.table_id])


@dataclass
class Truth:
    """What every block must hold in the end: what was sealed without skip, at its last revision.

    Attributes:
        twin: what numbers that makes.
    """

    settings: Settings
    contributions: dict[tuple[TableId, int], set[Grad]] = field(
        default_factory=lambda: defaultdict(set)
    )

    def __post_init__(self) -> None:
        self.twin = Twin(self.settings, self)

    def upto(self, table_id: TableId, block: int, clock: int) -> set[Grad]:
        """The block's contributions up to a clock, by those who live."""
        return {g for g in self.living(self.contributions[table_id, block]) if g.clock <= clock}

    def change(self, edit: Edit, incarnation: Incarnation) -> None:
        """A worker has sealed an edit."""
        for block in edit.blocks:
            self.editors[edit.item(block)].add(incarnation)
            self.contributions[edit.table.table_id, block].add(edit.item(block))

    def living(self, found: Iterable[Grad]) -> list[Grad]:
        """Those of workers that are not gone: of those only a part may have landed."""
        return [grad for grad in found if self._lives(grad)]

    def _lives(self, grad: Grad) -> bool:
        if not grad.is_edit or not grad.pulled:
            return grad.incarnation not in self.gone
        editors = self.editors.get(grad)  # None: of a checkpoint
        return editors is None or bool(editors - self.gone)

    editors: dict[Grad, set[Incarnation]] = field(default_factory=lambda: defaultdict(set))
    """What an edit that is taken makes of a block -> who has sealed it."""

    took_part: dict[tuple[TableId, int], set[Incarnation]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """(table, clock) -> who has sealed it without skip."""

    sealed: dict[tuple[TableId, Incarnation], int] = field(default_factory=lambda: defaultdict(int))
    """(table, worker) -> the newest clock that the worker has sealed. One that was replaced may go
    on sealing for a while: nothing of that is its successor's.
    """

    left: set[tuple[TableId, Incarnation]] = field(default_factory=set)
    """(table, worker) of workers that have left, or are gone."""

    restored: dict[TableId, int] = field(default_factory=dict)
    """Tables that came from a checkpoint, and at which clock."""

    gone: set[Incarnation] = field(default_factory=set)
    """Incarnations of workers that were declared gone."""
