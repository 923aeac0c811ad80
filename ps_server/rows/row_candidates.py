"""The candidates of a partition: ids that have had gradients, and too few to be rows.

    unknown --an update has a gradient of it--> candidate --the `admit_after`th--> row
    candidate --evicted, by the rules of rows--> unknown

Rules:
    - A candidate has no values: an update counts it, and its gradient is dropped, until the one
      that admits it.
    - An id that was admitted keeps its place here for a time, with the count 0, which is as if it
      had none: removing rows takes a pass over all, so many go at once.

Invariants:
    CD-1  An id is a candidate or a row, and not both.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ps_core.rows import Ids
from ps_core.sliced_work import Work
from ps_server.rows.row_arrays import Column, Rows
from ps_server.rows.row_partition import RowPartition
from ps_server.rows.row_retention import COUNT, TALLY, UPDATED, Leaves, RowRetention, spans_of

COLUMNS = {name: Column(1, TALLY) for name in (COUNT, UPDATED)}

_GONE_SHARE = 4
"""Admitted ids are removed once they are more than this share of all."""


class Candidates:
    """The candidates of one partition.

    Attributes:
        known: ids with the `COLUMNS`: the number of the last update that had a gradient of each,
            and the count of these.
    """

    def __init__(self, known: RowPartition, retention: RowRetention, admit_after: int) -> None:
        self.known = known
        self._retention = retention
        self._admit_after = admit_after
        self._gone_count = 0

    @property
    def count(self) -> int:
        """The candidates, without those that were admitted."""
        return self.known.index.count - self._gone_count

    def admits(self, ids: Ids) -> Leaves:
        """True for each id that the next update with a gradient of it makes a row."""
        numbers = self.known.index.find(ids)
        counts = np.zeros(len(ids), np.int64)
        here = np.flatnonzero(numbers >= 0)
        arrays = self.known.arrays
        counts[here] = arrays.kept(COUNT, numbers[here])[:, 0]
        return counts + 1 >= self._admit_after

    def admitting(self, ids: Ids, version: int) -> Work[Leaves]:
        """Count these ids, each once and no row, for update `version`; true for those that it
        admits.
        """
        known, count = self.known, len(ids)
        numbers = known.index.find(ids)
        new = np.flatnonzero(numbers < 0)
        if len(new):
            nothing = np.zeros((len(new), 1), TALLY)
            self._gone_count += len(new)
            numbers[new] = yield from known.adding(ids[new], {COUNT: nothing, UPDATED: nothing})
        if known.snapshot is not None:
            known.snapshot.keep(numbers)
        places = known.arrays.places(numbers)
        counts = known.arrays.get(COUNT, places, count)
        self._gone_count -= int(np.count_nonzero(counts == 0))
        counts += TALLY.type(1)
        is_admitted: Leaves = counts[:, 0] >= self._admit_after
        counts[is_admitted] = 0
        self._gone_count += int(np.count_nonzero(is_admitted))
        known.arrays.put(COUNT, places, counts)
        known.arrays.put(UPDATED, places, np.full((count, 1), version % 2**32, TALLY))
        return is_admitted

    def may_leave(self, new_count: int, version: int) -> bool:
        """True if `evicting` may have something to do, with so many new candidates."""
        is_gone = _GONE_SHARE * (self._gone_count + new_count) > self.known.index.count
        return is_gone or self._retention.may_leave(self.count + new_count, version)

    def evicting(self, version: int) -> Work[None]:
        """Remove those that leave after update `version`, and admitted ids if they are many."""
        if not self.may_leave(0, version):
            return
        known = self.known
        leaves = np.zeros(known.index.count, bool)
        for some in spans_of(len(leaves)):
            numbers = np.arange(some.start, some.stop)
            leaves[some] = known.arrays.kept(COUNT, numbers)[:, 0] == 0
            yield
        leaves = yield from self._retention.leaving(known, version, leaves)
        yield from known.removing(leaves)
        self._gone_count = 0

    def adding(self, ids: Ids, arrays: Mapping[str, Rows]) -> Work[None]:
        """Add what a copy or a checkpoint has."""
        self._gone_count += int(np.count_nonzero(arrays[COUNT] == 0))
        yield from self.known.adding(ids, arrays)
