"""What servers say to each other of the ranges that they hold (SEMANTICS S8, S9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ps_core.keys import AssignmentEpoch, RangeId, TableId
from ps_server.ranges.range_copy import Delta, ShardCopy
from ps_server.values.mutations import Change
from ps_server.values.store_copy import StoreCopy


class LogRecord(NamedTuple):
    """What one event decided in one table: `changes` are for the values, opaque here. `term` is
    the epoch in which its primary became one: numbers of two terms have nothing in common.
    """

    range_id: RangeId
    term: AssignmentEpoch
    assignment_epoch: AssignmentEpoch
    number: int
    table_id: TableId
    delta: Delta
    changes: tuple[Any, ...]


class Ack(NamedTuple):
    """A backup has all records of a range up to `number`; `assignment_epoch` is the newest that it
    has heard of.
    """

    range_id: RangeId
    number: int
    assignment_epoch: AssignmentEpoch


class Beat(NamedTuple):
    """A primary asks its backup for the lease of these ranges."""

    sent_s: float
    epochs: tuple[tuple[RangeId, AssignmentEpoch], ...]


class Grant(NamedTuple):
    """The answer to a beat, for the ranges that it was granted for."""

    sent_s: float
    range_ids: tuple[RangeId, ...]


class Snapshot(NamedTuple):
    """All of a range as of record `number`, for a server that joins it. The values come beside it,
    from the edge: those that were released, on which the changes of `held` are still to be made.
    """

    range_id: RangeId
    assignment_epoch: AssignmentEpoch
    term: AssignmentEpoch
    number: int
    copies: dict[TableId, ShardCopy]
    held: tuple[Change, ...] = ()


class RangeCopy(NamedTuple):
    """All of a range: what is known of it, and its values. The changes that the snapshot holds are
    still to be made to them.
    """

    snapshot: Snapshot
    stores: Mapping[TableId, StoreCopy]

    def of(self, snapshot: Snapshot) -> RangeCopy:
        """The tables of this snapshot alone, which is of the same moment."""
        if snapshot is self.snapshot:
            return self
        return RangeCopy(snapshot, {t: self.stores[t] for t in snapshot.copies if t in self.stores})
