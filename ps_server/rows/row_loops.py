"""The loops of `row_kernels`, compiled by numba. Only that module imports this one, when a table
of rows comes: numba takes a second to load.

The compiled code is kept beside this file, or in the user's cache directory, if either can be
written; compiling takes some seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import int64, njit, uint64

from ps_core.rows import GOLDEN, MIX_FACTORS, MIX_SHIFTS
from ps_server.rows.prefetching import to_read

_AHEAD_COUNT = 32
"""Elements after which one is used that the processor was told of."""

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
    mask, count = uint64(len(slots)) - _ONE, len(ids)
    places = np.empty(count, np.uint64)
    for at in range(count):
        places[at] = _mixed(ids[at] ^ salt) & mask
    for at in range(count):
        if at + _AHEAD_COUNT < count:
            to_read(slots, int64(places[at + _AHEAD_COUNT]))
        found[at] = slots[places[at]]
    for at in range(count):
        if at + _AHEAD_COUNT < count:
            to_read(known, max(found[at + _AHEAD_COUNT] - 1, 0))
        number, place = found[at], places[at]
        while number != 0 and known[uint64(number - 1)] != ids[at]:
            place = (place + _ONE) & mask
            number = int64(slots[place])
        found[at] = number - 1


_TAKE = "void({0}[:, ::1], int64[::1], {0}[:, ::1])"


@_compiled(_TAKE.format("float32"), _TAKE.format("float64"))
def take(rows: Any, numbers: Any, out: Any) -> None:
    count, width = len(numbers), rows.shape[1]
    line = 64 // rows.itemsize
    for at in range(count):
        if at + _AHEAD_COUNT < count:
            ahead = numbers[at + _AHEAD_COUNT]
            for j in range(0, width, line):
                to_read(rows, ahead, j)
        row, own = rows[numbers[at]], out[at]
        for j in range(width):
            own[j] = row[j]


@_compiled("void(int32[::1], int64, Array(uint64, 1, 'C', readonly=True), uint64)")
def put(slots: Any, first: Any, ids: Any, salt: Any) -> None:
    mask = uint64(len(slots)) - _ONE
    for at in range(len(ids)):
        place = _mixed(ids[at] ^ salt) & mask
        while slots[place] != 0:
            place = (place + _ONE) & mask
        slots[place] = first + at + 1
