"""What may change of a table while it is trained, as values: its consistency and its workers; and
where it is cut for a checkpoint.

A change is made everywhere at one clock (SEMANTICS S6); who decides which is
`scheduler.machine.changes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ps_core.consistency import Consistency
from ps_core.keys import Incarnation


@dataclass(frozen=True, slots=True)
class Join:
    """A worker joins a table that is trained: it takes the place of one that is gone, or comes
    beyond those that the cluster was started for.

    Attributes:
        rank: its rank.
        incarnation: its own.
        after_clock: its first step is for the clock after this one.
    """

    rank: int
    incarnation: Incarnation
    after_clock: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """From the clock after `after_clock` on, a table is treated otherwise.

    Attributes:
        number: counts a table's changes, those that were withdrawn included; from 1.
        after_clock: the last clock that is treated as before.
        consistency: the setting of all later clocks.
        join: who joins then, if anybody does; the setting is the one of before in that case.
        checkpoint: the checkpoint that a cut is proposed for; 0 if it is no cut.
        is_decided: a proposal that all have promised: the table's first range takes it, unless it
            has given it up.
    """

    number: int
    after_clock: int
    consistency: Consistency
    join: Join | None = None
    checkpoint: int = 0
    is_decided: bool = False


class ChangeOutcome(Enum):
    """What became of a proposal, as a table's first range has it; it never changes."""

    TAKEN = "taken"
    GIVEN_UP = "given up"


class Settled(NamedTuple):
    """What became of a proposal; and after which clock it is in force, if it was taken."""

    outcome: ChangeOutcome
    after_clock: int = 0


@dataclass(frozen=True, slots=True)
class TableCut:
    """A table is written down as it is after a clock.

    Attributes:
        checkpoint: the number of the checkpoint.
        after_clock: the last clock that is in it.
    """

    checkpoint: int
    after_clock: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is being made.

    Attributes:
        number: counts the checkpoints of a cluster, those that failed included; from 1.
        url: the directory that its files go to.
        is_cut: whether every table's cut is settled.
        base: the checkpoint, complete and of this cluster, in which servers need not write again
            what has not changed since; 0: everything is written.
    """

    number: int
    url: str
    is_cut: bool = False
    base: int = 0
