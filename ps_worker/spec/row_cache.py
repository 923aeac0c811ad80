"""The rows that a worker keeps of those that it has pulled: a set-associative cache of fixed size.

An id belongs to one set, a function of the id, and lies in one of the set's few places. So finding
and replacing rows are passes over short arrays, however many rows there are.

    age of a row = the worker's clock - the clock at which it was pulled

Rules:
    - A row takes the place of the row of its set that was last found, or put, the longest ago. If a
      batch brings more new rows of a set than it has places, the others are not kept.
    - A row that is there is never replaced by what was pulled at an earlier clock.
    - A row costs its elements and BOOKKEEPING_BYTES. Memory is taken as rows come, at most that of
      all places.

Not thread-safe.

Invariants:
    CA-1  An id has one place at most.
    CA-2  There are never more rows than the cache was made for.
    CA-3  A row is found with the values and the clock with which it was put last, or not at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ps_core import limits
from ps_core.consistency import Consistency, Mode, StalePolicy
from ps_core.errors import InvalidConfig
from ps_core.rows import Ids, mixed_ids, salt_of
from ps_core.tables.elements import NATIVE_CODEC
from ps_core.tables.table import Table

WAY_COUNT = 8
"""Places of a set."""

BOOKKEEPING_BYTES = 24
"""Bytes of a row beside its elements: id, clock and last use."""

MAX_ROW_COUNT = 2**31 - 1

_SALT = salt_of(0x5E75)
"""Sets are independent of partitions, which are functions of the id, too."""

_HALF, _LOWER = np.uint64(32), np.uint64(0xFFFFFFFF)
_NEVER = -1


def sets_of(ids: Ids, set_count: int) -> npt.NDArray[np.int64]:
    """The set of each id."""
    spread = (mixed_ids(ids, _SALT) & _LOWER) * np.uint64(set_count)
    return (spread >> _HALF).astype(np.int64)


class RowCache:
    """Rows of one table by id.

    Attributes:
        row_count: the most rows: `most`, rounded down to whole sets.

    Args:
        most: rows, at least 1.
        length, dtype: of a row.
    """

    def __init__(self, most: int, length: int, dtype: npt.DTypeLike) -> None:
        self._way_count = min(WAY_COUNT, most)
        self._set_count = most // self._way_count
        self.row_count = self._set_count * self._way_count
        self._ids = np.zeros((self._set_count, self._way_count), np.uint64)
        self._clocks = np.full(self.row_count, _NEVER, np.int64)
        self._uses = np.zeros((self._set_count, self._way_count), np.int64)
        self._rows = np.empty((self.row_count, length), dtype)
        self._use = 0

    def get(self, ids: Ids, since: int, out: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The clock at which each row was pulled, or -1 for one that is not there, or was pulled
        before the clock `since`. Copies the others to `out`.

        Shapes:
            ids: (n,), distinct; out: (n, length).
        """
        places = self._places(ids)
        clocks = self._clocks[places]
        clocks[(places < 0) | (clocks < since)] = _NEVER
        found = np.flatnonzero(clocks >= 0)
        at = places[found]
        out[found] = self._rows[at]
        self._use += 1
        self._uses.reshape(-1)[at] = self._use
        return clocks

    def put(self, ids: Ids, rows: npt.NDArray[Any], clock: int) -> None:
        """Keep rows that were pulled at a clock. Shapes: (n,), distinct, and (n, length)."""
        self._use += 1
        places = self._places(ids)
        known = np.flatnonzero(places >= 0)
        self._write(places[known], known, rows, clock)
        new, places = self._victims(ids, np.flatnonzero(places < 0))
        self._ids.reshape(-1)[places] = ids[new]
        self._clocks[places] = _NEVER
        self._write(places, new, rows, clock)

    def _write(
        self,
        places: npt.NDArray[np.int64],
        which: npt.NDArray[np.int64],
        rows: npt.NDArray[Any],
        clock: int,
    ) -> None:
        """Write some of the rows to their places, unless newer ones are there."""
        is_newer = self._clocks[places] <= clock
        places, which = places[is_newer], which[is_newer]
        self._rows[places] = rows[which]
        self._clocks[places] = clock
        self._uses.reshape(-1)[places] = self._use

    def _places(self, ids: Ids) -> npt.NDArray[np.int64]:
        """The place of each id, -1 without one."""
        sets = sets_of(ids, self._set_count)
        is_here = self._ids[sets] == ids[:, None]
        # Empty places have the id 0, and lie behind those that were filled.
        places = sets * self._way_count + is_here.argmax(axis=1)
        is_there = is_here.any(axis=1) & (self._clocks[places] >= 0)
        return np.where(is_there, places, -1)

    def _victims(
        self, ids: Ids, new: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The new ids that are kept, and the places that they take: in each set those whose last
        use was the longest ago. Shapes: `new` is of positions in `ids`, as the first result.
        """
        sets = sets_of(ids[new], self._set_count)
        order = np.argsort(sets, kind="stable")
        new, sets = new[order], sets[order]
        touched, begins, counts = np.unique(sets, return_index=True, return_counts=True)
        number = np.arange(len(sets)) - np.repeat(begins, counts)  # within its set
        ways = np.argsort(self._uses[touched], axis=1, kind="stable")
        is_kept = number < self._way_count
        group = np.repeat(np.arange(len(touched)), counts)[is_kept]
        places = sets[is_kept] * self._way_count + ways[group, number[is_kept]]
        return new[is_kept], places


def cached_row_bytes(table: Table) -> int:
    """The memory that a cached row takes."""
    element_bytes = NATIVE_CODEC[table.spec.dtype].element_bytes
    return table.spec.element_count * element_bytes + BOOKKEEPING_BYTES


def check_cache(name: str, row_count: object, step_count: object, setting: Consistency) -> None:
    """Raise InvalidConfig for a cache that a table may not have under this setting."""
    for option, given, most in (
        ("cache_rows", row_count, MAX_ROW_COUNT),
        ("cache_steps", step_count, limits.MAX_STALENESS),
    ):
        if not isinstance(given, int) or not 0 <= given <= most:
            raise InvalidConfig(f"{option} is {given!r}; expected a whole number from 0 to {most}")
    if step_count and not row_count:
        raise InvalidConfig(
            f"cache_steps is {step_count} without a cache; expected cache_rows, too"
        )
    if row_count and setting.policy is not StalePolicy.ACCEPT:
        raise InvalidConfig(
            f"cache_rows is {row_count}, and table '{name}' would be under {setting}: servers "
            "judge a step by when its rows were pulled; expected ASP without a policy, or no cache"
        )
    if step_count and setting.mode is not Mode.ASP:
        raise InvalidConfig(
            f"cache_steps is {step_count}, and table '{name}' would be under {setting}, which "
            "promises rows with all own steps in them; expected 0, or consistency='asp'"
        )


def may_lag(table: Table, clock: int) -> bool:
    """True if the step after `clock` may compute with rows of earlier clocks: under ASP without a
    policy for stale steps, unless a change of the setting is proposed, or in effect later only.

    Args:
        table: as in the newest view.
    """
    setting = table.consistency
    return (
        setting.mode is Mode.ASP
        and setting.policy is StalePolicy.ACCEPT
        and not _is_changing(table, clock)
    )


def oldest_clock(table: Table, clock: int, step_count: int) -> int:
    """The earliest clock of which the step after `clock` may take rows from a cache, under ASP at
    most `step_count` back. `clock` + 1, of which there are none, while the setting changes, and
    under a policy for stale steps: servers judge these by the last pull of a partition.
    """
    if may_lag(table, clock):
        return max(0, clock - step_count)
    is_judged = table.consistency.policy is not StalePolicy.ACCEPT
    return clock + 1 if is_judged or _is_changing(table, clock) else clock


def _is_changing(table: Table, clock: int) -> bool:
    change, proposed = table.change, table.proposed
    if change is not None and change.after_clock > clock:
        return True
    return proposed is not None and not proposed.checkpoint and proposed.join is None
