"""What a step's gradients count for: the inverse of the loss scale, 1 without one; or nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ps_core.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class StepScale:
    """What this worker's gradients are multiplied by; whether the step takes no part at all, and
    why, if that is an error; what clips them where they are not reduced first.
    """

    contribution_scale: float = 1.0
    skip: bool = False
    problem: str = ""
    clip_scale: float | None = None


def amp_scale_of(optimizer: torch.optim.Optimizer) -> StepScale:
    """What `torch.amp.GradScaler` left on the optimizer for this call of `step`."""
    found_inf: torch.Tensor | None = getattr(optimizer, "found_inf", None)
    grad_scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    skip = found_inf is not None and bool(found_inf.item())
    if grad_scale is None:
        return StepScale(skip=skip)
    # The inverse as GradScaler.unscale_ computes it, so that the products have the same bits.
    return StepScale(float(grad_scale.double().reciprocal().float()), skip)


def check_unscaled(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a closure whose gradients `torch.amp.GradScaler` has not seen.

    Raises:
        InvalidConfig: the scaler looked for overflows before the closure was called.
    """
    if getattr(optimizer, "found_inf", None) is not None:
        raise InvalidConfig(
            "GradScaler.step was given a closure: it looks for overflows before that is called, "
            "which torch refuses too; expected no closure, or no scaler (bfloat16 needs none)"
        )
