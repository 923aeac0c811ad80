"""Stamps of values that others read where they lie, while these may change: a sequence lock.

    at rest, 2n --begin--> 2n + 1, it changes --end--> at rest, 2n + 2

A block has one: an even number while it is at rest, an odd one while it changes, and never the same
number for two contents. Who copies it looks at the stamp afterwards: it counts if that is still the
one of the answer that lent it. The order is what counts, and is the processor's on x86-64 only.

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
    """The stamp of a block at rest, for an answer."""
    stamp = int(stamps[number])
    check(stamp % 2 == 0, "LENT-1", f"what has stamp {number} is lent while it changes")
    return stamp


def begin(stamps: Stamps, numbers: Iterable[int]) -> None:
    """These blocks are about to change."""
    for number in numbers:
        stamp = int(stamps[number])
        if stamp % 2:
            _overlap(number)
        stamps[number] = stamp + 1


def end(stamps: Stamps, numbers: Iterable[int]) -> None:
    """They are at rest again."""
    for number in numbers:
        stamp = int(stamps[number])
        if not stamp % 2:
            _overlap(number)
        stamps[number] = stamp + 1


def _overlap(number: int) -> NoReturn:
    raise InvariantViolation("LENT-1", f"changes of what has stamp {number} overlap")


def copied(values: Bytes, target: Bytes, stamps: Stamps, number: int, stamp: int) -> bool:
    """Copy what was lent with that stamp: whether the copy is what it was then.

    Shapes:
        values, target: flat, of one length.
    """
    np.copyto(target, values)
    return int(stamps[number]) == stamp  # only after the copy
