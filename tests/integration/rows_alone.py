"""A table of rows on one server that never fails: what every cluster's rows have to be, bit by bit.

The store is the servers' own. What it does is held against dictionaries in
`tests/property/test_row_store.py`; here others have to do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import ps_worker as ps
from ps_core.keys import TableId
from ps_core.rows import partition_of
from ps_core.sliced_work import at_once
from ps_core.tables.elements import Codec
from ps_core.tables.table import Table
from ps_server.values.row_store import RowStore
from ps_server.values.update_arithmetic import Terms
from ps_worker.embedding.rows import cut_ids, payloads_of, rows_of

Rows = npt.NDArray[Any]


class RowsAlone:
    """The rows of a table of float32 under BSP."""

    def __init__(self, table: ps.TableHandle) -> None:
        self._rows = rows_of(table.table)
        own = Table(TableId(0), 0, table.table.spec)
        self.store = RowStore(own, range(self._rows.partition_count))
        self._clock = 0

    def step(self, pushes: Sequence[tuple[Rows, Rows]]) -> None:
        """One step of each worker: its ids and their gradients."""
        self._clock += 1
        for ids, gradients in pushes:
            batch = cut_ids(ids.astype(np.uint64), self._rows)
            for block, payload in payloads_of(self.store.table, batch, gradients):
                part = self.store.decode(block, Codec.FP32, payload, b"")
                self.store.accumulate(self._clock, [(block, part)], 1.0)
        sums = self.store.take(self._clock)
        at_once(self.store.applying(sums, Terms(self._clock, (), len(pushes))))

    def pull(self, ids: Rows) -> Rows:
        """The rows of these ids."""
        unsigned = ids.astype(np.uint64)
        found = [
            self.store.rows(partition_of(int(row_id), self._rows), unsigned[at : at + 1])
            for at, row_id in enumerate(unsigned)
        ]
        return np.concatenate(found)
