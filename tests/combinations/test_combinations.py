"""Some of the trainings of `make combinations`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.combinations.drawn import STEPS, Drawn, drawn
from tests.combinations.faults import KINDS
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

    def kinds_of(training: Drawn) -> set[str]:
        return {fault.kind for part in training.parts for fault in part.faults}

    for share in (
        *([t for t in trainings if k in kinds_of(t)] for k in KINDS),
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
        for part in training.parts:
            lost = [fault for fault in part.faults if fault.kind in ("server", "both", "stop")]
            assert len(lost) <= (part.servers - 1 if part.replicas == 2 else 0)
