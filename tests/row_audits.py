"""Rows of a store, as a pull has them; and checks of all: who has which, and where its record is
(TA-1, TA-2, RS-4).
"""

from __future__ import annotations

import numpy as np

from ps_server.rows.row_kernels import Numbers
from ps_server.rows.tiered_arrays import _OWNER, _POSITION, _WRITING, TieredArrays
from ps_server.values.row_store import RowStore


def read_rows(store: RowStore, block: int, ids: bytes) -> memoryview:
    """The rows of these ids, in this order, as a payload."""
    memory = np.empty(store.rows_byte_count(block, ids), np.uint8)
    store.read_rows_into(memory, block, ids)
    return memory.data


def audit(arrays: TieredArrays) -> Numbers:
    """Check all rows and frames (TA-1, TA-2); returns the positions of the records."""
    at = arrays._at(np.arange(arrays._count))
    frames = np.arange(arrays._frame_count)
    owners, positions = (arrays._get_frames(name, frames) for name in (_OWNER, _POSITION))
    resident, cold = np.flatnonzero(at >= 0), np.flatnonzero(at < 0)
    used = np.flatnonzero(owners >= 0)
    free = np.concatenate([np.empty(0, np.int64), *arrays._free])
    assert (owners[at[resident]] == resident).all()
    assert len(used) == len(resident) == arrays._resident_count
    assert len(free) == arrays._free_count == arrays._frame_count - len(used)
    assert len(np.unique(free)) == len(free)
    assert not (owners[free] >= 0).any()
    assert not (positions[free] >= 0).any()
    written = np.concatenate([np.empty(0, np.int64), *(each.frames for each in arrays._writes)])
    marked = np.flatnonzero(arrays._get_frames(_WRITING, frames))
    assert np.array_equal(np.sort(written), marked)
    return np.concatenate((positions[positions >= 0], -1 - at[cold]))


def audit_store(store: RowStore) -> None:
    """Check a store: each position in use has the record of one row (RS-4)."""
    arrays = [each.arrays for each in store._partitions.values()]
    found = [audit(each) for each in arrays if isinstance(each, TieredArrays)]
    records = np.concatenate([np.empty(0, np.int64), *found])
    used_count = 0 if store._file is None else store._file.positions.used_count
    assert len(np.unique(records)) == len(records) == used_count
