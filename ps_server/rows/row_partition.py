"""The rows of one partition: numbers by id, and arrays by number.

Rules:
    - A captured partition goes on changing: a row is copied before its first change, unless the
      snapshot has given it. Rows that are added later are not in the snapshot.

Invariants:
    RI-2  A partition is captured by one snapshot at a time, which gives each row that was there
          once, as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ps_core.errors import check
from ps_core.rows import Ids
from ps_core.sliced_work import Work, at_once
from ps_server.rows.reserved_memory import Prefault, no_prefault
from ps_server.rows.row_arrays import MemoryUse, RowArrays, Rows
from ps_server.rows.row_index import Moves, RowIndex
from ps_server.rows.row_kernels import Numbers
from ps_server.rows.tiered_arrays import TieredArrays


class RowPartition:
    """The rows of one partition: numbers by id, arrays by number, and the updates so far.

    Attributes:
        snapshot: keeps rows that are about to change, if the partition was captured.
    """

    def __init__(
        self, salt: np.uint64, arrays: RowArrays | TieredArrays, prefault: Prefault = no_prefault
    ) -> None:
        self.index = RowIndex(salt, prefault)
        self.arrays = arrays
        self.version = 0
        self.snapshot: RowSnapshot | None = None

    @property
    def byte_count(self) -> int:
        """Bytes of all rows and their index, in memory or not."""
        return self.index.byte_count + self.index.count * self.arrays.row_bytes

    @property
    def memory_use(self) -> MemoryUse:
        return MemoryUse(self.index.byte_count).plus(self.arrays.memory_use(self.index.count))

    def has_space(self, count: int) -> bool:
        """True if so many more rows are added in one turn."""
        return self.index.has_space(count) and self.arrays.has_space(self.index.count + count)

    def capture(self) -> RowSnapshot:
        """Keep the rows as they are now for the result, until it has given all or is ended."""
        check(self.snapshot is None, "RI-2", "a partition is captured twice")
        self.snapshot = RowSnapshot(self)
        return self.snapshot

    def adding(self, ids: Ids, arrays: Mapping[str, Rows]) -> Work[Numbers]:
        """Add rows with these arrays; returns their numbers."""
        numbers = yield from self.index.adding(ids)
        yield from self.arrays.extending(self.index.count)
        places = self.arrays.places(numbers)
        for name, rows in arrays.items():
            self.arrays.put(name, places, rows)
        return numbers

    def removing(self, leaves: npt.NDArray[np.bool_]) -> Work[None]:
        """Remove rows, by number. Others get new numbers."""
        moves, arrays, snapshot = Moves.where(leaves), self.arrays, self.snapshot
        if snapshot is not None:
            snapshot.keep_ids()
            changed = np.concatenate((moves.to, np.arange(moves.left_count, len(leaves))))
            for begin in range(0, len(changed), arrays.piece_count):
                yield from snapshot.keeping(changed[begin : begin + arrays.piece_count])
                yield
        yield from arrays.moving(moves)
        yield from self.index.removing(moves)


class SnapshotPiece(NamedTuple):
    """Some rows of a snapshot, in the order of their numbers: the first has the number `begin`."""

    begin: int
    ids: Ids
    arrays: dict[str, Rows]


class RowSnapshot:
    """The rows of a partition as they were when it was captured.

    Attributes:
        version: the partition's then.
        count: of its rows then.
    """

    def __init__(self, partition: RowPartition) -> None:
        self.version = partition.version
        self.count = partition.index.count
        self._partition = partition
        self._ids: Ids | None = None  # if the partition's are no longer those of then
        self._given_count = 0
        self._is_begun = False
        # 1 + the place in `_kept` of a row that has changed since, or 0. Untouched pages are free.
        self._places: npt.NDArray[np.int32] = np.zeros(self.count, np.int32)
        self._kept = partition.arrays.empty()
        self._kept_count = 0

    @property
    def is_done(self) -> bool:
        return self._is_begun and self._given_count >= self.count

    def keep(self, numbers: Numbers) -> None:
        """`keeping`, at once: the rows are in memory."""
        at_once(self.keeping(numbers))

    def keeping(self, numbers: Numbers) -> Work[None]:
        """Copy those of these rows, each once, that are about to change for the first time."""
        rows = numbers[(numbers >= self._given_count) & (numbers < self.count)]
        rows = rows[self._places[rows] == 0]
        if not len(rows):
            return
        found = yield from self._partition.arrays.reading(rows)
        count = self._kept_count + len(rows)
        self._kept.extend(count)
        own = np.arange(self._kept_count, count)
        self._places[rows] = own + 1
        places = self._kept.places(own)
        for name, array in found.items():
            self._kept.put(name, places, array)
        self._kept_count = count

    def keep_ids(self) -> None:
        """Copy the ids: rows are about to be removed."""
        if self._ids is None:
            self._ids = self._partition.index.ids[: self.count].copy()

    def next(self) -> SnapshotPiece:
        """`taking`, at once."""
        return at_once(self.taking())

    def taking(self) -> Work[SnapshotPiece]:
        """The next rows, copied; none if there were none. After the last the snapshot ends."""
        arrays, begin = self._partition.arrays, self._given_count
        end = min(begin + arrays.piece_count, self.count)
        kept_places = self._places[begin:end].astype(np.int64)
        same, changed = np.flatnonzero(kept_places == 0), np.flatnonzero(kept_places)
        found = yield from arrays.reading(same + begin)
        if len(changed):
            places = self._kept.places(kept_places[changed] - 1)
            for name, unchanged in found.items():
                rows = np.empty((end - begin, unchanged.shape[1]), unchanged.dtype)
                rows[same] = unchanged
                rows[changed] = self._kept.get(name, places, len(changed))
                found[name] = rows
        self._given_count, self._is_begun = end, True
        if self.is_done:
            self.end()
        ids = self._partition.index.ids if self._ids is None else self._ids
        return SnapshotPiece(begin, ids[begin:end], found)

    def end(self) -> None:
        """Keep rows no more. Idempotent."""
        if self._partition.snapshot is self:
            self._partition.snapshot = None
