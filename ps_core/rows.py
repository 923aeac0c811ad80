"""Rows of embedding tables: where an id lives, and what a row holds before its first update.

Both are functions of the id and the table's seed alone, in whole numbers and correctly rounded
arithmetic. So every server, replica and restart has the same, and so has a client in any language
(docs/reference/PROTOCOL.md has the vectors).

    mixed(id)      = splitmix64(id xor splitmix64(seed))
    partition(id)  = ((mixed >> 32) * partition_count) >> 32
    word(id, k)    = splitmix64(mixed + k)                  k = 1, 2, ...
    uniform        : element j is scale * (h / 2**23 - 1), h the upper 24 bits of the lower (j even)
                     or upper half (j odd) of word(id, j // 2 + 1)
    normal         : element j is scale * sqrt(3) * ((s + 2) / 2**16 - 2), s the sum of the four
                     16-bit numbers in word(id, j + 1): at most 3.5 standard deviations from 0
    draw           : of element j at update t of the partition, the 16 bits from 16 * (j mod 4) on
                     of splitmix64(splitmix64(mixed xor t) + j // 4 + 1)

Elements are computed in float64 and rounded once to the table's dtype. All sums of words are
modulo 2**64.

Invariants:
    ROW-1  A row lives in one partition, which never changes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ps_core.tables.elements import Initializer, InitializerKind
from ps_core.tables.table_spec import RowsSpec

Ids = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
MIX_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
MIX_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_HALF = np.uint64(32)
_LOWER = np.uint64(0xFFFFFFFF)
_QUARTERS = np.uint64(0x0000FFFF0000FFFF)
_FEW_COUNT = 8
"""So many rows of a key are added for all keys at once, whatever keys there are."""


def splitmix64(values: Ids) -> Ids:
    """The mixed numbers, each of its own one alone (Steele, Lea and Flood, 2014)."""
    mixed = values + np.uint64(GOLDEN)
    for shift, factor in zip(MIX_SHIFTS, MIX_FACTORS, strict=False):
        mixed ^= mixed >> shift
        mixed *= factor
    mixed ^= mixed >> MIX_SHIFTS[2]
    return mixed


def salt_of(seed: int) -> np.uint64:
    """The number that the ids of a table are mixed with."""
    return np.uint64(splitmix64(np.array([seed & _MASK], np.uint64))[0])


def mixed_ids(ids: Ids, salt: np.uint64) -> Ids:
    """The ids of a table, mixed. Shapes: as `ids`."""
    return splitmix64(ids ^ salt)


def partitions_of(mixed: Ids, partition_count: int) -> npt.NDArray[np.int64]:
    """The partition of each mixed id."""
    found = ((mixed >> _HALF) * np.uint64(partition_count)) >> _HALF
    return found.astype(np.int64)


def partition_of(row_id: int, rows: RowsSpec) -> int:
    """The partition of one id."""
    mixed = mixed_ids(np.array([row_id], np.uint64), salt_of(rows.seed))
    return int(partitions_of(mixed, rows.partition_count)[0])


class Groups(NamedTuple):
    """Positions in an array of keys, grouped by key. `some` of the groups are Groups, too.

    Shapes:
        keys, begins, counts: (groups,); the keys are distinct.
        order: (positions,). Those of a group, ascending, begin at its `begins`.
    """

    keys: npt.NDArray[Any]
    begins: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]

    @classmethod
    def of(cls, keys: npt.NDArray[Any]) -> Groups:
        """The groups of whole numbers from 0, by ascending key."""
        order = _order(keys)
        ordered = keys[order]
        is_first = np.empty(len(keys), bool)
        is_first[:1] = True
        np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
        begins = np.flatnonzero(is_first)
        return cls(ordered[begins], begins, np.diff(begins, append=len(keys)), order)

    def some(self, which: npt.NDArray[np.int64] | slice) -> Groups:
        return Groups(self.keys[which], self.begins[which], self.counts[which], self.order)

    def sums(self, rows: npt.NDArray[Any], out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """The sum of each group's rows, in the order of its positions, in `out`.
        Shapes: (positions, length) to (groups, length).
        """
        firsts = self.order[self.begins]
        if out is None:
            out = np.empty((len(firsts), rows.shape[1]), rows.dtype)
        rows.take(firsts, axis=0, out=out, mode="clip")  # else `out` is buffered
        most = int(self.counts.max(initial=1))
        few = self.few_count if most > _FEW_COUNT else most
        is_large = self.counts > few
        for number in range(1, few):  # the second row of each, the third, ...
            has_more = np.flatnonzero((self.counts > number) & ~is_large)
            out[has_more] += rows.take(self.order[self.begins[has_more] + number], axis=0)
        for group in np.flatnonzero(is_large).tolist():
            begin = int(self.begins[group])
            positions = self.order[begin : begin + int(self.counts[group])]
            out[group] = _sum(rows.take(positions, axis=0))
        return out

    @property
    def few_count(self) -> int:
        """The most rows of a key that are added for all keys at once; keys with more are added one
        by one. Either way costs microseconds a turn, so there are at most as many such keys.
        """
        large = np.sort(self.counts[self.counts > _FEW_COUNT])[::-1]
        turns = int(np.count_nonzero(large >= np.arange(1, len(large) + 1)))
        return max(_FEW_COUNT, turns)


def _sum(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The sum of rows, one added after the other: numpy adds a single column in another order."""
    is_column = rows.shape[1] == 1
    found: npt.NDArray[Any] = (
        np.add.accumulate(rows, axis=0)[-1] if is_column else np.add.reduce(rows, axis=0)
    )
    return found


