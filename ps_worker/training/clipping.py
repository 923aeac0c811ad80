"""Clipping by global norm: one norm over all gradients of an optimizer, as in
`torch.nn.utils.clip_grad_norm_`.

    gradient                             place                                            means
    the worker's own: SSP, ASP           on the servers, as they take the step            its scale
    the reduced one: BSP                 on the servers, as they apply the update         its scale
    the worker's own: `Add`              here, before the local optimizer                 in place
    the reduced one: `Aggregate` (BSP)   at every worker, before the local optimizer      in place

A scale that travels with the seal leaves the gradients unchanged, so that blocks can leave while
backward runs, before the norm is known.

Rules:
    - Gradients of half precision are squared in float32, where squares do not overflow.
    - The reduced gradient has the same bits at every worker, and so has its norm: it is computed
      tensor by tensor, whatever the cut into blocks, on equal kinds of device.

Under BSP the servers send the squares of their blocks of the reduced gradient:

    seals --committed, with squares--> norm over all tables --> UpdateScale on each of them

    - All of it happens on the background thread as answers come: a wait for the step includes it,
      and a wait that expires has nothing to resume.
    - The norm is summed exactly (`math.fsum`), whatever the tables' ranges are; all workers get the
      same squares, so they compute the same scale.
    - A worker that lacks squares, because its step came too late, sends no scale: others do.
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
    """The norm of a gradient, and the factor that clips it."""

    norm: float
    factor: float


def clip_of(parameters: Iterable[torch.Tensor], max_norm: float, scale: float) -> Clip:
    """The norm and the factor of this worker's own gradients, each times `scale`. Waits for the
    devices.
    """
    gradients = [
        parameter.grad.float() if parameter.grad.dtype in _HALF else parameter.grad
        for parameter in parameters
        # Staging refuses gradients that are not dense, by name.
        if parameter.grad is not None and parameter.grad.layout is torch.strided
    ]
    norm = torch.nn.utils.get_total_norm(gradients) * scale
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    found = torch.stack([norm, factor]).tolist()  # one transfer from the device
    return Clip(*found)


def multiply_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply all gradients in place."""
    if factor == 1.0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def clip_reduced(parameters: Iterable[torch.Tensor], max_norm: float) -> float:
    """Clip the reduced gradient, which is in `.grad`, in place; returns its norm. A norm that is
    not finite makes the gradients NaN, as in torch. Waits for the devices.
    """
    return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))


EPSILON = 1e-6
"""Added to the norm, as in torch."""


def norm_of(squares: Sequence[float]) -> float:
    """The root of the squares' sum; infinite if that overflows."""
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:
        return math.inf


def scale_of(norm: float, max_norm: float) -> float:
    """The factor that shortens a gradient of that norm to `max_norm`, at most 1; NaN for NaN."""
    scale = max_norm / (norm + EPSILON)
    return 1.0 if scale > 1.0 else scale


class UpdateScaling:
    """Scales the updates of one step on several tables, as soon as their norm is known.

    Args:
        steps: the tables and the tickets of their steps, sealed with a `clip_scale`.
        max_norm: the largest norm, above 0.

    Attributes:
        tickets: to wait for beside those of the steps, in their order.
        norm: of the reduced gradient; None before it is known, and if no update waited.
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
            for own in self.tickets:
                own.future.set_result(StepResult(own.clock, False, 0))  # not used
            return
        results = [ticket.future.result() for _, ticket in self._steps]
        squares = [square for result in results for square in result.squares.values()]
        if squares and all(map(self._is_whole, results, self._steps)):
            self.norm = norm_of(squares)
        for result, (handle, _), own in zip(results, self._steps, self.tickets, strict=True):
            if self.norm is None or not result.squares:
                own.future.set_result(result)
                continue
            scaled = handle.steps.scale(result.clock, scale_of(self.norm, self._max_norm))
            scaled.future.add_done_callback(partial(_pass_on, own.future))

    @staticmethod
    def _is_whole(result: StepResult, step: tuple[TableHandle, PushTicket]) -> bool:
        """True if the result has the squares of all blocks, or of none."""
        return len(result.squares) in (0, step[0].table.block_count)


def _pass_on(to: Future[StepResult], future: Future[StepResult]) -> None:
    failure = future.exception()
    if failure is None:
        to.set_result(future.result())
    else:
        to.set_exception(failure)
