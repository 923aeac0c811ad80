"""Batch sizes by speed: what is dealt out, and the plan of a pass."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.errors import InvalidConfig
from ps_worker.spec.batch_sizes import BatchPlan, BatchSpec, dealt

SPEEDS = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=5)


def spec_of(length: int = 100, every: int = 3, **changed: int) -> BatchSpec:
    given = {"batch_size": 4, "least": 1, "most": 16, "seed": 0, **changed}
    return BatchSpec(length=length, every=every, **given)


# --- dealing out


@pytest.mark.parametrize(
    ("total", "speeds", "bounds", "sizes"),
    [
        (24, [1, 1, 1], (1, 32), [8, 8, 8]),
        (28, [3, 3, 1], (1, 32), [12, 12, 4]),
        (24, [100, 1, 1], (4, 12), [12, 6, 6]),
        (24, [100, 100, 1], (4, 32), [10, 10, 4]),
        (7, [1, 1, 1], (1, 32), [3, 2, 2]),
        (3, [9, 1, 1], (1, 1), [1, 1, 1]),
    ],
)
def test_samples_go_to_whoever_is_done_first(
    total: int, speeds: list[float], bounds: tuple[int, int], sizes: list[int]
) -> None:
    assert list(dealt(total, dict(enumerate(speeds)), *bounds).values()) == sizes


@given(SPEEDS, st.integers(1, 4), st.integers(0, 6), st.data())
def test_no_other_deal_ends_earlier(
    speeds: list[float], least: int, more: int, data: st.DataObject
) -> None:
    """Beside every deal that is possible, for few workers and small batches."""
    most, count = least + more, min(len(speeds), 3)
    speeds = speeds[:count]
    total = data.draw(st.integers(least * count, most * count))
    found = dealt(total, dict(enumerate(speeds)), least, most)

    def end(sizes: tuple[int, ...]) -> float:
        return max(size / speed for size, speed in zip(sizes, speeds, strict=True))

    possible = itertools.product(range(least, most + 1), repeat=count)
    assert sum(found.values()) == total
    best = min(end(each) for each in possible if sum(each) == total)
    assert end(tuple(found.values())) <= best * (1 + 1e-12)


# --- a pass


@given(st.integers(3, 200), st.integers(1, 5), st.integers(0, 50), st.lists(SPEEDS, max_size=30))
def test_each_sample_is_in_one_batch(
    length: int, every: int, begun: int, agreed: list[list[float]]
) -> None:
    """Whatever is agreed on the way; at most two samples are left, with three workers."""
    begun = min(begun, length)
    spec = spec_of(length, every)
    plan = BatchPlan(spec, begun, dealt(12, dict.fromkeys(range(3), 1.0), 1, 16))
    seen: list[int] = []
    for step in itertools.count():
        if step and not step % every:
            speeds = agreed.pop() if agreed else []
            given = dict(enumerate([*speeds, 1.0, 1.0, 1.0][:3]))
            plan.agree(dealt(12, given, 1, 16))
        assert plan.begun(step) == begun + len(seen) or plan.begun(step) == length
        batches = [plan.batch(step, rank) for rank in range(3)]
        if batches[0] is None:
            assert batches == [None] * 3
            break
        weights = [plan.weight(step, rank, range(3)) for rank in range(3)]
        assert sum(weights) == pytest.approx(3.0)
        for batch, weight in zip(batches, weights, strict=True):
            assert batch
            assert weight == pytest.approx(3 * len(batch) / sum(len(b or ()) for b in batches))
            seen += batch
    assert seen == list(range(begun, begun + len(seen)))
    assert 0 <= length - begun - len(seen) < 3


def test_sizes_hold_from_the_next_window_but_one_on() -> None:
    plan = BatchPlan(spec_of(every=2), 0, {0: 4, 1: 4})
    plan.agree({0: 6, 1: 2})
    sizes = [len(plan.batch(step, 0) or ()) for step in range(6)]
    assert sizes == [4, 4, 4, 4, 6, 6]
    assert plan.begun(6) == 48
    for step in (6, 7):
        with pytest.raises(InvalidConfig, match=f"draws batch {step} of the pass, and sizes are"):
            plan.batch(step, 0)


def test_a_worker_that_has_gone_is_not_in_the_mean_before_sizes_are_agreed_anew() -> None:
    """Else the others' gradients would count less, by its share: the servers divide by two."""
    plan = BatchPlan(spec_of(every=1), 0, {0: 12, 1: 2, 2: 4})
    assert [plan.weight(0, rank, {0, 1, 2}) for rank in range(3)] == [2.0, 1 / 3, 2 / 3]
    assert [plan.weight(0, rank, {1, 2}) for rank in (1, 2)] == [2 / 3, 4 / 3]


def test_workers_that_have_gone_have_no_share() -> None:
    plan = BatchPlan(spec_of(every=1), 0, {0: 4, 1: 4, 2: 4})
    plan.agree({0: 6, 2: 6})
    assert plan.batch(2, 0) == range(24, 30)
    assert plan.batch(2, 2) == range(30, 36)
    assert plan.weight(2, 2, {0, 2}) == 1.0


@pytest.mark.parametrize(
    "changed",
    [{"least": 0}, {"least": 5}, {"most": 3}, {"every": 0}, {"seed": -1}, {"length": 1}],
)
def test_values_out_of_bounds_are_refused(changed: dict[str, int]) -> None:
    with pytest.raises(InvalidConfig, match="expected bounds of 1 or more around the size"):
        spec_of(**changed).check(worker_count=2)
    spec_of().check(worker_count=2)
