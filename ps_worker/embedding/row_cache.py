"""The rows that a worker keeps of those that it has pulled: a set-associative cache of fixed size.

An id belongs to one set, a function of the id, and lies at one of the set's few places. So finding
and replacing rows looks at a few neighbouring places, however many rows there are: in loops that
numba compiles, where that is installed (the extra `rows`), else in passes of numpy.

    age of a row = the worker's clock - the clock at which it was pulled

Rules:
    - A row takes the place of the row of its set that was last found, or put, the longest ago. If a
      batch brings more new rows of a set than there are others in it, the rest is not kept.
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

import functools
import importlib
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_core import limits
from ps_core.consistency import Consistency, Mode, StalePolicy
from ps_core.errors import InvalidConfig
from ps_core.rows import Ids
from ps_core.tables.elements import NATIVE_CODEC
from ps_core.tables.table import Table
from ps_worker.embedding.row_cache_passes import CLOCK, Numbers

WAY_COUNT = 8
"""Places of a set."""

BOOKKEEPING_BYTES = 24
"""Bytes of a row beside its elements: id, clock and last use."""

MAX_ROW_COUNT = 2**31 - 1


@functools.cache
def _kernels() -> ModuleType:
    try:
        return importlib.import_module("ps_worker.embedding.row_cache_loops")
    except ImportError:  # numba is missing, or of no use beside this numpy
        return importlib.import_module("ps_worker.embedding.row_cache_passes")


class RowCache:
    """Rows of one table by id.

    Attributes:
        row_count: the most rows: `most`, rounded down to whole sets.

    Args:
        most: rows, at least 1.
        length, dtype: of a row.
        kernels: the module of loops or passes; None: the faster one that there is.
    """

    def __init__(
        self, most: int, length: int, dtype: npt.DTypeLike, kernels: ModuleType | None = None
    ) -> None:
        way_count = min(WAY_COUNT, most)
        self.row_count = most // way_count * way_count
        self._kernels = kernels or _kernels()
        self._sets = np.zeros((most // way_count, 3, way_count), np.int64)
        self.clear()
        self._rows = _raw(np.empty((self.row_count, length), dtype))
        self._use = 0

    def clear(self) -> None:
        """Remove all rows."""
        self._sets[:] = 0
        self._sets[:, CLOCK] = -1

    def get(self, ids: Ids, since: int, out: npt.NDArray[Any]) -> Numbers:
        """The clock at which each row was pulled, or -1 for one that is not there, or was pulled
        before the clock `since`: there `out` has something else; of the others it has the row.

        Shapes:
            ids: (n,), distinct; out: (n, length).
        """
        self._use += 1
        clocks = np.empty(len(ids), np.int64)
        terms = max(since, 0), self._use
        self._kernels.get(ids, self._sets, self._rows, terms, _raw(out), clocks)
        return clocks

    def put(self, ids: Ids, rows: npt.NDArray[Any], clock: int) -> None:
        """Keep rows that were pulled at a clock. Shapes: (n,), distinct, and (n, length)."""
        self._use += 1
        self._kernels.put(ids, self._sets, self._rows, _raw(rows), clock, self._use)


def _raw(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of each row."""
    return rows.view(np.uint8)


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
