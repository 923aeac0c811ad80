"""Messages of replication between servers (SEMANTICS S8, S9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ps_core.keys import AssignmentEpoch, RangeId, TableId
from ps_server.ranges.range_copy import RangeDelta, ShardCopy
from ps_server.values.mutations import Mutation
from ps_server.values.store_copy import StoreCopy


class LogRecord(NamedTuple):
    """Decision of one event in one table; `changes` are for the values. `term`: the epoch in which
    its primary became one: numbers of two terms have nothing in common.
    """

    range_id: RangeId
    term: AssignmentEpoch
    assignment_epoch: AssignmentEpoch
    number: int
    table_id: TableId
    delta: RangeDelta
    changes: tuple[Any, ...]


class Ack(NamedTuple):
    """A backup has all records of a range up to `number`, and has heard of `assignment_epoch`."""

    range_id: RangeId
    number: int
    assignment_epoch: AssignmentEpoch


class Beat(NamedTuple):
    """Request of a primary to its backup for the lease of these ranges."""

    sent_s: float
    epochs: tuple[tuple[RangeId, AssignmentEpoch], ...]


class Grant(NamedTuple):
    """Answer to a beat, with the ranges whose lease is granted."""

    sent_s: float
    range_ids: tuple[RangeId, ...]


class Snapshot(NamedTuple):
    """All of a range as of record `number`, for a server that joins it. Its values come beside it;
    the changes in `held` are still to be made to them.
    """

    range_id: RangeId
    assignment_epoch: AssignmentEpoch
    term: AssignmentEpoch
    number: int
    copies: dict[TableId, ShardCopy]
    held: tuple[Mutation, ...] = ()


class RangeCopy(NamedTuple):
    """A snapshot with its values, to which the changes that it holds are still to be made."""

    snapshot: Snapshot
    stores: Mapping[TableId, StoreCopy]

    def of(self, snapshot: Snapshot) -> RangeCopy:
        """This copy with the tables of another snapshot of the same moment only."""
        if snapshot is self.snapshot:
            return self
        return RangeCopy(snapshot, {t: self.stores[t] for t in snapshot.copies if t in self.stores})
