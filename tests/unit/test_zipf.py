"""The ids of `pushpull bench sparse` that follow Zipf's law."""

from __future__ import annotations

import numpy as np

from ps_cli.bench.contenders.zipf import EXPONENT, ZipfIds

ROW_COUNT, COUNT = 1000, 400_000


def test_ids_come_as_often_as_the_law_says() -> None:
    ids = ZipfIds(ROW_COUNT)
    counts = np.bincount(ids.next(COUNT), minlength=ROW_COUNT)
    assert len(counts) == ROW_COUNT
    weights = np.arange(1, ROW_COUNT + 1) ** -EXPONENT
    expected = COUNT * weights / weights.sum()
    found = counts[ids.at(np.arange(ROW_COUNT))]
    assert (np.abs(found - expected) < 6 * np.sqrt(expected)).all()


def test_frequent_ids_are_no_neighbours() -> None:
    hottest = ZipfIds(ROW_COUNT).at(np.arange(100))
    assert len(np.unique(hottest)) == 100
    assert (np.diff(np.sort(hottest)) == 1).sum() < 25  # a tenth of 100, by chance
    assert 400 < hottest.mean() < 600


def test_each_batch_is_drawn_anew_and_a_run_is_repeatable() -> None:
    first, again = ZipfIds(ROW_COUNT), ZipfIds(ROW_COUNT)
    batches = [first.next(50).tolist() for _ in range(2)]
    assert batches[0] != batches[1]
    assert batches == [again.next(50).tolist() for _ in range(2)]
