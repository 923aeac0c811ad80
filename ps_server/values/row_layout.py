"""The arrays that a row of one table consists of, as they are computed with and as they are stored.

Rules:
    - The arrays that say which rows leave are in memory for all rows; the others may be on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ps_core import limits
from ps_core.errors import InvalidConfig
from ps_core.rows import Ids, first_values, mixed_ids, rounding_draws, salt_of
from ps_core.tables.table_spec import TableSpec
from ps_server.rows import row_kernels
from ps_server.rows.row_arrays import Column, Place, RowArrays, Rows
from ps_server.rows.row_file import RowFile
from ps_server.rows.row_kernels import Numbers
from ps_server.rows.row_memory import INDEX_BYTES, RowMemory
from ps_server.rows.row_optimizers import RowOptimizer
from ps_server.rows.row_retention import TALLY, RowRetention
from ps_server.rows.row_storage import row_storage
from ps_server.rows.tiered_arrays import TieredArrays, kept_bytes, record_bytes
from ps_server.values.row_gradients import RowGradients
from ps_server.values.store_copy import VALUES


class RowLayout:
    """The arrays of a table's rows.

    Attributes:
        columns: the arrays as they are computed with, and as copies and checkpoints have them.
        storage: of the values.
        work_bytes: of a row, as the bounds of a turn count them.
        copy_bytes: of a row with its id in a checkpoint.

    Raises:
        InvalidConfig: the table is not one of rows.
    """

    def __init__(self, spec: TableSpec) -> None:
        rows = spec.rows
        if rows is None:
            raise InvalidConfig(f"table '{spec.name}' is not one of rows")
        self.rows = rows
        self._length = spec.element_count
        self._dtype: np.dtype[Any] = np.dtype(spec.dtype.value)
        self._salt = salt_of(rows.seed)
        self._initializer = spec.initializer
        self._hyperparameters = spec.optimizer.merged(())
        self.optimizer = RowOptimizer(spec.optimizer, self._length)
        self.retention = RowRetention(rows, self._salt)
        self.storage = row_storage(rows.storage, self._length, self._dtype)
        widths = {VALUES: self._length, **self.optimizer.widths}
        self.columns = {name: Column(width, self._dtype) for name, width in widths.items()}
        self.columns |= {name: Column(1, TALLY) for name in self.retention.names}
        self._stored = {**self.columns, VALUES: self.storage.column}
        own_bytes = sum(column.row_bytes for column in self.columns.values())
        self.copy_bytes = limits.ROW_ID_BYTES + own_bytes
        self.work_bytes = self._length * self._dtype.itemsize
        if self.storage.is_packed:
            self.work_bytes *= 2  # packing takes as long as the optimizer

    def load(self) -> None:
        """Load the compiled loops that these rows need, which takes a second, and some more if
        they were never compiled here. Any thread; who needs them first would do it otherwise.
        """
        none = {name: np.empty((0, each.width), each.dtype) for name, each in self.columns.items()}
        row_kernels.load()
        self._step(none, np.empty(0, np.int64), none[VALUES].copy(), dict(self._hyperparameters))

    def made_bytes(self, memory: RowMemory) -> int:
        """The most memory that a new row needs at once."""
        if memory.tier is not None:
            return kept_bytes(self._stored, self.retention.names) + INDEX_BYTES
        return sum(column.row_bytes for column in self._stored.values()) + INDEX_BYTES

    def file(self, memory: RowMemory) -> RowFile | None:
        """A file for rows that find no memory, if there is a disk for them."""
        tier, size = memory.tier, record_bytes(self._stored, self.retention.names)
        return None if tier is None else tier.file(size)

    def arrays(self, memory: RowMemory, file: RowFile | None) -> RowArrays | TieredArrays:
        """The arrays of a partition, without rows."""
        if memory.tier is None or file is None:
            return RowArrays(self._stored, prefault=memory.prefault)
        return TieredArrays(self._stored, self.retention.names, file, memory.tier, memory)

    def first_values(self, ids: Ids) -> Rows:
        """The values of rows before their first update."""
        mixed = mixed_ids(ids, self._salt)
        return first_values(mixed, self._initializer, self._length, self._dtype)

    def first_arrays(self, ids: Ids) -> dict[str, Rows]:
        """Everything of rows before their first update."""
        return {
            VALUES: self.first_values(ids),
            **self.optimizer.first_state(len(ids), self._dtype),
            **{name: np.zeros((len(ids), 1), TALLY) for name in self.retention.names},
        }

    def as_stored(self, arrays: Mapping[str, Rows]) -> dict[str, Rows]:
        return {**arrays, VALUES: self.storage.packed(arrays[VALUES])}

    def update(
        self,
        arrays: RowArrays | TieredArrays,
        places: Sequence[Place],
        gradients: RowGradients,
        hyperparameters: Mapping[str, float],
        version: int,
    ) -> None:
        """Update rows where they lie, by these gradients; `version` is the partition's now."""
        names, ids = self.optimizer.arrays, gradients.ids
        if not self.storage.is_packed:
            arrays.change(places, len(ids))
            for slab, numbers, positions in places:
                some = gradients.values[positions]
                self._step(arrays.slab(names, slab), numbers, some, hyperparameters)
            return
        taken = {name: arrays.get(name, places, len(ids)) for name in names}
        taken[VALUES] = self.storage.unpacked(taken[VALUES])
        self._step(taken, np.arange(len(ids)), gradients.values, hyperparameters)
        draws = rounding_draws(mixed_ids(ids, self._salt), version, self._length)
        taken[VALUES] = self.storage.packed(taken[VALUES], draws)
        for name, rows in taken.items():
            arrays.put(name, places, rows)

    def _step(
        self,
        arrays: Mapping[str, Rows],
        numbers: Numbers,
        gradients: Rows,
        hyperparameters: Mapping[str, float],
    ) -> None:
        loops = row_kernels.step_loops()
        self.optimizer.step(arrays, numbers, gradients, hyperparameters, loops)
