"""The rule of a bound that moves, over any course of waits and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.consistency import Consistency, moving
from ps_core.losses import NO_LOSSES, LossTotals
from scheduler.machine.adaptation import LONG_WAIT, MAX_PATIENCE_COUNT, SHORT_WAIT, Course

pytestmark = pytest.mark.slow

SHARES = st.floats(0.0, 1.0)
SETTINGS = st.tuples(st.integers(0, 50), st.integers(1, 200)).map(
    lambda pair: moving(pair[0], pair[0] + pair[1])
)


def steady(loss: float, count: int = 100, spread: float = 0.1) -> LossTotals:
    """So many losses about `loss`."""
    square = loss * loss + spread * spread
    return LossTotals(count, loss * count, square * count)


def go(
    setting: Consistency, waited: Callable[[int], float], periods: int, course: Course | None = None
) -> list[int]:
    """Where the bound is after each period, if at a bound of s workers wait `waited(s)`."""
    course, path = course or Course(), []
    for _ in range(periods):
        s = course.step(setting, waited(setting.staleness)).staleness
        setting = replace(setting, staleness=s)
        path.append(s)
    return path


def moves(path: list[int]) -> int:
    return sum(a != b for a, b in pairwise(path))


@pytest.mark.thorough
@given(
    setting=SETTINGS,
    periods=st.lists(
        st.tuples(SHARES, st.none() | st.floats(-10, 10), st.booleans()), max_size=120
    ),
)
def test_it_never_leaves_its_bounds_and_every_move_has_a_reason(
    setting: Consistency, periods: list[tuple[float, float | None, bool]]
) -> None:
    course = Course()
    for share, loss, is_finite in periods:
        losses = NO_LOSSES if loss is None else steady(loss)
        losses = replace(losses, non_finite_count=0 if is_finite else 1)
        verdict = course.step(setting, share, losses)
        assert setting.least <= verdict.staleness <= setting.most
        assert (verdict.staleness == setting.staleness) or verdict.reason
        if verdict.staleness > setting.staleness:
            assert share >= LONG_WAIT
            assert is_finite
        setting = replace(setting, staleness=verdict.staleness)


@pytest.mark.thorough
@given(setting=SETTINGS, start=st.integers(0, 200), share=SHARES)
def test_it_settles_where_waits_do_not_depend_on_it(
    setting: Consistency, start: int, share: float
) -> None:
    start = min(setting.least + start, setting.most)
    path = go(replace(setting, staleness=start), lambda _: share, 500)
    if share >= LONG_WAIT:
        assert path[-1] == setting.most
        assert path == sorted(path)
    elif share < SHORT_WAIT:
        assert path[-1] == setting.least
        assert path == sorted(path, reverse=True)
    else:
        assert set(path) == {start}


@pytest.mark.thorough
@given(setting=SETTINGS, needed=st.integers(0, 250))
def test_it_settles_at_what_is_needed_and_tries_less_ever_more_seldom(
    setting: Consistency, needed: int
) -> None:
    """From a bound of `needed` on nobody waits; below it, half of the time."""
    settling, probes = 500, 10
    course = Course()
    first = go(setting, lambda s: 0.5 if s < needed else 0.0, settling, course)
    now = replace(setting, staleness=first[-1])
    path = go(now, lambda s: 0.5 if s < needed else 0.0, probes * MAX_PATIENCE_COUNT, course)
    best = min(max(needed, setting.least), setting.most)
    assert set(path) <= {best, best - 1}
    assert path.count(best) >= 0.98 * len(path)
    assert moves(path) <= 2 * (probes + 1)


@pytest.mark.thorough
@given(setting=SETTINGS, low=st.integers(0, 100), width=st.integers(1, 60))
def test_between_long_and_short_waits_it_stays(setting: Consistency, low: int, width: int) -> None:
    """Waits get shorter as the bound grows; a few bounds are neither too low nor too high."""

    def waited(s: int) -> float:
        return 0.3 if s < low else 0.05 if s < low + width else 0.0

    path = go(setting, waited, 400)
    assert moves(path[200:]) <= 200 // 30, path[200:]


@given(setting=SETTINGS, share=SHARES, other=SHARES, s=st.integers(0, 200))
def test_more_waiting_never_gives_a_lower_bound(
    setting: Consistency, share: float, other: float, s: int
) -> None:
    at = replace(setting, staleness=min(setting.least + s, setting.most))
    low, high = sorted((share, other))
    assert go(at, lambda _: low, 40)[-1] <= go(at, lambda _: high, 40)[-1]
