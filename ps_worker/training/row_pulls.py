"""Pulls of the rows of batches, through the cache of rows that an Embedding may have.

    start --rows of the cache--> RowPull --the others, from the servers--> finish --> cache

Rules:
    - A pull takes from the cache what the step that it is for may compute with
      (`row_cache.oldest_clock`), and asks the servers for nothing else. `renew` asks for what has
      become too old, where that step came later.
    - A row has the clock that its pull was for, whenever the answer came.
    - Rows that a caller has are its own: nothing writes to them any more.

Thread-safe.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ps_worker.embedding.row_cache import RowCache, oldest_clock
from ps_worker.embedding.rows import RowBatch
from ps_worker.transport.metrics import MEASURES

if TYPE_CHECKING:
    from ps_worker.client.client import Client
    from ps_worker.steps.steps import PullTicket, TableHandle


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Rows on their way. Shapes: which (n,), their places among the batch's ids; None: all."""

    which: npt.NDArray[np.int64] | None
    clock: int
    ticket: PullTicket[npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class RowPull:
    """The rows of a batch: those of the cache, with the clock of each, and the others' pulls.

    Shapes:
        rows: (n, length), in the order of `batch.ids`.
        clocks: (n,), -1 for a row that the cache did not have.
    """

    batch: RowBatch
    rows: npt.NDArray[Any]
    clocks: npt.NDArray[np.int64]
    parts: list[_Part] = field(default_factory=list)

    def cancel(self) -> None:
        """Want the rows no more."""
        for part in self.parts:
            part.ticket.future.cancel()


_NO_ROWS: npt.NDArray[Any] = np.empty((0, 0))
_NO_CLOCKS: npt.NDArray[np.int64] = np.empty(0, np.int64)


class RowPulls:
    """The pulls of one Embedding.

    Attributes:
        hit_count, miss_count: distinct rows that pulls took from the cache, and did not; 0 without
            a cache.

    Args:
        cache: None: every row comes from the servers.
        step_count: a row of the cache is at most so many clocks old, where the setting allows any.
    """

    def __init__(
        self, client: Client, table: TableHandle, cache: RowCache | None, step_count: int
    ) -> None:
        self.hit_count = self.miss_count = 0
        self._client = client
        self._table = table
        self._cache = cache
        self._step_count = step_count
        self._lock = threading.Lock()

    @property
    def cache_words(self) -> str:
        """The cache's settings, behind a comma; empty without one."""
        if self._cache is None:
            return ""
        return f", cache_rows={self._cache.row_count}, cache_steps={self._step_count}"

    def start(self, batch: RowBatch, clock: int, *, step_clock: int | None = None) -> RowPull:
        """Begin to pull the rows of a batch as of `clock`, for the step after `step_clock`, which
        is `clock` unless it is given.
        """
        if self._cache is None:
            whole = _Part(
                None, clock, self._client.pulls.start_rows(self._table, batch, clock=clock)
            )
            return RowPull(batch, _NO_ROWS, _NO_CLOCKS, [whole])
        since = self._since(clock if step_clock is None else step_clock)
        rows = np.empty((len(batch.ids), self._table.element_count), self._table.dtype.value)
        with self._lock:
            clocks = self._cache.get(batch.ids, since, rows)
            missing = np.flatnonzero(clocks < 0)
            self.miss_count += len(missing)
            self.hit_count += len(clocks) - len(missing)
        MEASURES.cache_misses.inc(len(missing))
        MEASURES.cache_hits.inc(len(clocks) - len(missing))
        pull = RowPull(batch, rows, clocks)
        self._ask(pull, missing, clock)
        return pull

    def forget(self) -> None:
        """Have nothing in the cache."""
        if self._cache is not None:
            with self._lock:
                self._cache.clear()

    def renew(self, pull: RowPull, clock: int) -> None:
        """Ask for the rows of the cache that are too old for the step after `clock`."""
        if self._cache is not None:
            is_late = (pull.clocks >= 0) & (pull.clocks < self._since(clock))
            self._ask(pull, np.flatnonzero(is_late), clock)

    def finish(self, pull: RowPull) -> npt.NDArray[Any]:
        """The rows, once they are there. Shapes: (n, length), in the order of `batch.ids`.

        Blocking, errors: as `Client.pull_rows`.
        """
        rows = pull.rows
        for part in pull.parts:
            pulled = self._client.wait(part.ticket)
            if part.which is None:
                return pulled
            rows[part.which] = pulled
            if self._cache is not None:
                with self._lock:
                    self._cache.put(pull.batch.ids[part.which], pulled, part.clock)
        return rows

    def _since(self, clock: int) -> int:
        return oldest_clock(self._client.tables.newest(self._table), clock, self._step_count)

    def _ask(self, pull: RowPull, which: npt.NDArray[np.int64], clock: int) -> None:
        if len(which):
            cut = pull.batch.only(which)
            ticket = self._client.pulls.start_rows(self._table, cut, clock=clock)
            pull.parts.append(_Part(which, clock, ticket))
