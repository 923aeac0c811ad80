"""The loops of `row_kernels` as passes of numpy, for where numba is not installed: slower, and with
the same results. Arguments are as those of `row_loops`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ps_core.rows import Ids, mixed_ids, partitions_of

_Numbers = npt.NDArray[np.int64]


def elsewhere(ids: Ids, salt: np.uint64, partition_count: np.uint64, partition: int) -> int:
    places = partitions_of(mixed_ids(ids, salt), int(partition_count))
    others = np.flatnonzero(places != partition)
    return int(others[0]) if len(others) else -1


def find(
    slots: npt.NDArray[np.int32], known: Ids, ids: Ids, salt: np.uint64, found: _Numbers
) -> None:
    mask = len(slots) - 1
    at = _slots_of(ids, salt, mask)
    found[:] = slots[at]
    found -= 1
    left = np.flatnonzero((found >= 0) & (known[found] != ids))
    at = at[left]
    while len(left):
        at = (at + 1) & mask
        numbers = slots[at].astype(np.int64) - 1
        found[left] = numbers
        goes_on = (numbers >= 0) & (known[numbers] != ids[left])
        left, at = left[goes_on], at[goes_on]


def put(slots: npt.NDArray[np.int32], first: int, ids: Ids, salt: np.uint64) -> None:
    mask = len(slots) - 1
    numbers: npt.NDArray[Any] = np.arange(first + 1, first + 1 + len(ids), dtype=np.int32)
    at = _slots_of(ids, salt, mask)
    while len(numbers):  # of several that come to one slot the last gets it
        is_free = slots[at] == 0
        slots[at[is_free]] = numbers[is_free]
        has_none = slots[at] != numbers
        numbers, at = numbers[has_none], (at[has_none] + 1) & mask


def _slots_of(ids: Ids, salt: np.uint64, mask: int) -> _Numbers:
    return (mixed_ids(ids, salt) & np.uint64(mask)).astype(np.int64)
