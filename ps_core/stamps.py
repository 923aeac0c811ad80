"""Sequence locks of blocks that other processes read in shared memory while they may change.

    at rest, 2n --begin--> 2n + 1, it changes --end--> at rest, 2n + 2

Each block has one: even at rest, odd during a change, never the same for two contents. A reader
copies the block and then compares the lock with the one in its answer: the copy is valid if they
are equal. That needs ordered loads and stores, which only x86-64 has without fences.

Invariants:
    LENT-1  A block's values change only between `begin` and `end` of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from ps_core.errors import InvariantViolation, check

Stamps = np.ndarray[Any, np.dtype[np.uint64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

STAMP_BYTES = 8


def now(stamps: Stamps, number: int) -> int:
    """The lock of a block at rest, for an answer."""
    stamp = int(stamps[number])
    check(stamp % 2 == 0, "LENT-1", f"what has stamp {number} is lent while it changes")
    return stamp


def begin(stamps: Stamps, numbers: Iterable[int]) -> None:
    """Mark blocks that are about to change."""
    for number in numbers:
        stamp = int(stamps[number])
        if stamp % 2:
            _overlap(number)
        stamps[number] = stamp + 1


def end(stamps: Stamps, numbers: Iterable[int]) -> None:
    """Mark blocks that are at rest again."""
    for number in numbers:
        stamp = int(stamps[number])
        if not stamp % 2:
            _overlap(number)
        stamps[number] = stamp + 1


def _overlap(number: int) -> NoReturn:
    raise InvariantViolation("LENT-1", f"changes of what has stamp {number} overlap")


def copied(values: Bytes, target: Bytes, stamps: Stamps, number: int, stamp: int) -> bool:
    """Copy shared values; False if they have changed since the lock was `stamp`.

    Shapes:
        values, target: flat, of one length.
    """
    np.copyto(target, values)
    return int(stamps[number]) == stamp  # only after the copy
