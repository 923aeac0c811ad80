"""A backup's end of a range's replication (SEMANTICS S8).

    follows --promoted--> waits out its last grant --> serves, as `RangeMachine`s of what it has

Rules:
    - It takes the records of its epoch in the order of their numbers, each once, and acknowledges
      the newest. What comes with an older epoch is refused: its sender is primary no more.
    - A record is applied when it comes. Its primary may not know yet that it is committed; but only
      a backup that has it can be promoted, and a promoted one commits all that it has.
    - A beat is granted by answering it. From when it is promoted it grants no more, and it serves
      when the last one that it granted has run out: by its own clock, counted from its answer, and
      by any that is slower by `MAX_DRIFT`.

Invariants:
    RE-1  `number` is the newest record, and every one before it was taken.

What it deliberately does not do: hold values (the edge does, in the order of the records).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ps_core.keys import AssignmentEpoch, RangeId, TableId
from ps_server.ranges.range_copy import ShardCopy
from ps_server.replication.messages import LogRecord

MAX_DRIFT = 0.05
"""By so much of the time that passes may the clocks of two servers run apart."""


class Replica:
    """One range, at one backup.

    Args:
        range_id: the range.
        assignment_epoch: under which it follows.
        lease_s: for how long a grant lasts.
        term: the epoch in which the primary that it follows became one.
        copies: what it was given when it joined; by table.
        number: of the newest record in that.
    """

    def __init__(
        self,
        range_id: RangeId,
        assignment_epoch: AssignmentEpoch,
        lease_s: float,
        term: AssignmentEpoch,
        copies: dict[TableId, ShardCopy] | None = None,
        number: int = 0,
    ) -> None:
        self.range_id = range_id
        self.assignment_epoch = assignment_epoch
        self.term = term
        self.number = number
        self.copies = copies if copies is not None else {}
        self._lease_s = lease_s
        self._granted_s = -math.inf
        self.is_promoted = False

    def follow(self, assignment_epoch: AssignmentEpoch) -> None:
        """A newer configuration has it as a backup still."""
        self.assignment_epoch = max(self.assignment_epoch, assignment_epoch)

    def follows(self, record: LogRecord) -> bool:
        """Whether it comes from its primary."""
        is_current = record.assignment_epoch >= self.assignment_epoch and record.term == self.term
        return is_current and not self.is_promoted

    def take(self, record: LogRecord, fresh: Callable[[], ShardCopy | None]) -> bool:
        """A record of its primary came: whether it is the next, and was taken. `fresh` makes the
        copy of a table of which it has heard nothing, if the newest view has it.
        """
        if not self._is_next(record):
            return False
        copy = self.copies.get(record.table_id) or fresh()
        if copy is None:
            return False
        self.follow(record.assignment_epoch)
        self.copies[record.table_id] = copy
        copy.take(record.delta)
        self.number = record.number
        return True

    def skip(self, record: LogRecord) -> bool:
        """As `take`, of a table that was removed, which its primary had not heard: nothing of it is
        kept.
        """
        if not self._is_next(record):
            return False
        self.follow(record.assignment_epoch)
        self.number = record.number
        return True

    def _is_next(self, record: LogRecord) -> bool:
        return record.number == self.number + 1

    def beat(self, assignment_epoch: AssignmentEpoch, now_s: float) -> bool:
        """The primary of `epoch` asks for the lease; whether it is granted."""
        if assignment_epoch < self.assignment_epoch or self.is_promoted:
            return False
        self._granted_s = max(self._granted_s, now_s)
        return True

    def keep_grants(self, before: Replica) -> None:
        """This one takes the place of `before`, whose grants may not have run out."""
        self._granted_s = before._granted_s

    def promote(self, assignment_epoch: AssignmentEpoch) -> None:
        """It is primary of `epoch`; it serves from `serves_s` on."""
        self.assignment_epoch = assignment_epoch
        self.is_promoted = True

    def stand_down(self) -> None:
        """Another is primary, and may yet be followed by this one: it keeps what it has, grants
        that one nothing of an older epoch, and serves nothing.
        """
        self.is_promoted = False

    @property
    def serves_s(self) -> float:
        """When nobody can hold a lease that it granted."""
        return self._granted_s + self._lease_s * (1.0 + MAX_DRIFT)
