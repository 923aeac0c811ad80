"""Clipping by global norm: one norm over all gradients of an optimizer, as
`torch.nn.utils.clip_grad_norm_` has it.

    whose gradient                       where                                            by what
    the worker's own: SSP, ASP           on the servers, as they take the step            its scale
    the reduced one: BSP                 on the servers, as they apply the update         its scale
    the worker's own: `Add`              here, before the local optimizer                 in place
    the reduced one: `Aggregate` (BSP)   at every worker, before the local optimizer      in place

A factor that travels with the seal leaves the gradients as they are, so that blocks stream out
while backward runs although nobody knows the norm yet.

Rules:
    - Gradients of half precision count in float32, where squares do not overflow.
    - The reduced gradient has the same bits at every worker, and so has what is computed here from
      it: tensor by tensor, whatever the cut into blocks, on equal kinds of device.

What it deliberately does not do: the norm of a gradient whose parts lie on several servers
(`update_scaling` does).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

_HALF = (torch.float16, torch.bfloat16)


class Clip(NamedTuple):
    """The norm of a gradient, and what the gradient is to be multiplied by."""

    norm: float
    factor: float


def clip_of(parameters: Iterable[torch.Tensor], max_norm: float, scale: float) -> Clip:
    """How this worker's own gradients are clipped, each of them times `scale`.

    Blocking: until the devices have computed the norm.
    """
    gradients = [
        parameter.grad.float() if parameter.grad.dtype in _HALF else parameter.grad
        for parameter in parameters
        # What is not dense is refused by name when it is staged.
        if parameter.grad is not None and parameter.grad.layout is torch.strided
    ]
    norm = torch.nn.utils.get_total_norm(gradients) * scale
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    found = torch.stack([norm, factor]).tolist()  # one transfer from the device
    return Clip(*found)


def multiply_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """All gradients times `factor`, in place."""
    if factor == 1.0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def clip_reduced(parameters: Iterable[torch.Tensor], max_norm: float) -> float:
    """Clips the reduced gradient, which is in `.grad`, in place.

    Returns:
        The norm before; if that is not finite the gradients are no numbers either, as torch has it.

    Blocking: until the devices have computed the norm.
    """
    return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
