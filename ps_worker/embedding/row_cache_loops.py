"""The work of `row_cache_passes`, described there, as loops that numba compiles. Only `row_cache`
imports this, when a cache comes: numba takes a second to load.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint64

from ps_core.compiled_loops import compiled, mixed, to_read, to_write
from ps_worker.embedding.row_cache_passes import CLOCK, ID, SALT, USE

_GROUP_COUNT = 32
"""Ids whose sets, and then rows, the processor is told of before it looks at the first: so memory
is waited for twice a group."""

_LINE_BYTES = 64

_SALT = uint64(int(SALT))
_HALF, _LOWER = uint64(32), uint64(0xFFFFFFFF)

_IDS = "Array(uint64, 1, 'C', readonly=True)"
_SETS, _ROWS = "int64[:,:,::1]", "uint8[:,::1]"


@compiled(f"int64(uint64, {_SETS})")
def _set_of(row_id: Any, sets: Any) -> Any:
    return np.int64(((mixed(row_id ^ _SALT) & _LOWER) * uint64(sets.shape[0])) >> _HALF)


@compiled(f"void({_IDS}, {_SETS}, int64, int64, int64[::1])")
def _find(ids: Any, sets: Any, begin: Any, end: Any, found: Any) -> None:
    """The place of each id of a group, or -1 - the first of its set."""
    way_count = sets.shape[2]
    for at in range(begin, end):
        number = _set_of(ids[at], sets)
        found[at] = number
        for kind in (ID, CLOCK, USE):
            to_write(sets, number, kind, 0)
    for at in range(begin, end):
        number = found[at]
        found[at] = -1 - number * way_count
        for way in range(way_count):
            if uint64(sets[number, ID, way]) == ids[at] and sets[number, CLOCK, way] >= 0:
                found[at] = number * way_count + way
                break


@compiled(f"void({_IDS}, {_SETS}, {_ROWS}, UniTuple(int64, 2), {_ROWS}, int64[::1])")
def get(ids: Any, sets: Any, rows: Any, since_and_use: Any, out: Any, found: Any) -> None:
    since, use = since_and_use
    way_count, length = sets.shape[2], rows.shape[1]
    for begin in range(0, len(ids), _GROUP_COUNT):
        end = min(begin + _GROUP_COUNT, len(ids))
        _find(ids, sets, begin, end, found)
        for at in range(begin, end):
            if found[at] >= 0:
                for byte in range(0, length, _LINE_BYTES):
                    to_read(rows, found[at], byte)
        for at in range(begin, end):
            place = found[at]
            found[at] = -1
            if place < 0:
                continue
            number, way = place // way_count, place % way_count
            if sets[number, CLOCK, way] >= since:
                found[at] = sets[number, CLOCK, way]
                sets[number, USE, way] = use
                for element in range(length):
                    out[at, element] = rows[place, element]


@compiled(f"void({_IDS}, {_SETS}, {_ROWS}, Array(uint8, 2, 'C', readonly=True), int64, int64)")
def put(ids: Any, sets: Any, rows: Any, given: Any, clock: Any, use: Any) -> None:
    way_count, length, nowhere = sets.shape[2], rows.shape[1], rows.shape[0]
    targets = np.empty(len(ids), np.int64)
    for begin in range(0, len(ids), _GROUP_COUNT):
        end = min(begin + _GROUP_COUNT, len(ids))
        _find(ids, sets, begin, end, targets)
        for at in range(begin, end):
            place = targets[at]
            if place >= 0:
                number, way = place // way_count, place % way_count
                if sets[number, CLOCK, way] > clock:
                    targets[at] = nowhere
                else:
                    sets[number, USE, way] = use
    for at in range(len(ids)):
        if targets[at] < 0:
            number, victim = (-1 - targets[at]) // way_count, 0
            for way in range(1, way_count):
                if sets[number, USE, way] < sets[number, USE, victim]:
                    victim = way
            if sets[number, USE, victim] == use:
                targets[at] = nowhere
                continue
            targets[at] = number * way_count + victim
            sets[number, ID, victim] = np.int64(ids[at])
            sets[number, USE, victim] = use
    for begin in range(0, len(ids), _GROUP_COUNT):
        end = min(begin + _GROUP_COUNT, len(ids))
        for at in range(begin, end):
            if targets[at] < nowhere:
                for byte in range(0, length, _LINE_BYTES):
                    to_write(rows, targets[at], byte)
        for at in range(begin, end):
            place = targets[at]
            if place < nowhere:
                sets[place // way_count, CLOCK, place % way_count] = clock
                for element in range(length):
                    rows[place, element] = given[at, element]
