"""Some of the trainings of `make combinations`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.combinations.drawn import STEPS, drawn
from tests.combinations.training import Refused, check


@pytest.mark.thorough
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(2, 10))
def test_a_drawn_training_goes_on_bit_for_bit(tmp_path: Path, seed: int) -> None:
    training = drawn(seed)
    try:
        problem = check(training, tmp_path)
    except Refused:
        return  # the same features are refused everywhere
    assert not problem, f"{problem}\n{training}"


def test_each_feature_is_drawn_often() -> None:
    trainings = [drawn(seed) for seed in range(200)]
    for share in (
        [t for t in trainings if any(part.loses for part in t.parts)],
        [t for t in trainings if len(t.parts) == 3],
        [t for t in trainings if t.frozen],
        [t for t in trainings if t.edits],
        [t for t in trainings if t.synchronizes],
        [t for t in trainings if t.not_finite],
        [t for t in trainings if t.has_rows],
        [t for t in trainings if t.trains_two],
    ):
        assert len(share) > 15
    for training in trainings:
        assert training.parts[-1].ends_after == STEPS
        assert all(part.loses == 0 or part.servers > part.replicas for part in training.parts)
