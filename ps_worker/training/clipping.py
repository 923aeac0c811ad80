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

Under BSP the servers tell their parts of the reduced gradient's norm:

    seals --committed, with squares--> norm over all tables --> UpdateScale on each of them

    - All of it happens on the background thread as answers come: whoever waits for the step waits
      for this too, and a wait that expires has nothing to take up again.
    - The norm is summed exactly (`math.fsum`), so whatever the tables' ranges are, it is the same;
      all workers were told the same numbers, so they find the same scale.
    - A worker that was told too little, since its step came too late, says nothing: others do.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ps_worker.steps.steps import PushTicket, StepResult

if TYPE_CHECKING:
    from ps_worker.steps.steps import TableHandle

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


EPSILON = 1e-6
"""Added to the norm, as torch does."""


def norm_of(squares: Sequence[float]) -> float:
    """The root of their sum; infinite if that is too large."""
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:
        return math.inf


def scale_of(norm: float, max_norm: float) -> float:
    """What makes a gradient of that norm as long as `max_norm` at most; NaN if it is no number."""
    scale = max_norm / (norm + EPSILON)
    return 1.0 if scale > 1.0 else scale


class UpdateScaling:
    """Scales the updates of one step on several tables, as soon as their norm is known.

    Args:
        steps: the tables and the tickets of their steps, sealed with a `clip_scale`.
        max_norm: the largest norm, above 0.

    Attributes:
        tickets: to be waited for beside those of the steps, in their order.
        norm: of the reduced gradient; None before it is known, and where no update waited.
    """

    def __init__(
        self,
        steps: Sequence[tuple[TableHandle, PushTicket]],
        max_norm: float,
    ) -> None:
        self.norm: float | None = None
        self.tickets = [
            PushTicket(ticket.table, ticket.clock, Future(), lambda: True) for _, ticket in steps
        ]
        self._steps = list(steps)
        self._max_norm = max_norm
        self._lock = threading.Lock()
        self._open_count = len(self._steps)
        for _, ticket in self._steps:
            ticket.future.add_done_callback(self._ended)

    def _ended(self, _future: Future[StepResult]) -> None:
        with self._lock:
            self._open_count -= 1
            if self._open_count:
                return
        if any(ticket.future.exception() is not None for _, ticket in self._steps):
            for (_, ticket), promise in zip(self._steps, self.tickets, strict=True):
                promise.future.set_result(StepResult(ticket.clock, False, 0))  # nobody looks at it
            return
        results = [ticket.future.result() for _, ticket in self._steps]
        squares = [square for result in results for square in result.squares.values()]
        if squares and all(map(self._is_whole, results, self._steps)):
            self.norm = norm_of(squares)
        for result, (handle, _), promise in zip(results, self._steps, self.tickets, strict=True):
            if self.norm is None or not result.squares:
                promise.future.set_result(result)
                continue
            said = handle.steps.scale(result.clock, scale_of(self.norm, self._max_norm))
            said.future.add_done_callback(partial(_pass_on, promise.future))

    @staticmethod
    def _is_whole(result: StepResult, step: tuple[TableHandle, PushTicket]) -> bool:
        """Whether every range told its part, or none did."""
        return len(result.squares) in (0, step[0].table.block_count)


def _pass_on(to: Future[StepResult], future: Future[StepResult]) -> None:
    failure = future.exception()
    if failure is None:
        to.set_result(future.result())
    else:
        to.set_exception(failure)
