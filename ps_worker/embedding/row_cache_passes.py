"""Finding and replacing rows of a cache, as passes of numpy.

Shapes:
    ids: (n,), distinct.
    sets: (sets, 3, places of a set), int64: of each place the ID of its row, as bits; the CLOCK at
        which that was pulled, -1 for an empty place; and the number of its last USE.
    rows: (places, bytes of a row), set by set; `out` and `given`: (n, bytes of a row).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ps_core.rows import Ids, mixed_ids, salt_of

Numbers = npt.NDArray[np.int64]
Raw = npt.NDArray[np.uint8]

ID, CLOCK, USE = 0, 1, 2

SALT = salt_of(0x5E75)
"""Sets are independent of partitions, which are functions of the id, too."""

_HALF, _LOWER = np.uint64(32), np.uint64(0xFFFFFFFF)
_NOWHERE, _NEWER = -1, -2


def sets_of(ids: Ids, set_count: int) -> Numbers:
    """The set of each id."""
    spread = (mixed_ids(ids, SALT) & _LOWER) * np.uint64(set_count)
    return (spread >> _HALF).astype(np.int64)


def get(
    ids: Ids, sets: Numbers, rows: Raw, since_and_use: tuple[int, int], out: Raw, found: Numbers
) -> None:
    """Copy rows that were pulled at the clock `since` or later to `out`, and their clocks to
    `found`; -1 for others, of which `out` has something else.
    """
    since, use = since_and_use
    which, at, ways = _find(ids, sets)
    clocks = sets[at, CLOCK, ways]
    is_new = clocks >= since
    which, at, ways = which[is_new], at[is_new], ways[is_new]
    found[:] = -1
    found[which] = clocks[is_new]
    sets[at, USE, ways] = use
    if len(which):  # one pass for all, which copies some row where there is none
        places = np.full(len(ids), at[0] * sets.shape[2] + ways[0])
        places[which] = at * sets.shape[2] + ways
        rows.take(places, axis=0, out=out, mode="clip")  # else `out` is buffered


def put(ids: Ids, sets: Numbers, rows: Raw, given: Raw, clock: int, use: int) -> None:
    """Keep rows that were pulled at a clock; `use` is the number of this one. First those that are
    there, then the others, in their order.
    """
    targets = np.full(len(ids), _NOWHERE, np.int64)
    which, at, ways = _find(ids, sets)
    is_newer = sets[at, CLOCK, ways] > clock
    targets[which] = np.where(is_newer, _NEWER, at * sets.shape[2] + ways)
    sets[at[~is_newer], USE, ways[~is_newer]] = use
    new = np.flatnonzero(targets == _NOWHERE)
    while len(new):
        new = _replace(ids, new, sets, use, targets)
    kept = np.flatnonzero(targets >= 0)
    targets = targets[kept]
    rows[targets] = given if len(kept) == len(ids) else given[kept]
    sets[targets // sets.shape[2], CLOCK, targets % sets.shape[2]] = clock


def _find(ids: Ids, sets: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Which of the ids are there, in which set, and at which of its places."""
    numbers, way_count = sets_of(ids, len(sets)), sets.shape[2]
    at = np.flatnonzero(sets[numbers, ID] == ids.view(np.int64)[:, None])
    which, ways = at // way_count, at % way_count
    numbers = numbers[which]
    is_taken = sets[numbers, CLOCK, ways] >= 0  # empty places have the id 0
    return which[is_taken], numbers[is_taken], ways[is_taken]


def _replace(ids: Ids, new: Numbers, sets: Numbers, use: int, targets: Numbers) -> Numbers:
    """Give the first of the new ids of each set the place whose last use was the longest ago,
    unless all are of this use. Returns the others. Shapes: `new` is of positions in `ids`, as
    `targets`.
    """
    numbers = sets_of(ids[new], len(sets))
    _, firsts = np.unique(numbers, return_index=True)
    is_first = np.zeros(len(new), bool)
    is_first[firsts] = True
    chosen, numbers = new[is_first], numbers[is_first]
    ways = sets[numbers, USE].argmin(axis=1)
    is_free = sets[numbers, USE, ways] < use
    chosen, numbers, ways = chosen[is_free], numbers[is_free], ways[is_free]
    targets[chosen] = numbers * sets.shape[2] + ways
    sets[numbers, ID, ways] = ids[chosen].view(np.int64)
    sets[numbers, USE, ways] = use
    return new[~is_first]
