"""Gradients of one worker, as its reduction keeps and gives them back."""

from __future__ import annotations

import math

import pytest
import torch

from ps_worker.training.among_workers.gradient_reduction import GradientReduction, Reduced

SCALE = 2.0**16
HALF, SINGLE = torch.float16, torch.float32


def parameter(values: list[float] | None, dtype: torch.dtype) -> torch.Tensor:
    made = torch.zeros(3, dtype=dtype)
    made.grad = None if values is None else torch.tensor(values, dtype=dtype)
    return made


def gradient(of: torch.Tensor) -> torch.Tensor:
    assert of.grad is not None
    return of.grad


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, SINGLE, torch.float64], ids=str)
def test_gradients_are_given_back_in_their_unit_as_often_as_asked(dtype: torch.dtype) -> None:
    """The first is smaller than float16 can have it without the scale."""
    scaled = [2.0**-12, -1.5, 300.0]
    some, none = parameter(scaled, dtype), parameter(None, dtype)
    reduction = GradientReduction([some, none], 2, 1)
    reduction.begin([1.0, 3.0], 1.0 / SCALE)
    for _ in range(2):  # as after an error midway
        reduced = reduction.finish()
        assert reduced.control == [1.0, 3.0]
        assert reduced.largest == [(dtype, 300.0 / SCALE)]
        some.grad = torch.ones(3, dtype=dtype)
        reduction.give_back(SCALE)
        assert gradient(some).tolist() == scaled
        assert none.grad is None
    some.grad = None
    reduction.give_back(SCALE)
    assert gradient(some).dtype is dtype
    reduction.give_back(1.0)
    assert gradient(some)[1:].tolist() == [-1.5 / SCALE, 300.0 / SCALE]
    reduction.begin([0.0, 0.0], 1.0)
    some.grad = None
    reduction.finish()
    reduction.give_back(1.0)
    gradient(some).fill_(7.0)  # not the reduction's own memory
    assert reduction.finish().largest[0][1] == 300.0 / SCALE


def test_a_mean_may_have_no_room_in_float16() -> None:
    some, other = parameter([1e5, 0.0, -2e5], SINGLE), parameter([6e4, 0.0, 0.0], HALF)
    reduction = GradientReduction([some, other], 0, 1)
    reduction.begin([], 2.0)
    reduced = reduction.finish()
    assert not reduced.fits()
    reduction.begin([], 0.5)
    reduced = reduction.finish()
    assert reduced.fits()
    assert reduced.fits(2.0)
    assert not reduced.fits(4.0)


@pytest.mark.parametrize(
    ("largest", "wanted", "unit"),
    [
        ([(HALF, 1.0)], SCALE / 2, SCALE / 2),
        ([(HALF, 1.0)], SCALE, SCALE / 2),
        ([(HALF, 65504.0)], SCALE, 1.0),
        ([(HALF, 65504.0)], 1000.0, 1.0),
        ([(SINGLE, 65504.0)], SCALE, SCALE),
        ([(SINGLE, 3e38), (HALF, 0.0)], SCALE, 1.0),
        ([(HALF, 4.0)], 0.5, 0.5),
        ([], SCALE, SCALE),
        ([(SINGLE, math.nan)], SCALE, 1.0),
    ],
)
def test_the_unit_is_the_loss_scale_if_the_mean_has_room(
    largest: list[tuple[torch.dtype, float]], wanted: float, unit: float
) -> None:
    assert Reduced([], largest).unit(wanted) == unit


def test_a_limit_may_leave_less_room() -> None:
    reduced = Reduced([], [(SINGLE, 8.0)])
    assert reduced.unit(SCALE, 65504.0) == SCALE / 16
    assert reduced.fits(limit=8.0)
    assert not reduced.fits(limit=7.0)
