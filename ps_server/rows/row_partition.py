"""The rows of one partition: their numbers by id, and their arrays by number.

    slots[(mixed + probe) mod size] -> 1 + number of a row, or 0; ids[number] -> its id

Rules:
    - Numbers count the rows in the order in which they were added. A row keeps its number until
      others are removed: then the last rows take the places of these.
    - A captured partition goes on changing: a row is copied before its first change, unless the
      snapshot has given it. Rows that are added later are not in the snapshot.
    - At most 3 of 5 slots are taken, so most ids are found at the first or second probe. A row
      takes 8 bytes for its id and 7 to 13 for its slot.
    - The table of slots doubles in pieces: the old one answers until the new one is whole.
    - An array begins with 1 MiB, then moves once, into a slab of many GiB, of which only pages that
      are written take memory. Rows beyond it, which few partitions have, lie in a further one.
    - The first touch of a page takes the system up to 18 ms, if its host took the memory back. So
      the pages behind the last row are asked for ahead, of a thread, and a new table of slots is
      written through, a page a turn, before rows come to it here and there.

Invariants:
    RI-1  A slot is free, so that a search ends.
    RI-2  A partition is captured by one snapshot at a time, which gives each row that was there
          once, as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ps_core.errors import check
from ps_core.rows import Ids
from ps_core.work import Work, at_once
from ps_server.rows import row_kernels

Rows = npt.NDArray[Any]
"""Elements of rows. Shapes: (rows, elements)."""

Numbers = npt.NDArray[np.int64]

Prefault = Callable[[npt.NDArray[np.uint8]], object]
"""Asks the system for the pages of some memory, which is not changed; returns at once."""

MadeT = TypeVar("MadeT")

_FIRST_BYTES = 1 << 20
_FIRST_SIZE = 64
_GROWTH = 8
_RESERVED_BYTES = 32 << 30
"""Addresses that are reserved for an array. A process has four thousand times as many."""

_COPIED_BYTES = 1 << 20
"""Bytes of the widest array that are copied in one turn of the loop."""

_PAGE_BYTES = 2 << 20
"""A page of large arrays."""

_AHEAD_BYTES = _PAGE_BYTES
"""The most that is asked for ahead of an array; not more than it has."""

_PIECE_COUNT = 16_384
"""Rows that are put into a new table of slots at once: a millisecond."""


def no_prefault(memory: npt.NDArray[np.uint8]) -> None:
    """Leave pages to their first touch."""
    del memory


class Ahead:
    """The pages of one array that were asked for."""

    def __init__(self, array: npt.NDArray[Any], prefault: Prefault) -> None:
        self._memory = array.reshape(-1).view(np.uint8)
        self._prefault = prefault
        self._end = 0

    def use(self, byte_count: int) -> None:
        """Ask for what comes behind the first bytes, which are used."""
        wanted = min(byte_count + min(byte_count, _AHEAD_BYTES), len(self._memory))
        self._end = max(self._end, byte_count)
        while self._end < wanted:
            begin, self._end = self._end, self._end + _PAGE_BYTES
            self._prefault(self._memory[begin : self._end])


class RowIndex:
    """The numbers of the rows of one partition, whose ids are mixed with `salt`."""

    def __init__(self, salt: np.uint64, prefault: Prefault = no_prefault) -> None:
        self._salt = salt
        self._prefault = prefault
        self._slots: npt.NDArray[np.int32] = np.zeros(_FIRST_SIZE, np.int32)
        self._ids: Ids = np.empty(_FIRST_SIZE, np.uint64)
        self._ahead = Ahead(self._ids, prefault)
        self.count = 0

    @property
    def ids(self) -> Ids:
        """The ids by their numbers: a view."""
        return self._ids[: self.count]

    @property
    def byte_count(self) -> int:
        return self._slots.nbytes + self.count * self._ids.itemsize

    def find(self, ids: Ids) -> Numbers:
        """The number of each id, or -1. Shapes: as `ids`."""
        return row_kernels.find(self._slots, self._ids, ids, self._salt)

    def has_space(self, count: int) -> bool:
        """True if so many more rows need no larger arrays, or small ones."""
        total = self.count + count
        is_enough = 5 * total <= 3 * len(self._slots) and total <= len(self._ids)
        return is_enough or self.count <= _PIECE_COUNT

    def adding(self, ids: Ids) -> Work[Numbers]:
        """Add ids, each once and none of them known; returns their numbers."""
        first, total = self.count, self.count + len(ids)
        if 5 * total > 3 * len(self._slots):
            yield from self._growing(total)
        if total > len(self._ids):
            self._ids = _longer(self._ids, first, total)
            self._ahead = Ahead(self._ids, self._prefault)
            yield
        self._ids[first:total] = ids
        self._ahead.use(total * self._ids.itemsize)
        check(total < len(self._slots), "RI-1", f"{total} rows in {len(self._slots)} slots")
        row_kernels.put(self._slots, first, ids, self._salt)
        self.count = total
        return np.arange(first, total)

    def _growing(self, total: int) -> Work[None]:
        size = len(self._slots)
        while 5 * total > 3 * size:
            size *= 2
        yield from self._filling(size)

    def _filling(self, size: int) -> Work[None]:
        slots: npt.NDArray[np.int32] = np.empty(size, np.int32)
        for begin in range(0, size, _PAGE_BYTES // slots.itemsize):
            slots[begin : begin + _PAGE_BYTES // slots.itemsize] = 0  # the first touch of its page
            yield
        for begin in range(0, self.count, _PIECE_COUNT):
            ids = self.ids[begin : begin + _PIECE_COUNT]
            row_kernels.put(slots, begin, ids, self._salt)
            yield
        self._slots = slots

    def removing(self, moves: Moves) -> Work[None]:
        """Remove rows. Nothing is to be found until it is done."""
        for of, to in moves.pieces(_PIECE_COUNT):
            self._ids[to] = self._ids[of]
            yield
        self.count = moves.left_count
        yield from self._filling(len(self._slots))


def _reserved(make: Callable[[int], MadeT], size: int, least: int) -> tuple[int, MadeT]:
    """Arrays of `size` places, or of as many as there are addresses for; MemoryError if these are
    fewer than `least`.
    """
    while True:
        try:
            return size, make(size)
        except MemoryError:  # this system counts addresses, or one array has too many
            size //= 2
            if size < least:
                raise


def _longer(array: npt.NDArray[Any], count: int, least: int) -> npt.NDArray[Any]:
    """The array with space for more: some times as long, and once it has a megabyte, in a place for
    as many as will ever come. Pages that nothing is written to take no memory.
    """
    if array.nbytes >= _FIRST_BYTES:
        size = _RESERVED_BYTES // array.itemsize
        _, longer = _reserved(lambda count: np.empty(count, array.dtype), size, least)
    else:
        longer = np.empty(max(least, _GROWTH * len(array)), array.dtype)
    longer[:count] = array[:count]
    return longer


class Moves(NamedTuple):
    """The rows that move when others are removed: from the end to where those were.

    Shapes:
        of, to: (moved rows,), ascending.
    """

    of: Numbers
    to: Numbers
    left_count: int

    @classmethod
    def where(cls, leaves: npt.NDArray[np.bool_]) -> Moves:
        """The moves when rows leave, by number."""
        left_count = len(leaves) - int(np.count_nonzero(leaves))
        return cls(
            np.flatnonzero(~leaves[left_count:]) + left_count,
            np.flatnonzero(leaves[:left_count]),
            left_count,
        )

    def pieces(self, count: int) -> Iterator[tuple[Numbers, Numbers]]:
        """At most so many at once: (of, to)."""
        for begin in range(0, len(self.of), count):
            some = slice(begin, begin + count)
            yield self.of[some], self.to[some]


class Place(NamedTuple):
    """Rows in one slab: their numbers there, and their positions among those that are asked for."""

    slab: int
    numbers: Numbers
    positions: Numbers | slice


class Column(NamedTuple):
    """The elements of a row in one array; a row takes `most_bytes` where it is copied to, if these
    are more than here.
    """

    width: int
    dtype: np.dtype[Any]
    most_bytes: int = 0

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


class RowArrays:
    """Arrays by name, a column each.

    Args:
        reserved_bytes: addresses for the widest array; as many as there are, if these are fewer.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        reserved_bytes: int = _RESERVED_BYTES,
        prefault: Prefault = no_prefault,
    ) -> None:
        self._columns = dict(columns)
        self._reserved_bytes = reserved_bytes
        self._prefault = prefault
        self._ahead: dict[str, Ahead] = {}  # of the last slab
        self._widest_bytes = max(column.row_bytes for column in self._columns.values())
        most_bytes = max(column.most_bytes for column in self._columns.values())
        self._copied_bytes = max(most_bytes, self._widest_bytes)
        self._first_count = max(64, _FIRST_BYTES // self._widest_bytes)
        self._begins = np.zeros(0, np.int64)  # the first row of each slab
        self._slabs: dict[str, list[Rows]] = {name: [] for name in self._columns}
        self.capacity = 0  # the rows that have a place
        self.row_bytes = sum(column.row_bytes for column in self._columns.values())

    @property
    def names(self) -> Iterable[str]:
        return self._columns

    def empty(self) -> RowArrays:
        """Arrays of the same columns, without rows."""
        return RowArrays(self._columns, self._reserved_bytes, self._prefault)

    @property
    def piece_count(self) -> int:
        """Rows that are copied in one turn of the loop."""
        return max(1, _COPIED_BYTES // self._copied_bytes)

    def has_space(self, count: int) -> bool:
        """True if so many rows need no larger arrays, or small ones."""
        return count <= max(self.capacity, self._first_count)

    def extend(self, count: int) -> None:
        """`extending`, at once."""
        at_once(self.extending(count))

    def extending(self, count: int) -> Work[None]:
        """Have places for `count` rows in all, of unspecified content; MemoryError if there are no
        addresses left for them.
        """
        while self.capacity < count:
            is_first = not self.capacity and count <= self._first_count
            if is_first:
                size, arrays = self._first_count, self._new(self._first_count)
            else:
                size, arrays = self._reserved()
            if self.capacity == self._first_count < size:
                for name, array in arrays.items():
                    array[: self.capacity] = self._slabs[name][-1]
                    yield
                for slabs in self._slabs.values():
                    slabs.pop()
                self._begins, self.capacity = self._begins[:0], 0
            self._begins = np.append(self._begins, self.capacity)
            self.capacity += size
            for name, array in arrays.items():
                self._slabs[name].append(array)
                self._ahead[name] = Ahead(array, self._prefault)
        for name, ahead in self._ahead.items():
            ahead.use((count - int(self._begins[-1])) * self._columns[name].row_bytes)

    def _new(self, count: int) -> dict[str, Rows]:
        return {n: np.empty((count, each.width), each.dtype) for n, each in self._columns.items()}

    def _reserved(self) -> tuple[int, dict[str, Rows]]:
        """Arrays in reserved addresses, and the number of their rows."""
        size = self._reserved_bytes // self._widest_bytes
        return _reserved(self._new, size, self._first_count)

    def places(self, numbers: Numbers) -> list[Place]:
        """The places of rows, slab by slab."""
        if len(self._begins) == 1:
            return [Place(0, numbers, slice(None))]
        slabs = np.searchsorted(self._begins, numbers, side="right") - 1
        found = []
        for slab, begin in enumerate(self._begins.tolist()):
            positions = np.flatnonzero(slabs == slab)
            if len(positions):
                found.append(Place(slab, numbers[positions] - begin, positions))
        return found

    def get(self, name: str, places: Sequence[Place], count: int, out: Rows | None = None) -> Rows:
        """A copy of these `count` rows, in `out`. Shapes: (rows, width)."""
        column = self._columns[name]
        found = np.empty((count, column.width), column.dtype) if out is None else out
        for slab, numbers, positions in places:
            rows = self._slabs[name][slab]
            if isinstance(positions, slice):
                rows.take(numbers, axis=0, out=found, mode="clip")  # else `out` is buffered
            else:
                found[positions] = rows[numbers]
        return found

    def put(self, name: str, places: Sequence[Place], rows: Rows) -> None:
        """Write these rows, each once. Shapes: (rows, width)."""
        for slab, numbers, positions in places:
            self._slabs[name][slab][numbers] = rows[positions]

    def add(self, name: str, places: Sequence[Place], rows: Rows) -> None:
        """Add to these rows, each once. Shapes: (rows, width)."""
        for slab, numbers, positions in places:
            own = torch.from_numpy(self._slabs[name][slab])
            terms = torch.from_numpy(rows[positions])
            own.index_add_(0, torch.from_numpy(numbers), terms)  # in half the time of numpy's


class RowPartition:
    """The rows of one partition: numbers by id, arrays by number, and the updates so far.

    Attributes:
        snapshot: keeps rows that are about to change, if the partition was captured.
    """

    def __init__(
        self, salt: np.uint64, columns: Mapping[str, Column], prefault: Prefault = no_prefault
    ) -> None:
        self.index = RowIndex(salt, prefault)
        self.arrays = RowArrays(columns, prefault=prefault)
        self.version = 0
        self.snapshot: RowSnapshot | None = None

    @property
    def byte_count(self) -> int:
        return self.index.byte_count + self.index.count * self.arrays.row_bytes

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
                snapshot.keep(changed[begin : begin + arrays.piece_count])
                yield
        for of, to in moves.pieces(arrays.piece_count):
            places, own_places = arrays.places(of), arrays.places(to)
            for name in arrays.names:
                arrays.put(name, own_places, arrays.get(name, places, len(of)))
            yield
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
        """Copy those of these rows, each once, that are about to change for the first time."""
        rows = numbers[(numbers >= self._given_count) & (numbers < self.count)]
        rows = rows[self._places[rows] == 0]
        if not len(rows):
            return
        arrays, count = self._partition.arrays, self._kept_count + len(rows)
        self._kept.extend(count)
        own = np.arange(self._kept_count, count)
        self._places[rows] = own + 1
        places, own_places = arrays.places(rows), self._kept.places(own)
        for name in arrays.names:
            self._kept.put(name, own_places, arrays.get(name, places, len(rows)))
        self._kept_count = count

    def keep_ids(self) -> None:
        """Copy the ids: rows are about to be removed."""
        if self._ids is None:
            self._ids = self._partition.index.ids[: self.count].copy()

    def next(self) -> SnapshotPiece:
        """The next rows, copied; none if there were none. After the last the snapshot ends."""
        arrays, begin = self._partition.arrays, self._given_count
        end = min(begin + arrays.piece_count, self.count)
        places = arrays.places(np.arange(begin, end)) if end > begin else []
        changed = np.flatnonzero(self._places[begin:end])
        kept = self._kept.places(self._places[begin:end][changed].astype(np.int64) - 1)
        found = {}
        for name in arrays.names:
            found[name] = arrays.get(name, places, end - begin)
            if len(changed):
                found[name][changed] = self._kept.get(name, kept, len(changed))
        self._given_count, self._is_begun = end, True
        if self.is_done:
            self.end()
        ids = self._partition.index.ids if self._ids is None else self._ids
        return SnapshotPiece(begin, ids[begin:end], found)

    def end(self) -> None:
        """Keep rows no more. Idempotent."""
        if self._partition.snapshot is self:
            self._partition.snapshot = None
