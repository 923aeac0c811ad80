"""The scale that a loss scaler leaves on an optimizer."""

from __future__ import annotations

import pytest
import torch

from ps_core.errors import InvalidConfig
from ps_worker.training.tables.step_scale import StepScale, amp_scale_of
from tests.unit.table_client import parameter


def scaled(scale: float, *, is_found: bool) -> torch.optim.SGD:
    """As `GradScaler.step` gives it to an optimizer that takes scales."""
    optimizer = torch.optim.SGD([parameter(1.0)], lr=1.0)
    optimizer.__dict__["grad_scale"] = torch.tensor(scale)
    optimizer.__dict__["found_inf"] = torch.tensor(float(is_found))
    return optimizer


def test_a_step_has_the_inverse_of_the_loss_scale() -> None:
    assert amp_scale_of(scaled(2.0**16, is_found=False)) == StepScale(2.0**-16)
    assert amp_scale_of(scaled(2.0**-127, is_found=False)) == StepScale(2.0**127)
    assert amp_scale_of(torch.optim.SGD([parameter(1.0)], lr=1.0)) == StepScale()


@pytest.mark.parametrize("scale", [2.0**16, 2.0**-128, 0.0])
def test_a_step_that_is_skipped_has_no_scale(scale: float) -> None:
    """Each such step halves it, until its inverse is an infinity, which no seal takes."""
    assert amp_scale_of(scaled(scale, is_found=True)) == StepScale(skip=True)


@pytest.mark.parametrize("scale", [2.0**-128, 0.0])
def test_a_step_that_counts_is_refused_with_such_a_scale_before_any_table_is_sealed(
    scale: float,
) -> None:
    with pytest.raises(InvalidConfig, match="whose inverse is not finite; expected a new scaler"):
        amp_scale_of(scaled(scale, is_found=False))
