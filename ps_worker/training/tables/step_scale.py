"""The scale of a step's gradients: the inverse of the loss scale, 1 without one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

import torch

from ps_core.errors import InvalidConfig

_Self = TypeVar("_Self", bound=torch.optim.Optimizer)
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StepScale:
    """The scale of this worker's gradients in a step.

    Attributes:
        contribution_scale: a factor of the gradients.
        skip: the step takes no part in the update.
        problem: the reason of `skip`, if it is an error.
        clip_scale: the factor that clips this worker's own gradients.
    """

    contribution_scale: float = 1.0
    skip: bool = False
    problem: str = ""
    clip_scale: float | None = None

    def told(self, problem: str) -> str:
        """Words for a gradient that is refused, with what helps if a loss scale may have made it so
        large: `torch.amp.GradScaler` skips the step for a parameter's that is not finite, and knows
        no rows and no codecs.
        """
        if not problem or self.contribution_scale >= 1.0:  # 1, or the size of a group
            return problem
        return (
            f"{problem}. GradScaler knows no rows and no codecs: if its scale was too large, lower "
            "it by scaler.update(scaler.get_scale() / 2)"
        )


def amp_scale_of(optimizer: torch.optim.Optimizer, rows: str = "") -> StepScale:
    """The scale that `torch.amp.GradScaler` left on the optimizer for this call of `step`.

    Args:
        rows: the name of an embedding table that the optimizer steps, if any.

    Raises:
        InvalidConfig: `GradScaler.unscale_` was called, which leaves rows scaled; or it has found
            no gradient, and could not look for overflows; or its scale has no finite inverse.
    """
    found_inf: torch.Tensor | int | None = getattr(optimizer, "found_inf", None)
    grad_scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    if found_inf is not None and not isinstance(found_inf, torch.Tensor):  # a sum of nothing
        beside = f" It does not look at rows of '{rows}'." if rows else ""
        raise InvalidConfig(
            f"GradScaler has found no parameter with a gradient.{beside} Expected one, or no "
            "scaler: autocast in bfloat16 needs none"
        )
    skip = found_inf is not None and bool(found_inf.item())
    if rows and is_unscaled(optimizer):
        raise InvalidConfig(
            f"GradScaler.unscale_ was called, which does not reach rows of '{rows}': remove the "
            "call, and clip by the optimizer's clip_norm= in place of clip_grad_norm_"
        )
    if grad_scale is None or skip:
        return StepScale(skip=skip)
    # The inverse as GradScaler.unscale_ computes it, so that the products have the same bits.
    inverse = float(grad_scale.double().reciprocal().float())
    if not math.isfinite(inverse):
        raise InvalidConfig(
            f"GradScaler's scale is {float(grad_scale):g}, whose inverse is not finite; expected a "
            "new scaler: each skipped step has lowered this one"
        )
    return StepScale(inverse)


def is_unscaled(optimizer: torch.optim.Optimizer) -> bool:
    """True if `GradScaler.unscale_` was called before this call of `step`."""
    has_scaler = getattr(optimizer, "found_inf", None) is not None
    return has_scaler and getattr(optimizer, "grad_scale", None) is None


def forgets_scale(
    step: Callable[Concatenate[_Self, _P], _T],
) -> Callable[Concatenate[_Self, _P], _T]:
    """An optimizer's `step` that leaves no loss scale behind when it raises.

    `GradScaler` gives the optimizer a scale for one call, and takes it back only from a call that
    returns. It multiplies the next by what is there: that step's gradients would count too little
    by the whole loss scale.
    """

    @functools.wraps(step)
    def forgetting(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return step(self, *args, **kwargs)
        except BaseException:
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            raise

    return forgetting


def check_unscaled(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a closure whose gradients `torch.amp.GradScaler` has not seen: the scaler looked for
    overflows before it was called.
    """
    if getattr(optimizer, "found_inf", None) is not None:
        raise InvalidConfig(
            "GradScaler.step was given a closure: it looks for overflows before that is called, "
            "which torch refuses too; expected no closure, or no scaler (bfloat16 needs none)"
        )
