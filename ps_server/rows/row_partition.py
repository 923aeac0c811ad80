"""The rows of one partition: their numbers by id, and their arrays by number.

    slots[(mixed + probe) mod size] -> 1 + number of a row, or 0; ids[number] -> its id

Rules:
    - Numbers count the rows in the order in which they were added; a row keeps its number.
    - At most 3 of 5 slots are taken, so most ids are found at the first or second probe. A row
      takes 8 bytes for its id and 7 to 13 for its slot.
    - The table of slots doubles in pieces: the old one answers until the new one is whole.
    - An array begins with 1 MiB, then moves once, into a slab of many GiB, of which only pages that
      are written take memory. Rows beyond it, which few partitions have, lie in a further one.

Invariants:
    RI-1  A slot is free, so that a search ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ps_core.errors import check
from ps_core.rows import Ids
from ps_core.work import Work
from ps_server.rows import row_kernels

Rows = npt.NDArray[Any]
"""Elements of rows. Shapes: (rows, elements)."""

Numbers = npt.NDArray[np.int64]

_FIRST_BYTES = 1 << 20
_FIRST_SIZE = 64
_GROWTH = 8
_RESERVED_BYTES = 32 << 30
"""Addresses that are reserved for an array. A process has four thousand times as many."""

_PIECE_COUNT = 16_384
"""Rows that are put into a new table of slots at once: a millisecond."""


class RowIndex:
    """The numbers of the rows of one partition, whose ids are mixed with `salt`."""

    def __init__(self, salt: np.uint64) -> None:
        self._salt = salt
        self._slots: npt.NDArray[np.int32] = np.zeros(_FIRST_SIZE, np.int32)
        self._ids: Ids = np.empty(_FIRST_SIZE, np.uint64)
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
        """True if so many more rows need no larger table, or one that is made at once."""
        return 5 * (self.count + count) <= 3 * len(self._slots) or self.count <= _PIECE_COUNT

    def adding(self, ids: Ids) -> Work[Numbers]:
        """Add ids, each once and none of them known; returns their numbers."""
        first, total = self.count, self.count + len(ids)
        if 5 * total > 3 * len(self._slots):
            yield from self._growing(total)
        if total > len(self._ids):
            self._ids = _longer(self._ids, first, total)
        self._ids[first:total] = ids
        check(total < len(self._slots), "RI-1", f"{total} rows in {len(self._slots)} slots")
        row_kernels.put(self._slots, first, ids, self._salt)
        self.count = total
        return np.arange(first, total)

    def _growing(self, total: int) -> Work[None]:
        size = len(self._slots)
        while 5 * total > 3 * size:
            size *= 2
        slots: npt.NDArray[np.int32] = np.zeros(size, np.int32)  # pages that are touched later
        for begin in range(0, self.count, _PIECE_COUNT):
            ids = self.ids[begin : begin + _PIECE_COUNT]
            row_kernels.put(slots, begin, ids, self._salt)
            yield
        self._slots = slots


def _longer(array: npt.NDArray[Any], count: int, least: int) -> npt.NDArray[Any]:
    """The array with space for more, some times as long, so that it is seldom copied; pages that
    nothing is written to take no memory.
    """
    longer = np.empty(max(least, _GROWTH * len(array)), array.dtype)
    longer[:count] = array[:count]
    return longer


class Place(NamedTuple):
    """Rows in one slab: their numbers there, and their positions among those that are asked for."""

    slab: int
    numbers: Numbers
    positions: Numbers | slice


class RowArrays:
    """Arrays by name, each of `widths[name]` elements a row.

    Args:
        reserved_bytes: addresses for the widest array; as many as there are, if these are fewer.
    """

    def __init__(
        self,
        widths: Mapping[str, int],
        dtype: npt.DTypeLike,
        reserved_bytes: int = _RESERVED_BYTES,
    ) -> None:
        self._widths = dict(widths)
        self._reserved_bytes = reserved_bytes
        self._dtype = np.dtype(dtype)
        self._widest_bytes = max(self._widths.values()) * self._dtype.itemsize
        self._first_count = max(64, _FIRST_BYTES // self._widest_bytes)
        self._begins = np.zeros(0, np.int64)  # the first row of each slab
        self._slabs: dict[str, list[Rows]] = {name: [] for name in self._widths}
        self.capacity = 0  # the rows that have a place

    @property
    def row_bytes(self) -> int:
        return sum(self._widths.values()) * self._dtype.itemsize

    def extend(self, count: int) -> None:
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
                    array[: self.capacity] = self._slabs[name].pop()
                self._begins, self.capacity = self._begins[:0], 0
            self._begins = np.append(self._begins, self.capacity)
            self.capacity += size
            for name, array in arrays.items():
                self._slabs[name].append(array)

    def _new(self, count: int) -> dict[str, Rows]:
        return {n: np.empty((count, width), self._dtype) for n, width in self._widths.items()}

    def _reserved(self) -> tuple[int, dict[str, Rows]]:
        """Arrays in reserved addresses, and the number of their rows."""
        size = self._reserved_bytes // self._widest_bytes
        while True:
            try:
                return size, self._new(size)
            except MemoryError:  # this system counts addresses, or one array has too many
                size //= 2
                if size < self._first_count:
                    raise

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
        found = np.empty((count, self._widths[name]), self._dtype) if out is None else out
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

    def pieces(self, name: str, count: int) -> Iterator[Rows]:
        """Views of the first `count` rows, in order, slab by slab."""
        for begin, slab in zip(self._begins.tolist(), self._slabs[name], strict=True):
            yield slab[: max(0, count - begin)]


class RowPartition:
    """The rows of one partition: numbers by id, arrays by number, and the updates so far."""

    def __init__(self, salt: np.uint64, widths: Mapping[str, int], dtype: np.dtype[Any]) -> None:
        self.index = RowIndex(salt)
        self.arrays = RowArrays(widths, dtype)
        self.version = 0

    @property
    def byte_count(self) -> int:
        return self.index.byte_count + self.index.count * self.arrays.row_bytes

    def adding(self, ids: Ids, arrays: Mapping[str, Rows]) -> Work[Numbers]:
        """Add rows with these arrays; returns their numbers."""
        numbers = yield from self.index.adding(ids)
        self.arrays.extend(self.index.count)
        places = self.arrays.places(numbers)
        for name, rows in arrays.items():
            self.arrays.put(name, places, rows)
        return numbers
