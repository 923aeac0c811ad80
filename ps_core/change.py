"""Changes of a table under training: consistency, joining workers, and cuts for checkpoints.

A change takes effect everywhere at one clock (SEMANTICS S6), by `scheduler.machine.changes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ps_core.consistency import Consistency
from ps_core.keys import Incarnation


@dataclass(frozen=True, slots=True)
class Join:
    """A worker joins a table under training, as a replacement or a late joiner; its first step is
    for the clock after `after_clock`.
    """

    rank: int
    incarnation: Incarnation
    after_clock: int = 0


@dataclass(frozen=True, slots=True)
class TableChange:
    """A change of a table, in effect from the clock after `after_clock` on.

    Attributes:
        number: counts a table's proposals, withdrawn ones included; from 1.
        after_clock: the last clock without the change.
        consistency: setting of all later clocks.
        join: the joining worker, if any; the setting is then the one before.
        checkpoint: the checkpoint of a proposed cut; 0 if the change is no cut.
        is_decided: all servers are prepared: the table's first range takes the change, unless it
            has given it up.
    """

    number: int
    after_clock: int
    consistency: Consistency
    join: Join | None = None
    checkpoint: int = 0
    is_decided: bool = False


class ChangeOutcome(Enum):
    """Result of a proposal in a table's first range; final."""

    TAKEN = "taken"
    GIVEN_UP = "given up"


class ChangeResult(NamedTuple):
    """Result of a proposal, and the clock after which a taken one is in effect."""

    outcome: ChangeOutcome
    after_clock: int = 0


@dataclass(frozen=True, slots=True)
class TableCut:
    """A table's cut for the checkpoint of that number, which has its clocks up to `after_clock`."""

    checkpoint: int
    after_clock: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A running checkpoint.

    Attributes:
        number: counts the checkpoints of a cluster, failed ones included; from 1.
        url: directory of its files.
        is_cut: True once the cut of every table is committed.
        base: complete checkpoint of this cluster, whose unchanged blocks servers need not write
            again; 0: every block is written.
    """

    number: int
    url: str
    is_cut: bool = False
    base: int = 0
