"""Arrays of rows by their numbers, a column each, all in memory.

Rules:
    - All columns lie in slabs of as many rows: first one of a megabyte, then one of many GiB of
      addresses (`reserved_memory`). Rows beyond it, which few have, lie in a further one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ps_core.sliced_work import Waiting, Work, at_once
from ps_server.rows.reserved_memory import (
    FIRST_BYTES,
    RESERVED_BYTES,
    Ahead,
    Prefault,
    no_prefault,
    reserved,
)
from ps_server.rows.row_index import Moves
from ps_server.rows.row_kernels import Numbers


class MemoryUse(NamedTuple):
    """Memory of rows: all bytes, those of rows that could be on disk, and the rows that are."""

    byte_count: int = 0
    frame_bytes: int = 0
    disk_row_count: int = 0

    def plus(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(*map(int.__add__, self, other))


Rows = npt.NDArray[Any]
"""Elements of rows. Shapes: (rows, elements)."""

_COPIED_BYTES = 1 << 20
"""Bytes of the widest array that are copied in one turn of the loop."""


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
        reserved_bytes: int = RESERVED_BYTES,
        prefault: Prefault = no_prefault,
    ) -> None:
        self._columns = dict(columns)
        self._reserved_bytes = reserved_bytes
        self._prefault = prefault
        self._ahead: dict[str, Ahead] = {}  # of the last slab
        self._widest_bytes = max(column.row_bytes for column in self._columns.values())
        most_bytes = max(column.most_bytes for column in self._columns.values())
        self._copied_bytes = max(most_bytes, self._widest_bytes)
        self._first_count = max(64, FIRST_BYTES // self._widest_bytes)
        self._begins = np.zeros(0, np.int64)  # the first row of each slab
        self._slabs: dict[str, list[Rows]] = {name: [] for name in self._columns}
        self.capacity = 0  # the rows that have a place
        self.row_bytes = sum(column.row_bytes for column in self._columns.values())

    @property
    def names(self) -> Iterable[str]:
        return self._columns

    def memory_use(self, count: int) -> MemoryUse:
        """The memory that so many rows take."""
        return MemoryUse(count * self.row_bytes)

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

    def release(self, count: int, release: Prefault) -> None:
        """Give back the memory of rows behind the first `count`, if it is in the last slab."""
        begin = int(self._begins[-1]) if len(self._begins) else 0
        for name, ahead in self._ahead.items():
            ahead.release(max(0, count - begin) * self._columns[name].row_bytes, release)

    def _new(self, count: int) -> dict[str, Rows]:
        return {n: np.empty((count, each.width), each.dtype) for n, each in self._columns.items()}

    def _reserved(self) -> tuple[int, dict[str, Rows]]:
        """Arrays in reserved addresses, and the number of their rows."""
        size = self._reserved_bytes // self._widest_bytes
        return reserved(self._new, size, self._first_count)

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

    def kept(self, name: str, numbers: Numbers) -> Rows:
        """A copy of a column of these rows."""
        return self.get(name, self.places(numbers), len(numbers))

    def want(self, numbers: Numbers) -> list[Sequence[Waiting]]:
        """All rows are here."""
        del numbers
        return []

    def fetching(self, numbers: Numbers) -> Work[None]:
        """As `want`."""
        del numbers
        yield from ()

    def reading(self, numbers: Numbers) -> Work[dict[str, Rows]]:
        """Copies of all arrays of these rows."""
        yield from ()
        places = self.places(numbers)
        return {name: self.get(name, places, len(numbers)) for name in self._columns}

    def moving(self, moves: Moves) -> Work[None]:
        """Put rows in the places of others, which are removed."""
        for of, to in moves.pieces(self.piece_count):
            places, own_places = self.places(of), self.places(to)
            for name in self._columns:
                self.put(name, own_places, self.get(name, places, len(of)))
            yield

    def put(self, name: str, places: Sequence[Place], rows: Rows) -> None:
        """Write these rows, each once. Shapes: (rows, width)."""
        for slab, numbers, positions in places:
            self._slabs[name][slab][numbers] = rows[positions]

    def change(self, places: Sequence[Place], count: int) -> None:
        """These rows are about to change in the arrays that `slab` gives."""

    def slab(self, names: Iterable[str], number: int) -> dict[str, Rows]:
        """Arrays of a slab, as they are."""
        return {name: self._slabs[name][number] for name in names}
