"""The loops of `row_kernels`, compiled by numba. Only that module imports this one, when a table
of rows comes: numba takes a second to load.

The compiled code is kept beside this file, or in the user's cache directory, if either can be
written; compiling takes some seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, uint64

from ps_core.rows import GOLDEN, MIX_FACTORS, MIX_SHIFTS

_GROUP_COUNT = 32

_SHIFT_1, _SHIFT_2, _SHIFT_3 = (uint64(int(shift)) for shift in MIX_SHIFTS)
_FACTOR_1, _FACTOR_2 = (uint64(int(factor)) for factor in MIX_FACTORS)
_GOLDEN = uint64(GOLDEN)
_ONE, _HALF = uint64(1), uint64(32)


def _compiled(*signatures: str) -> Callable[[Any], Any]:
    """Compile a function for these signatures when it is defined; `cache` where a file can be."""

    def compiled(function: Any) -> Any:
        try:
            return njit(list(signatures), nogil=True, cache=True)(function)
        except RuntimeError:  # no directory can be written
            return njit(list(signatures), nogil=True)(function)

    return compiled


@_compiled("uint64(uint64)")
def _mixed(value: Any) -> Any:
    """As `ps_core.rows.splitmix64`."""
    value += _GOLDEN
    value = (value ^ (value >> _SHIFT_1)) * _FACTOR_1
    value = (value ^ (value >> _SHIFT_2)) * _FACTOR_2
    return value ^ (value >> _SHIFT_3)


@_compiled("int64(Array(uint64, 1, 'C', readonly=True), uint64, uint64, int64)")
def elsewhere(ids: Any, salt: Any, partition_count: Any, partition: Any) -> int:
    for at in range(len(ids)):
        if ((_mixed(ids[at] ^ salt) >> _HALF) * partition_count) >> _HALF != partition:
            return at
    return -1


@_compiled(
    "void(Array(int32, 1, 'C', readonly=True), Array(uint64, 1, 'C', readonly=True),"
    " Array(uint64, 1, 'C', readonly=True), uint64, int64[::1])"
)
def find(slots: Any, known: Any, ids: Any, salt: Any, found: Any) -> None:
    mask = uint64(len(slots)) - _ONE
    places = np.empty(_GROUP_COUNT, np.uint64)
    taken = np.empty(_GROUP_COUNT, np.int64)
    there = np.empty(_GROUP_COUNT, np.uint64)
    for begin in range(0, len(ids), _GROUP_COUNT):
        count = min(_GROUP_COUNT, len(ids) - begin)
        for at in range(count):
            places[at] = _mixed(ids[begin + at] ^ salt) & mask
        for at in range(count):
            taken[at] = slots[places[at]]
        for at in range(count):
            there[at] = known[max(taken[at] - 1, 0)]
        for at in range(count):
            row_id, number = ids[begin + at], taken[at]
            if number != 0 and there[at] != row_id:
                place = (places[at] + _ONE) & mask
                number = slots[place]
                while number != 0 and known[number - 1] != row_id:
                    place = (place + _ONE) & mask
                    number = slots[place]
            found[begin + at] = number - 1


@_compiled("void(int32[::1], int64, Array(uint64, 1, 'C', readonly=True), uint64)")
def put(slots: Any, first: Any, ids: Any, salt: Any) -> None:
    mask = uint64(len(slots)) - _ONE
    for at in range(len(ids)):
        place = _mixed(ids[at] ^ salt) & mask
        while slots[place] != 0:
            place = (place + _ONE) & mask
        slots[place] = first + at + 1
