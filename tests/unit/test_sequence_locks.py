"""Sequence locks: even at rest, odd in a change, and never the same for two contents."""

from __future__ import annotations

import numpy as np
import pytest

from ps_core import sequence_locks
from ps_core.errors import InvariantViolation
from ps_core.sequence_locks import Shared


def test_a_change_moves_the_locks_of_its_blocks_and_of_no_other() -> None:
    of = np.array([2, 4, 6], np.uint64)
    assert [sequence_locks.now(of, number) for number in range(3)] == [2, 4, 6]
    sequence_locks.begin(of, [0, 2])
    assert of.tolist() == [3, 4, 7]
    for number in (0, 2):
        with pytest.raises(InvariantViolation, match=f"LENT-1.*block {number} is shared while"):
            sequence_locks.now(of, number)
    sequence_locks.end(of, [0, 2])
    assert of.tolist() == [4, 4, 8]


def test_changes_of_one_block_do_not_overlap() -> None:
    of = np.array([2], np.uint64)
    with pytest.raises(InvariantViolation, match=r"LENT-1.*block 0 overlap"):
        sequence_locks.end(of, [0])
    sequence_locks.begin(of, [0])
    with pytest.raises(InvariantViolation, match="LENT-1"):
        sequence_locks.begin(of, [0])


def test_a_copy_counts_while_the_stamp_is_the_answers() -> None:
    of = np.array([2, 4], np.uint64)
    values, target = np.arange(4, dtype=np.uint8), np.zeros(4, np.uint8)

    def counts(lock: int) -> bool:
        shared = Shared(values, target, of, 1, lock)
        (found,) = sequence_locks.copied([shared])
        return found

    assert counts(4)
    assert target.tolist() == [0, 1, 2, 3]
    sequence_locks.begin(of, [1])
    assert not counts(4)
    sequence_locks.end(of, [1])
    assert not counts(4)
    assert counts(6)
    assert of.itemsize == sequence_locks.LOCK_BYTES
    assert of[1:].ctypes.data == of.ctypes.data + sequence_locks.offset_bytes(1)
