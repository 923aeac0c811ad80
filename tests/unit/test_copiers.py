"""Copies by several threads: all of them are made, whatever their sizes, and none is lost."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ps_worker.transport.lane import Copiers

MIB = 2**20


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("sizes", [[], [3], [5 * MIB], [MIB] * 7, [MIB, 3, 0, 4 * MIB, 1]])
def test_everything_is_copied(count: int, sizes: list[int]) -> None:
    draw = np.random.default_rng(0)
    copiers = Copiers(count)
    for _ in range(3):
        sources = [draw.integers(0, 256, size, np.uint8) for size in sizes]
        targets = [np.zeros(size, np.uint8) for size in sizes]
        copiers.copy(list(zip(targets, sources, strict=True)))
        for target, source in zip(targets, sources, strict=True):
            assert np.array_equal(target, source)
    copiers.close()


def test_threads_are_made_for_large_copies_and_end() -> None:
    def mine() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name.startswith("pushpull-copier")]

    copiers = Copiers(3)
    small, large = np.ones(1000, np.uint8), np.ones(MIB, np.uint8)
    copiers.copy([(np.empty_like(small), small)] * 9)
    assert not mine()
    copiers.copy([(np.empty_like(large), large) for _ in range(9)])
    assert 1 <= len(mine()) <= 2
    copiers.close()
    assert not mine()


def test_a_failure_of_any_thread_is_told() -> None:
    copiers = Copiers(2)
    fits, short = np.ones(2 * MIB, np.uint8), np.ones(7, np.uint8)
    with pytest.raises(ValueError, match="broadcast"):
        copiers.copy([(np.empty_like(fits), fits), (short, fits)])
    copiers.close()
