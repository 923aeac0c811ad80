"""A backup's end of a range's replication (SEMANTICS S8).

    follows --promoted--> waits out its last grant (`lease`) --> serves, as `RangeMachine`s
       +------the range is handed over to it------------------------^

Rules:
    - A record of an older epoch is refused: its sender is primary no more.
    - A record is applied when it comes, perhaps before it is committed. Only a backup that has it
      can be promoted, and a promoted backup commits everything that it has.
    - A backup grants the lease by answering a beat of its primary's epoch. Once promoted it grants
      no more.
    - A range is handed over under the term that its records have. Its former primary gave its lease
      up before, so no grant is waited out, and all have the same records.

Invariants:
    RE-1  `number` is the newest record, and every one before it was taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ps_core.keys import AssignmentEpoch, RangeId, TableId
from ps_server.ranges.range_copy import ShardCopy
from ps_server.replication.lease import GrantedLease
from ps_server.replication.messages import LogRecord


class Replica:
    """One range, at one backup.

    Args:
        lease_s: length of a grant.
        term: the epoch in which its primary became one.
        copies: of the snapshot that it began with.
        number: of the newest record in that snapshot.
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
        self._lease = GrantedLease(lease_s)
        self.is_promoted = False
        self.is_handed_over = False

    def follow(self, assignment_epoch: AssignmentEpoch) -> None:
        """A newer configuration still has this server as a backup."""
        self.assignment_epoch = max(self.assignment_epoch, assignment_epoch)

    def follows(self, record: LogRecord) -> bool:
        """True if the record comes from this backup's primary."""
        is_current = record.assignment_epoch >= self.assignment_epoch and record.term == self.term
        return is_current and not self.is_promoted

    def take(self, record: LogRecord, fresh: Callable[[], ShardCopy | None]) -> bool:
        """Take a record of its primary if it is the next. `fresh` makes the copy of a table that is
        new here, if the newest view has it.
        """
        is_next = self._is_next(record)
        copy = (self.copies.get(record.table_id) or fresh()) if is_next else None
        if copy is None:
            return False
        self.follow(record.assignment_epoch)
        self.copies[record.table_id] = copy
        copy.take(record.delta)
        self.number = record.number
        return True

    def skip(self, record: LogRecord) -> None:
        """Count a record of a removed table, of whose removal its primary had not heard."""
        if self._is_next(record):
            self.follow(record.assignment_epoch)
            self.number = record.number

    def _is_next(self, record: LogRecord) -> bool:
        return record.number == self.number + 1

    def beat(self, assignment_epoch: AssignmentEpoch, now_s: float) -> bool:
        """Grant the lease to the primary of this epoch, if it is the current one."""
        if assignment_epoch < self.assignment_epoch or self.is_promoted:
            return False
        self._lease.grant(now_s)
        return True

    def keep_grants(self, before: Replica) -> None:
        """Take over the grants of `before`, whose place this replica takes."""
        self._lease.take_over(before._lease)

    def promote(self, assignment_epoch: AssignmentEpoch, term: AssignmentEpoch) -> None:
        """Become primary of this epoch, and serve from `serves_s` on, under this term."""
        self.assignment_epoch = assignment_epoch
        self.is_promoted = True
        self.is_handed_over = term == self.term

    @property
    def serves_s(self) -> float:
        """Time from which nobody can hold a lease that this backup granted."""
        return -math.inf if self.is_handed_over else self._lease.ends_s
