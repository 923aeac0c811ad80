"""What is pushed in a simulation, and what every block must hold in the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ps_core.errors import PushpullError
from ps_core.keys import TableId


class Grad(NamedTuple):
    """One worker's gradient of one block."""

    clock: int
    rank: int
    block: int
    revision: int
    pulled: int | None = None
    """Others' updates of the block that its worker had seen."""


class TrainingEnded(Exception):
    """A worker was told something that ends its training; the message is what."""


class Body(NamedTuple):
    """What a push carries."""

    grad: Grad
    problem: PushpullError | None
    is_assign: bool
    is_eager: bool


@dataclass
class Truth:
    """What every block must hold in the end: what was sealed without skip, at its last revision."""

    contributions: dict[tuple[TableId, int], set[Grad]] = field(
        default_factory=lambda: defaultdict(set)
    )

    def upto(self, table_id: TableId, block: int, clock: int) -> set[Grad]:
        """The block's contributions up to a clock, by those who live."""
        return {g for g in self.living(self.contributions[table_id, block]) if g.clock <= clock}

    def living(self, found: Iterable[Grad]) -> list[Grad]:
        """Those of workers that are not gone: of those only a part may have landed."""
        return [grad for grad in found if grad.rank not in self.gone]

    sealed: dict[tuple[TableId, int], int] = field(default_factory=lambda: defaultdict(int))
    """(table, rank) -> the newest clock that the worker has sealed."""

    left: set[tuple[TableId, int]] = field(default_factory=set)
    """(table, rank) of workers that have left."""

    gone: set[int] = field(default_factory=set)
    """Ranks of workers that were declared gone."""
