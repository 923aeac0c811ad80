"""Clipping by global norm: one norm over all gradients of an optimizer, as in
`torch.nn.utils.clip_grad_norm_`.

    gradient                             place                                            means
    the worker's own: SSP, ASP           on the servers, as they take the step            its scale
    the reduced one: BSP                 on the servers, as they apply the update         its scale
    the worker's own: `Add`, `Outer`     here, before the local optimizer                 in place
    the reduced one: `Aggregate` (BSP)   at every worker, before the local optimizer      in place

A scale that travels with the seal leaves the gradients unchanged, so that blocks can leave while
backward runs, before the norm is known. The reduced gradient has the same bits at every worker, and
so has its norm: it is computed tensor by tensor, whatever the cut into blocks, on equal kinds of
device. A sparse gradient (`nn.Embedding(sparse=True)`), which a local optimizer may take, counts as
the dense one that it stands for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ps_core.consistency import Consistency, Mode
from ps_core.errors import InvalidConfig
from ps_worker.spec.training_options import TrainingOptions
from ps_worker.steps.steps import PushTicket, StepFuture, StepResult
from ps_worker.training.tables.inspection import stored_values
from ps_worker.training.tables.step_scale import StepScale

if TYPE_CHECKING:
    from ps_worker.steps.steps import TableHandle
    from ps_worker.training.tables.trained_table import TrainedTable
    from ps_worker.training.trained_rows import TrainedRows

_HALF = (torch.float16, torch.bfloat16)
"""Squared in float32, where squares do not overflow; a copy in float32 would be twice as large."""

_EPSILON = 1e-6
"""Added to the norm, as in torch."""


def total_norm(gradients: Iterable[torch.Tensor | None], scale: float) -> torch.Tensor:
    """The norm of all gradients, each times `scale`, on their device: one element."""
    # Staging refuses another layout by name, and sparse ones too, unless the local optimizer takes
    # them.
    stored = (stored_values(each) for each in gradients if each is not None)
    dense = [values for values in stored if values is not None]
    halves = [each for each in dense if each.dtype in _HALF]
    of_halves = iter(torch._foreach_norm(halves, 2.0, torch.float32) if halves else ())
    counted = [next(of_halves) if each.dtype in _HALF else each for each in dense]
    return torch.nn.utils.get_total_norm(counted) * scale  # a number is its own norm


def norm_and_factor(
    gradients: Iterable[torch.Tensor | None], max_norm: float, scale: float
) -> tuple[float, float]:
    """The norm of this worker's own gradients, each times `scale`, and the factor that clips them.
    Waits for the devices.
    """
    norm = total_norm(gradients, scale)
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    found, clips = torch.stack([norm, factor]).tolist()  # one transfer from the device
    return found, clips


def multiply_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    if factor == 1.0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


class ClippedModel(Protocol):
    """The parts of a `TrainedModel` that its gradients' scale depends on."""

    options: TrainingOptions
    tables: list[TrainedTable]
    rows: list[TrainedRows]
    inner: torch.optim.Optimizer | None
    adds: bool
    gradient_norm: float | None

    @property
    def moves(self) -> bool: ...

    @property
    def clock(self) -> int: ...

    def settings(self) -> Iterable[Consistency]: ...

    def non_finite_rows(self) -> str: ...


def scaled_step(
    model: ClippedModel, scale: StepScale, groups: Sequence[Mapping[str, Any]]
) -> StepScale:
    """The scale for a step's seal, after the loss scale and clipping. What a seal cannot carry is
    multiplied into the gradients, in place.

    Raises:
        InvalidConfig: a loss scale in eager mode under SSP or ASP, which apply blocks on arrival.
    """
    options = model.options
    if options.applies_on_arrival and scale != StepScale():
        raise InvalidConfig(
            "loss scaling needs steps that count as a whole; expected mode='sealed', got "
            f"'eager' under {options.consistency}"
        )
    max_norm = options.clip_norm
    clips = max_norm is not None and (model.inner is None or model.moves)
    if scale.skip:
        return replace(scale, clip_scale=1.0 if clips and not model.moves else None)
    if model.moves:
        _multiply(model, groups, scale.contribution_scale)
        scale = StepScale()
    if max_norm is None or not clips:
        return _seen_by_local(model, scale)
    return _clipped(model, scale, groups, max_norm)


def _seen_by_local(model: ClippedModel, scale: StepScale) -> StepScale:
    """A step with a gradient that is not finite is skipped before the local optimizer of `Add` sees
    it, whose state would have it for good. That of `Outer` may: to look in each inner step would
    wait for the device.
    """
    if not model.adds or model.options.allow_non_finite:
        return scale
    words = _non_finite_gradient(model)
    return replace(scale, skip=True, problem=words) if words else scale


