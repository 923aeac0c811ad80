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
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ps_core.errors import InvariantViolation, check

SequenceLocks = np.ndarray[Any, np.dtype[np.uint64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

LOCK_BYTES = 8


class Shared(NamedTuple):
    """Values of a block that are shared, where to copy them, and their lock as it was.

    Shapes:
        values, target: flat, of one length.
    """

    values: Bytes
    target: Bytes
    locks: SequenceLocks
    number: int
    lock: int


def offset_bytes(number: int) -> int:
    """The offset of a lock from the first one."""
    return number * LOCK_BYTES


def now(locks: SequenceLocks, number: int) -> int:
    """The lock of a block at rest, for an answer."""
    lock = int(locks[number])
    check(lock % 2 == 0, "LENT-1", f"block {number} is shared while it changes")
    return lock


def begin(locks: SequenceLocks, numbers: Iterable[int]) -> None:
    """Mark blocks that are about to change."""
    for number in numbers:
        lock = int(locks[number])
        if lock % 2:
            _overlap(number)
        locks[number] = lock + 1


def end(locks: SequenceLocks, numbers: Iterable[int]) -> None:
    """Mark blocks that are at rest again."""
    for number in numbers:
        lock = int(locks[number])
        if not lock % 2:
            _overlap(number)
        locks[number] = lock + 1


def _overlap(number: int) -> NoReturn:
    raise InvariantViolation("LENT-1", f"changes of block {number} overlap")


def copied(shared: Iterable[Shared]) -> list[bool]:
    """Copy shared values; False for each that has changed since its lock was `lock`."""
    return [_is_copied(*each) for each in shared]


def _is_copied(values: Bytes, target: Bytes, locks: SequenceLocks, number: int, lock: int) -> bool:
    np.copyto(target, values)
    return int(locks[number]) == lock  # only after the copy
