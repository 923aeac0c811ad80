"""The rows that leave a partition after an update: those unseen for long, and those beyond a bound.

A pure function of the partition's updates, so that replicas, logs and restored checkpoints agree
without a word about it (ADR 0026). The age of a row is the number of updates of its partition since
the last one that had a gradient of it.

Rules:
    - By age: at every update whose number is a multiple of `evict_after` / 8, the rows leave whose
      age is `evict_after` or more.
    - By count: if there are more than the bound, so many leave that seven eighths of it stay: the
      oldest (LRU), or those with the fewest updates, and of these the oldest (LFU). Of rows equal
      in that, those with the lowest mixed ids leave.

Invariants:
    RT-1  After an update a partition has no more rows than its bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ps_core.rows import Ids, mixed_ids
from ps_core.sliced_work import Work
from ps_core.tables.table_spec import Eviction, RowsSpec
from ps_server.rows.row_arrays import Rows
from ps_server.rows.row_kernels import Numbers
from ps_server.rows.row_partition import RowPartition

UPDATED, COUNT = "updated", "update_count"
"""Arrays: the number of a row's last update among its partition's, and how many it had."""

TALLY = np.dtype(np.uint32)
"""The dtype of both. Ages are counted modulo 2**32; counts stop at the highest."""

MOST = int(np.iinfo(TALLY).max)

Leaves = npt.NDArray[np.bool_]
"""True for the rows that leave, by number."""

_SHARE = 8
_PIECE_COUNT = 65_536
"""Rows that are looked at in one turn of the loop: a millisecond at most."""

_DIGIT_BITS = 16


class RowRetention:
    """The rows of one table that leave its partitions.

    Attributes:
        most: the rows that a partition may have; 0: any number.
        names: the arrays that rows have for it.
    """

    def __init__(self, rows: RowsSpec, salt: np.uint64) -> None:
        self.most = -(-rows.max_row_count // rows.partition_count)
        self.names: tuple[str, ...] = ()
        self._after = rows.evict_after
        self._salt = salt
        self._is_by_count = bool(self.most) and rows.eviction is Eviction.LFU
        if self.most or self._after:
            self.names = (UPDATED, COUNT) if self._is_by_count else (UPDATED,)

    def may_leave(self, count: int, version: int) -> bool:
        """True if rows may leave a partition of `count` rows after update `version`."""
        return self._is_due(version) or bool(self.most and count > self.most)

    def _is_due(self, version: int) -> bool:
        return bool(self._after) and version % max(1, self._after // _SHARE) == 0

    def leaving(self, partition: RowPartition, version: int, leaves: Leaves) -> Work[Leaves]:
        """The rows that leave after update `version`, with those that `leaves` has already; its
        memory is the result's.
        """
        if self._is_due(version):
            for numbers in _pieces(np.arange(len(leaves))):
                leaves[numbers] |= _ages(partition, numbers, version) >= self._after
                yield
        stays = np.flatnonzero(~leaves)
        if not self.most or len(stays) <= self.most:
            return leaves
        wanted = np.empty(len(stays), np.uint64)
        begin = 0
        for numbers in _pieces(stays):
            wanted[begin : begin + len(numbers)] = self._wanted(partition, numbers, version)
            begin += len(numbers)
            yield

        def mixed(places: Numbers) -> Ids:
            return mixed_ids(partition.index.ids[stays[places]], self._salt)

        count = len(stays) - (self.most - self.most // _SHARE)
        for places in (yield from smallest(wanted, mixed, count)):
            leaves[stays[places]] = True
            yield
        return leaves

    def _wanted(self, partition: RowPartition, numbers: Numbers, version: int) -> Ids:
        """The rank of rows: the lowest leave."""
        wanted: Ids = (MOST - _ages(partition, numbers, version)).astype(np.uint64)
        if self._is_by_count:
            wanted |= _column(partition, COUNT, numbers).astype(np.uint64) << np.uint64(32)
        return wanted


def smallest(first: Ids, second: Callable[[Numbers], Ids], count: int) -> Work[list[Numbers]]:
    """The places, in pieces, of the `count` smallest of some pairs; `second` gives the second
    numbers of some places, all different. Digit by digit: each turn looks at few.
    """
    found: list[Numbers] = []
    places: Numbers = np.arange(len(first))
    for word in (first, second):
        keys = word if isinstance(word, np.ndarray) else word(places)
        for shift in range(64 - _DIGIT_BITS, -1, -_DIGIT_BITS):
            digits = np.empty(len(keys), np.uint16)
            counts = np.zeros(1 << _DIGIT_BITS, np.int64)
            for some in spans_of(len(keys)):
                digits[some] = keys[some] >> np.uint64(shift)
                counts += np.bincount(digits[some], minlength=len(counts))
                yield
            ends = np.cumsum(counts)
            last = int(np.searchsorted(ends, count))
            kept = []
            for some in spans_of(len(keys)):
                found.append(places[some][digits[some] < last])
                kept.append(np.flatnonzero(digits[some] == last) + some.start)
                yield
            chosen = np.concatenate(kept)
            count -= int(ends[last] - counts[last])
            places, keys = places[chosen], keys[chosen]
            if count == len(places):
                return [*found, places]
    return found


def _ages(partition: RowPartition, numbers: Numbers, version: int) -> npt.NDArray[np.uint32]:
    return TALLY.type(version & MOST) - _column(partition, UPDATED, numbers)


def _column(partition: RowPartition, name: str, numbers: Numbers) -> npt.NDArray[np.uint32]:
    found: Rows = partition.arrays.kept(name, numbers)
    return found[:, 0]


def spans_of(count: int) -> Iterator[slice]:
    for begin in range(0, count, _PIECE_COUNT):
        yield slice(begin, min(begin + _PIECE_COUNT, count))


def _pieces(numbers: Numbers) -> Iterator[Numbers]:
    for some in spans_of(len(numbers)):
        yield numbers[some]
