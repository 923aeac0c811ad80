"""The numbers of a partition's rows by their ids.

    slots[(mixed + probe) mod size] -> 1 + number of a row, or 0; ids[number] -> its id

Rules:
    - Numbers count the rows in the order in which they were added. A row keeps its number until
      others are removed: then the last rows take the places of these.
    - At most 3 of 5 slots are taken, so most ids are found at the first or second probe. A row
      takes 8 bytes for its id and 7 to 13 for its slot.
    - The table of slots doubles in pieces: the old one answers until the new one is whole. It is
      written through first, a page a turn, before rows come to it here and there.

Invariants:
    RI-1  A slot is free, so that a search ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ps_core.errors import check
from ps_core.rows import Ids
from ps_core.sliced_work import Work
from ps_server.rows import row_kernels
from ps_server.rows.reserved_memory import PAGE_BYTES, Ahead, Prefault, longer, no_prefault
from ps_server.rows.row_kernels import Numbers

_FIRST_SIZE = 64

_PIECE_COUNT = 16_384
"""Rows that are put into a new table of slots at once: a millisecond."""


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
            self._ids = longer(self._ids, first, total)
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
        for begin in range(0, size, PAGE_BYTES // slots.itemsize):
            slots[begin : begin + PAGE_BYTES // slots.itemsize] = 0  # the first touch of its page
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
