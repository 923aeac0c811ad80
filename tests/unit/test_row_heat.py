"""The hottest rows of a range, by samples, against counts of all."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ps_server.rows.row_heat import SAMPLED_SHARE, RowHeat


def test_the_hottest_rows_of_a_long_tail_are_found_with_their_shares() -> None:
    draws, heat, counts = np.random.default_rng(5), RowHeat(), Counter[int]()
    for _ in range(3_000):
        ids = draws.zipf(1.2, 500).astype(np.uint64)
        heat.note(ids)
        counts.update(ids.tolist())
    assert heat.count == 1_500_000
    expected = [row_id for row_id, _ in counts.most_common(4)]
    found = heat.hottest(4)
    assert [each.row_id for each in found] == expected
    for each in found:
        assert each.share == pytest.approx(counts[each.row_id] / heat.count, rel=0.1)


@pytest.mark.parametrize("turns", [1, 4, 32])
@pytest.mark.parametrize("length", [1, 7, SAMPLED_SHARE, 100])
def test_every_place_of_a_call_is_sampled_as_often(length: int, turns: int) -> None:
    """The ids of a call are in order, and those of several partitions come in turns."""
    heat = RowHeat()
    for call in range(SAMPLED_SHARE * 60 * turns):
        first = call % turns * length
        heat.note(np.arange(first, first + length, dtype=np.uint64))
    shares = [each.share for each in heat.hottest(length * turns)]
    assert len(shares) == length * turns
    assert max(shares) < 1.5 * min(shares)


def test_an_id_of_a_large_call_counts_as_one_of_a_small_call() -> None:
    heat = RowHeat()
    for call in range(2_000):  # 1,000,000 ids of the one, 950,000 of the other
        heat.note(np.full(10_000 if call % 20 == 0 else 500, call % 20 == 0, np.uint64))
    shares = {each.row_id: each.share for each in heat.hottest(2)}
    assert shares[1] == pytest.approx(20 / 39, rel=0.05)
    assert shares[0] == pytest.approx(19 / 39, rel=0.05)


def test_what_was_hot_makes_way_and_the_counts_stay_few() -> None:
    draws, heat = np.random.default_rng(6), RowHeat(halved_count=1_000, most_count=50)
    for first in (10**6, 10**9):
        for _ in range(2_000):
            ids = draws.integers(first, first + 10_000, 64)
            ids[::2] = first
            draws.shuffle(ids)
            heat.note(ids.astype(np.uint64))
    (hottest, second) = heat.hottest(2)
    assert hottest.row_id == 10**9
    assert hottest.share == pytest.approx(0.5, abs=0.1)
    assert second.share < 0.05
    assert len(heat.hottest(10**6)) <= 100
