"""Copies out of shared memory by threads: all are made and judged as one thread would."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ps_core.sequence_locks import Shared
from ps_worker.transport.lane import Copiers

MIB = 2**20


def some(draw: np.random.Generator, *sizes: int) -> list[Shared]:
    """Values of these sizes, of which every second has changed since."""
    locks = np.array([2, 4], np.uint64)
    return [
        Shared(draw.integers(0, 256, size, np.uint8), np.zeros(size, np.uint8), locks, n % 2, 2)
        for n, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("sizes", [[5 * MIB], [MIB] * 7, [MIB, 3, 0, 4 * MIB, 1]])
def test_everything_is_copied_and_judged(sizes: list[int]) -> None:
    draw = np.random.default_rng(0)
    copiers = Copiers(3)
    calls = [some(draw, *sizes) for _ in range(9)]
    begun = [copiers.begin(shared) for shared in calls]
    for shared, future in zip(calls, begun, strict=True):
        assert future is not None
        assert future.result() == [n % 2 == 0 for n in range(len(sizes))]
        for each in shared:
            assert np.array_equal(each.target, each.values)
    copiers.close()


def test_the_caller_copies_what_is_small_and_all_on_a_small_machine() -> None:
    draw = np.random.default_rng(0)
    assert Copiers(3).begin(some(draw, 1000, 1000)) is None
    assert Copiers(3).begin([]) is None
    assert Copiers(0).begin(some(draw, 9 * MIB)) is None


def test_threads_end_when_they_have_copied_what_was_begun() -> None:
    def mine() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name.startswith("pushpull-copier")]

    before = len(mine())
    copiers = Copiers(2)
    begun = [copiers.begin(some(np.random.default_rng(n), 8 * MIB)) for n in range(6)]
    assert before < len(mine()) <= before + 2
    copiers.close()
    assert all(future is not None and future.done() for future in begun)
    assert len(mine()) == before
