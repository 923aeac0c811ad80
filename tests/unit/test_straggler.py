"""Emulated computation: what the texts say, and who is slow when."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.errors import InvalidConfig
from ps_worker.spec.straggler import ComputeTime, Straggler
from ps_worker.transport.config import worker_config

ROTATING = "rotating:30ms,90ms,burst=2,seed=1"


@pytest.mark.parametrize("text", ["30ms", ROTATING, "permanent:30ms,90ms,rank=3", "0ms"])
def test_a_text_is_read_as_it_is_written(text: str) -> None:
    assert str(ComputeTime.parsed(text)) == text


def test_what_is_left_out_has_its_default() -> None:
    assert ComputeTime.parsed("rotating: 0.03s, 90ms") == ComputeTime(
        0.03, Straggler.ROTATING, 0.09, burst=1, seed=0
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "expected one of 30ms"),
        ("30", "expected one of 30ms"),
        ("fast:1ms,2ms", "expected one of 30ms"),
        ("none:1ms,2ms", "expected one of 30ms"),
        ("rotating:30ms", "expected one of 30ms"),
        ("rotating:30ms,90ms,rank=1", "expected one of 30ms"),
        ("permanent:30ms,90ms,rank=one", "expected one of 30ms"),
        ("-1ms", "fast time of compute is -0.001 s"),
        ("nanms", "fast time of compute is nan s"),
        ("rotating:90ms,30ms", "slow time of compute is 0.03 s; expected 0.09"),
        ("rotating:30ms,90ms,burst=0", "burst of compute is 0"),
        ("permanent:30ms,90ms,rank=-1", "a rank and a seed of 0 or more"),
    ],
)
def test_a_wrong_text_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        ComputeTime.parsed(text)


def test_the_setting_of_a_client_is_checked_at_once() -> None:
    given_ = {"scheduler": "nowhere", "compute": "soon"}
    with pytest.raises(InvalidConfig, match="compute is 'soon'"):
        worker_config(given_, {})
    with pytest.raises(InvalidConfig, match="consistency is 'lax'"):
        worker_config({"scheduler": "nowhere"}, {"PUSHPULL_CONSISTENCY": "lax"})


def test_a_slow_rank_must_be_of_the_cluster() -> None:
    permanent = ComputeTime.parsed("permanent:30ms,90ms,rank=2")
    permanent.check_fits(3)
    with pytest.raises(InvalidConfig, match="a rank below 2"):
        permanent.check_fits(2)


def test_a_permanent_straggler_is_always_the_same() -> None:
    schedule = ComputeTime.parsed("permanent:30ms,90ms,rank=1")
    for clock in range(1, 20):
        assert [schedule.seconds(rank, 3, clock) for rank in range(3)] == [0.03, 0.09, 0.03]


def test_without_a_straggler_all_take_the_same() -> None:
    assert ComputeTime.parsed("30ms").slow_rank(4, 7) is None
    assert ComputeTime.parsed("30ms").seconds(2, 4, 7) == 0.03


@given(
    worker_count=st.integers(1, 9),
    burst=st.integers(1, 5),
    seed=st.integers(0, 2**40),
    clock=st.integers(1, 10_000),
)
def test_at_any_clock_exactly_one_rotating_worker_is_slow(
    worker_count: int, burst: int, seed: int, clock: int
) -> None:
    schedule = ComputeTime(0.03, Straggler.ROTATING, 0.09, burst=burst, seed=seed)
    times = [schedule.seconds(rank, worker_count, clock) for rank in range(worker_count)]
    assert sorted(times) == [0.03] * (worker_count - 1) + [0.09]


@given(worker_count=st.integers(1, 9), burst=st.integers(1, 5), seed=st.integers(0, 2**40))
def test_turns_last_a_burst_and_every_round_has_one_of_each_worker(
    worker_count: int, burst: int, seed: int
) -> None:
    schedule = ComputeTime(0.03, Straggler.ROTATING, 0.09, burst=burst, seed=seed)
    turns = [
        {schedule.slow_rank(worker_count, turn * burst + k + 1) for k in range(burst)}
        for turn in range(6 * worker_count)
    ]
    assert all(len(turn) == 1 for turn in turns)
    for begin in range(0, len(turns), worker_count):
        slow = Counter(rank for turn in turns[begin : begin + worker_count] for rank in turn)
        assert slow == dict.fromkeys(range(worker_count), 1)


def test_the_seed_draws_the_order() -> None:
    orders = {
        tuple(
            ComputeTime(0.03, Straggler.ROTATING, 0.09, seed=seed).slow_rank(4, clock)
            for clock in range(1, 9)
        )
        for seed in range(30)
    }
    assert len(orders) > 20
