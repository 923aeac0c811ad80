"""The loops of `row_kernels`, compiled by numba. Only that module imports this one, when a table
of rows comes: numba takes a second to load.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64, uint64

from ps_core.compiled_loops import compiled, mixed, to_read

_AHEAD_COUNT = 32
"""Elements after which one is used that the processor was told of."""

_ONE, _HALF = uint64(1), uint64(32)


@compiled("int64(Array(uint64, 1, 'C', readonly=True), uint64, uint64, int64)")
def elsewhere(ids: Any, salt: Any, partition_count: Any, partition: Any) -> int:
    for at in range(len(ids)):
        if ((mixed(ids[at] ^ salt) >> _HALF) * partition_count) >> _HALF != partition:
            return at
    return -1


@compiled(
    "void(Array(int32, 1, 'C', readonly=True), Array(uint64, 1, 'C', readonly=True),"
    " Array(uint64, 1, 'C', readonly=True), uint64, int64[::1])"
)
def find(slots: Any, known: Any, ids: Any, salt: Any, found: Any) -> None:
    mask, count = uint64(len(slots)) - _ONE, len(ids)
    places = np.empty(count, np.uint64)
    for at in range(count):
        places[at] = mixed(ids[at] ^ salt) & mask
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


@compiled(_TAKE.format("float32"), _TAKE.format("float64"))
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


@compiled("void(int32[::1], int64, Array(uint64, 1, 'C', readonly=True), uint64)")
def put(slots: Any, first: Any, ids: Any, salt: Any) -> None:
    mask = uint64(len(slots)) - _ONE
    for at in range(len(ids)):
        place = mixed(ids[at] ^ salt) & mask
        while slots[place] != 0:
            place = (place + _ONE) & mask
        slots[place] = first + at + 1
