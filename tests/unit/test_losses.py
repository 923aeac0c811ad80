"""Sums of losses: what lies between two of them."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.losses import NO_LOSSES, LossTotals

LOSSES = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40)


def totals(losses: list[float], start: LossTotals = NO_LOSSES) -> LossTotals:
    for loss in losses:
        start = start.with_loss(loss)
    return start


@given(before=LOSSES, after=LOSSES, others=LOSSES)
def test_a_stretch_says_its_mean_and_how_sure_it_is(
    before: list[float], after: list[float], others: list[float]
) -> None:
    then = totals(before)
    stretch = LossTotals.together([totals(after, then).since(then), totals(others)])
    both = after + others
    assert stretch.count == len(both)
    assert stretch.mean == pytest.approx(statistics.fmean(both), abs=1e-6)
    error_square = statistics.pvariance(both) / len(both)
    assert stretch.error_square == pytest.approx(error_square, abs=1e-6)


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan, 1e300])
def test_what_is_not_finite_is_counted_and_spoils_nothing(loss: float) -> None:
    found = totals([1.0, loss, 3.0])
    assert (found.count, found.mean, found.non_finite_count) == (2, 2.0, 1)


def test_a_stretch_has_the_non_finite_ones_that_came_in_it() -> None:
    before = totals([math.nan, 1.0])
    after = totals([math.inf, math.nan, 2.0], before)
    stretch = after.since(before)
    assert (stretch.count, stretch.non_finite_count, stretch.mean) == (1, 2, 2.0)
    assert LossTotals.together([before, stretch]) == after


def test_none_say_nothing() -> None:
    assert (NO_LOSSES.mean, NO_LOSSES.error_square) == (0.0, 0.0)
