"""Some of the trainings of `make combinations`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.combinations import counting
from tests.combinations.counted import OPTIMIZERS, counted
from tests.combinations.counted import STEPS as COUNTED_STEPS
from tests.combinations.counting import digits
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


@pytest.mark.thorough
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(300, 308))
def test_a_counted_training_has_each_step_once(tmp_path: Path, seed: int) -> None:
    training = counted(seed)
    try:
        problem = counting.check(training, tmp_path)
    except Refused:
        return
    assert not problem, f"{problem}\n{training}"


def test_a_value_says_which_steps_are_in_it_and_how_often() -> None:
    first, third = 4.0**0, 4.0**2
    assert digits(-(first + third))[:4] == [1, 0, 1, 0]
    assert digits(-(first + 2 * third))[:4] == [1, 0, 2, 0]
    assert digits(-(4.0**COUNTED_STEPS))[-1] == 1
    for wrong in (first, -first / 2):
        assert min(digits(wrong)) < 0


def test_each_feature_of_counted_trainings_is_drawn_often() -> None:
    trainings = [counted(seed) for seed in range(200)]
    for share in (
        *([t for t in trainings if t.optimizer == name] for name in OPTIMIZERS),
        *([t for t in trainings if s in t.options["consistency"]] for s in ("bsp", "ssp", "asp")),
        [t for t in trainings if t.options["push_codec"] != "none"],
        [t for t in trainings if t.groups],
        [t for t in trainings if t.changes],
        [t for t in trainings if t.skips],
        [t for t in trainings if t.has_rows],
        [t for t in trainings if t.has_shards],
        [t for t in trainings if t.has_sampler],
        [t for t in trainings if t.unfrozen],
        [t for t in trainings if t.grows],
        [t for t in trainings if t.trains_two],
        [t for t in trainings if t.is_read],
        [t for t in trainings if t.synchronizes],
        [t for t in trainings if t.saves_after],
        [t for t in trainings if t.late],
        [t for t in trainings if t.deaths],
        [t for t in trainings if t.late and t.deaths and t.faults],
    ):
        assert len(share) > 12


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
        [t for t in trainings if t.loads],
        [t for t in trainings if t.adds_at],
        [t for t in trainings if t.options["overlap_pull"] and len(t.looks) < STEPS],
    ):
        assert len(share) > 15
    for training in trainings:
        assert training.parts[-1].ends_after == STEPS
        for part in training.parts:
            lost = [fault for fault in part.faults if fault.kind in ("server", "both", "stop")]
            assert len(lost) <= (part.servers - 1 if part.replicas == 2 else 0)