def _order(keys: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Positions by ascending key, those of one key ascending."""
    bit_count = len(keys).bit_length()
    if not len(keys) or int(keys.max()) >> (64 - bit_count):
        return np.argsort(keys, kind="stable")
    pairs = keys.astype(np.uint64)  # a key and its position in one word: a third of the time
    pairs <<= np.uint64(bit_count)
    pairs |= np.arange(len(keys), dtype=np.uint64)
    pairs.sort()
    pairs &= np.uint64((1 << bit_count) - 1)
    return pairs.view(np.int64)


def sums_by_key(
    keys: npt.NDArray[Any], rows: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The distinct keys, ascending, and the sums of their rows, in the order in which they come.
    Shapes: (n,) and (n, length) to (distinct,) and (distinct, length).
    """
    groups = Groups.of(keys)
    return groups.keys, groups.sums(rows)


def first_values(
    mixed: Ids, initializer: Initializer, length: int, dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    """The values of rows before their first update. Shapes: (ids, `length`)."""
    shape = len(mixed), length
    match initializer.kind:
        case InitializerKind.UNIFORM:
            halves = _words(mixed, (length + 1) // 2).view("<u4")[:, :length]
            values = (halves >> np.uint32(8)) * (1.0 / 2**23) - 1.0
            factor = initializer.scale
        case InitializerKind.NORMAL:
            words = _words(mixed, length)
            pairs = (words & _QUARTERS) + ((words >> np.uint64(16)) & _QUARTERS)
            sums = (pairs & _LOWER) + (pairs >> _HALF)
            values = (sums + np.uint64(2)) * (1.0 / 2**16) - 2.0
            factor = initializer.scale * math.sqrt(3.0)
        case InitializerKind.CONSTANT:
            return np.full(shape, initializer.constant, dtype)
        case _:
            return np.zeros(shape, dtype)
    values *= factor
    return values.astype(dtype)


def rounding_draws(mixed: Ids, version: int, length: int) -> npt.NDArray[np.uint16]:
    """The draws with which update `version` of a partition rounds what it has changed. Shapes:
    (ids, `length`).
    """
    states = splitmix64(mixed ^ np.uint64(version))
    return _words(states, (length + 3) // 4).view("<u2")[:, :length]


def _words(mixed: Ids, count: int) -> Ids:
    """`count` words of each row."""
    numbers: Ids = np.arange(1, count + 1, dtype=np.uint64)
    return splitmix64(np.add.outer(mixed, numbers))
