"""Stamps of lent values: even at rest, odd in a change, and never the same for two contents."""

from __future__ import annotations

import numpy as np
import pytest

from ps_core import stamps
from ps_core.errors import InvariantViolation


def test_a_change_moves_the_stamps_of_its_blocks_and_of_no_other() -> None:
    of = np.array([2, 4, 6], np.uint64)
    assert [stamps.now(of, number) for number in range(3)] == [2, 4, 6]
    stamps.begin(of, [0, 2])
    assert of.tolist() == [3, 4, 7]
    for number in (0, 2):
        with pytest.raises(InvariantViolation, match=f"LENT-1.*stamp {number} is lent while"):
            stamps.now(of, number)
    stamps.end(of, [0, 2])
    assert of.tolist() == [4, 4, 8]


def test_changes_of_one_block_do_not_overlap() -> None:
    of = np.array([2], np.uint64)
    with pytest.raises(InvariantViolation, match=r"LENT-1.*stamp 0 overlap"):
        stamps.end(of, [0])
    stamps.begin(of, [0])
    with pytest.raises(InvariantViolation, match="LENT-1"):
        stamps.begin(of, [0])


def test_a_copy_counts_while_the_stamp_is_the_answers() -> None:
    of = np.array([2, 4], np.uint64)
    values, target = np.arange(4, dtype=np.uint8), np.zeros(4, np.uint8)
    assert stamps.copied(values, target, of, 1, 4)
    assert target.tolist() == [0, 1, 2, 3]
    stamps.begin(of, [1])
    assert not stamps.copied(values, target, of, 1, 4)
    stamps.end(of, [1])
    assert not stamps.copied(values, target, of, 1, 4)
    assert stamps.copied(values, target, of, 1, 6)
    assert of.itemsize == stamps.STAMP_BYTES
