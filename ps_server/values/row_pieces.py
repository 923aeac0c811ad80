"""The rows of a partition in pieces, as copies, snapshots and checkpoints have them.

A piece has some rows, or some candidates, with all of their arrays. Those of candidates have names
of their own beside the rows'.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ps_core import limits
from ps_core.rows import Ids
from ps_core.sliced_work import Work
from ps_core.tables.elements import DType
from ps_core.tables.table_spec import RowsSpec, TableSpec
from ps_server.rows.row_arrays import Rows
from ps_server.rows.row_candidates import COLUMNS
from ps_server.rows.row_memory import INDEX_BYTES
from ps_server.rows.row_optimizers import state_widths
from ps_server.rows.row_partition import RowPartition, RowSnapshot
from ps_server.rows.row_retention import RowRetention
from ps_server.values.store_copy import CANDIDATES, IDS


def prefixed(name: str) -> str:
    """The name of an array of candidates in copies and checkpoints."""
    return f"candidate_{name}"


CANDIDATE_COLUMNS = {prefixed(name): column for name, column in COLUMNS.items()}

CANDIDATE_BYTES = sum(column.row_bytes for column in COLUMNS.values()) + INDEX_BYTES

CANDIDATE_COPY_BYTES = CANDIDATE_BYTES - INDEX_BYTES + limits.ROW_ID_BYTES
"""The bytes of a candidate with its id in a checkpoint."""


def row_tensor_dtypes(spec: TableSpec, rows: RowsSpec) -> dict[str, str]:
    """The tensors of a partition in a checkpoint beside its values, and their element types as
    safetensors names them.
    """
    retention = RowRetention(rows, np.uint64(0))
    own = "F64" if spec.dtype is DType.FLOAT64 else "F32"
    found = {IDS: "U64", **dict.fromkeys(state_widths(spec.optimizer.kind, 1), own)}
    found |= dict.fromkeys(retention.names, "U32")
    if rows.admit_after > 1:
        found |= {CANDIDATES: "U64", **dict.fromkeys(CANDIDATE_COLUMNS, "U32")}
    return found


class RowPiece(NamedTuple):
    """Some rows of a partition, or candidates, with all of their arrays."""

    ids: Ids
    arrays: dict[str, Rows]
    are_rows: bool


class PartitionSnapshot(NamedTuple):
    """A captured partition: its rows, then its candidates, if there may be any."""

    rows: RowSnapshot
    candidates: RowSnapshot | None

    @property
    def is_done(self) -> bool:
        return self.rows.is_done and (self.candidates is None or self.candidates.is_done)

    def end(self) -> None:
        """Keep rows no more. Idempotent."""
        self.rows.end()
        if self.candidates is not None:
            self.candidates.end()


def begins_of(partition: RowPartition) -> Iterator[int]:
    """The first row of each piece of a partition; it has one piece at least."""
    yield from range(0, max(1, partition.index.count), partition.arrays.piece_count)


def piece_at(partition: RowPartition, begin: int) -> Work[tuple[bytes, dict[str, Rows]]]:
    """A copy of a piece: the rows' ids, and their arrays."""
    ids = partition.index.ids[begin : begin + partition.arrays.piece_count]
    found = yield from partition.arrays.reading(np.arange(begin, begin + len(ids)))
    return ids.tobytes(), found