def _clipped(
    model: ClippedModel, scale: StepScale, groups: Sequence[Mapping[str, Any]], max_norm: float
) -> StepScale:
    """Clip this worker's own gradients, by their scale if possible, else in place. Under BSP the
    servers clip the reduced gradient instead; they know the consistency of this clock.
    """
    dense = (parameter.grad for group in groups for parameter in group["params"])
    gradients = [*dense, *(rows.norm_part() for rows in model.rows)]
    norm, factor = norm_and_factor(gradients, max_norm, scale.contribution_scale)
    model.gradient_norm = norm
    if not math.isfinite(norm) and not model.options.allow_non_finite:
        problem = scale.told(_not_finite(model, norm))
        return StepScale(1.0, True, problem, None if model.moves else 1.0)
    if model.moves:
        _multiply(model, groups, factor)
        return scale
    if scale.contribution_scale * factor > 0.0:
        return replace(scale, clip_scale=factor)
    # A seal cannot carry NaN or 0.
    if any(setting.mode is not Mode.BSP for setting in model.settings()):
        _multiply(model, groups, factor)
    return replace(scale, clip_scale=1.0)


def _multiply(model: ClippedModel, groups: Sequence[Mapping[str, Any]], factor: float) -> None:
    """Multiply this worker's own gradients in place."""
    multiply_gradients((each for group in groups for each in group["params"]), factor)
    for rows in model.rows:
        rows.multiply(factor)


def _not_finite(model: ClippedModel, norm: float) -> str:
    """Words for a gradient that is not finite, or for their norm."""
    step = f"step {1 + model.clock} of '{model.options.name}'"
    return _non_finite_gradient(model) or f"the norm of the gradients is {norm} at {step}"


def _non_finite_gradient(model: ClippedModel) -> str:
    """Words for a gradient that is not finite; empty if all are."""
    found = filter(None, (table.non_finite_gradient() for table in model.tables))
    return next(found, "") or model.non_finite_rows()


class UpdateScaling:
    """Scales the updates of one BSP step on several tables, sealed with a `clip_scale`, as soon as
    their norm is known: the servers commit the seals with the squares of the reduced gradient.

    All of it happens on the background thread as answers come: a wait for the step includes it, and
    a wait that expires has nothing to resume. The norm is summed exactly, whatever the tables'
    ranges are; all workers get the same squares, so they compute the same scale. A worker whose
    pushes were refused gets them too, and sends the scale as the others: perhaps each of them was
    refused something. One that lacks squares, because its step came too late or its seal was
    refused, sends no scale: others do.

    Attributes:
        tickets: to wait for beside those of the steps, in their order.
        norm: of the reduced gradient; None before it is known, and if no update waited.
    """

    def __init__(self, steps: Sequence[tuple[TableHandle, PushTicket]], max_norm: float) -> None:
        self.norm: float | None = None
        self.tickets = [
            PushTicket(ticket.table, ticket.clock, Future(), lambda: True) for _, ticket in steps
        ]
        self._steps = steps
        self._max_norm = max_norm
        self._ended_counts = itertools.count(1)
        for _, ticket in steps:
            ticket.future.add_done_callback(self._ended)

    def _ended(self, _future: Future[StepResult]) -> None:
        if next(self._ended_counts) < len(self._steps):
            return
        told = [_squares_of(ticket.future) for _, ticket in self._steps]
        is_whole = all(
            each is not None and len(each) in (0, handle.table.block_count)
            for each, (handle, _) in zip(told, self._steps, strict=True)
        )
        squares = [square for each in told if each for square in each.values()]
        if squares and is_whole:
            self.norm = _norm_of(squares)
        for own_squares, (handle, step), own in zip(told, self._steps, self.tickets, strict=True):
            if self.norm is None or not own_squares:
                if step.future.exception() is None:
                    own.future.set_result(step.future.result())
                else:
                    own.future.set_result(StepResult(own.clock, False, 0))  # not used
                continue
            factor = min(self._max_norm / (self.norm + _EPSILON), 1.0)  # NaN for NaN
            if not (math.isfinite(factor) or handle.spec.allow_non_finite):
                factor = 0.0  # NaN would be refused, and the update wait for ever
            scaled = handle.steps.scale(own.clock, factor)
            scaled.future.add_done_callback(partial(_pass_on, own.future))


def scaled_updates(
    steps: Sequence[tuple[TrainedTable | TrainedRows, PushTicket]], max_norm: float | None
) -> UpdateScaling | None:
    """Scale the updates of these steps, which wait for their norm, as soon as it is known; the
    tables wait for that with them.
    """
    if not steps or max_norm is None:
        return None
    scaling = UpdateScaling([(part.handle, ticket) for part, ticket in steps], max_norm)
    for (part, _), ticket in zip(steps, scaling.tickets, strict=True):
        part.pending.add(ticket)
    return scaling


def _squares_of(step: Future[StepResult]) -> Mapping[int, float] | None:
    """The squares that a step was told that has ended; None if its seals did not end."""
    if step.exception() is None:
        return step.result().squares
    return step.squares if isinstance(step, StepFuture) else None


def _norm_of(squares: Sequence[float]) -> float:
    """The root of the squares' sum; infinite if that overflows."""
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:
        return math.inf


def _pass_on(to: Future[StepResult], future: Future[StepResult]) -> None:
    failure = future.exception()
    if failure is None:
        to.set_result(future.result())
    else:
        to.set_exception(failure)
