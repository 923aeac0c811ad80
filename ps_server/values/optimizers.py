"""The optimizers' arithmetic on one block, exact and fast.

Exact kernels call torch.optim's own functional implementation (the default one on a CPU: a loop
over single tensors). Its operations round each element by itself, so a vector gives the same bits
however it is cut. Fast kernels call torch's fused CPU kernels, one pass over memory; those round
the scalar tail of a vector differently from its SIMD part, so they only run on multiples of 64
elements. RMSprop has no fused kernel: its fast one is the exact arithmetic without the temporaries.

Rules:
    - A tensor that is absent from an update is skipped as torch skips ``grad is None``: its values,
      its optimizer state and its step count stay, and weight decay does not act on it.
    - Every (block, tensor) counts its own steps. SGD counts 1 once it has a momentum buffer: torch
      makes that of the first gradient seen while momentum is not 0. RMSprop's arithmetic knows no
      step; they are counted for `state_dict`.
    - State is made when a block first needs it, filled as torch fills it.

Invariants:
    OPT-1  The result for an element depends on its own history only: not on the block size, on the
           cut between servers, on its neighbours or their presence, nor on the number of threads.
    OPT-2  A gradient is only read.

Reference: DESIGN's measurements of torch's fused, foreach and single-tensor kernels; `torch.optim`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from ps_core.limits import BLOCK_ALIGNMENT_ELEMENTS
from ps_core.tables.optimizers import Kernels, OptimizerKind, OptimizerSpec
from ps_server.values.buffer_pool import BufferPool

HyperparameterValues = Mapping[str, float]
"""All of an optimizer's hyperparameters by name."""

Mask = npt.NDArray[np.bool_]
"""A mask over a block's segments: true where one is present."""

Steps = int | npt.NDArray[np.int64]
"""Steps that the segments of a block have taken: one number if all are equal, else one a segment.
"""

StepsT = TypeVar("StepsT", int, npt.NDArray[np.int64])

_Function = Callable[..., Any]

_MAX_RUN_COUNT = 32
"""Most runs of segments for each step count. Beyond it the kernel runs on the whole block, and its
effect on the others is undone: a run costs 20 us, and a step count four passes.
"""


def padded_length(length: int) -> int:
    """`length` rounded up to the alignment of blocks."""
    return -(-length // BLOCK_ALIGNMENT_ELEMENTS) * BLOCK_ALIGNMENT_ELEMENTS


@dataclass(slots=True)
class BlockState:
    """The values and the optimizer state of one block.

    Shapes:
        values: flat, padded to a multiple of 64; owned by this object.
        slots: optimizer state by torch's name of it, each like `values`.
        bounds: segment i is elements [bounds[i], bounds[i + 1]); the last is the block's length.
        length: elements without the padding.
    """

    values: Tensor
    bounds: npt.NDArray[np.int64]
    steps: Steps = 0
    slots: dict[str, Tensor] = field(default_factory=dict)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = int(self.bounds[-1])

    @property
    def segment_count(self) -> int:
        return len(self.bounds) - 1

    def segment_steps(self) -> npt.NDArray[np.int64]:
        """A copy of the steps that each segment has taken."""
        return np.broadcast_to(np.int64(self.steps), self.segment_count).copy()

    def set_segment_steps(self, steps: npt.ArrayLike) -> None:
        counts = np.asarray(steps, dtype=np.int64)
        self.steps = int(counts[0]) if (counts == counts[0]).all() else counts

    @property
    def step_counts(self) -> tuple[int, ...]:
        """One number if all segments have taken as many steps, else one for each."""
        return (self.steps,) if isinstance(self.steps, int) else tuple(self.steps.tolist())

    @property
    def state_bytes(self) -> int:
        """Bytes of values and optimizer state, padding included."""
        return self.values.nbytes + sum(slot.nbytes for slot in self.slots.values())


class KernelInput(NamedTuple):
    """Equally long cuts of a block and of its gradient, for one kernel call."""

    values: Tensor
    gradient: Tensor
    slots: Mapping[str, Tensor]
    steps: int


class _Kernel(ABC):
    """The arithmetic of one optimizer.

    Attributes:
        names: the hyperparameters that torch's function takes.
        flags: the settings of the spec that it takes, beside `maximize`.
        is_fused: it must run on multiples of 64 elements.
    """

    names: ClassVar[tuple[str, ...]]
    flags: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, spec: OptimizerSpec, pool: BufferPool, exact: _Function, fused: _Function | None
    ) -> None:
        self._spec = spec
        self._pool = pool
        self.is_fused = spec.kernels is Kernels.FAST and fused is not None
        self._function = fused if fused is not None and self.is_fused else exact
        self._fixed = {name: getattr(spec, name) for name in ("maximize", *self.flags)}
        if not self.is_fused:
            self._fixed["foreach"] = False
        # Refilling the tensor from which torch reads a step count costs a third of making it.
        self._step = torch.zeros((), dtype=torch.float32)

    @abstractmethod
    def fills(self, hyperparameters: HyperparameterValues) -> Mapping[str, float]:
        """The optimizer state that a step needs, and its initial values."""

    def steps_after(self, steps: StepsT, _hyperparameters: HyperparameterValues) -> StepsT | int:
        return steps + 1

    @abstractmethod
    def run(self, given: KernelInput, hyperparameters: HyperparameterValues) -> None:
        """One step on `given`, in place."""

    def _options(self, hyperparameters: HyperparameterValues) -> dict[str, Any]:
        return {**self._fixed, **{name: hyperparameters[name] for name in self.names}}

    def _steps(self, given: KernelInput) -> list[Tensor]:
        """The step count as the function takes it: a fused one counts the step itself, too."""
        return [self._step.fill_(given.steps + self.is_fused)]


class Optimizer:
    """Runs a table's kernel, one of `KERNELS`, on blocks."""

    def __init__(self, spec: OptimizerSpec, pool: BufferPool) -> None:
        kernel, exact, fused = KERNELS[spec.kind]
        self._kernel = kernel(spec, pool, exact, fused)

    def apply(
        self,
        state: BlockState,
        gradient: Tensor,
        present: Mask | None,
        hyperparameters: HyperparameterValues,
    ) -> None:
        """One step on the present tensors of a block.

        Shapes:
            gradient: like `state.values`, zeros behind the block's end; read only. What it holds
                for absent tensors does not matter.
            present: a mask over the segments; None means all.
        """
        kernel = self._kernel
        for name, fill in kernel.fills(hyperparameters).items():
            if name not in state.slots:
                state.slots[name] = torch.full_like(state.values, fill)
        steps = state.steps
        if present is None and isinstance(steps, int):
            end = state.values.numel() if kernel.is_fused else state.length
            kernel.run(_kernel_input(state, gradient, (0, end, steps)), hyperparameters)
            state.steps = kernel.steps_after(steps, hyperparameters)
        else:
            self._apply_in_part(state, gradient, present, hyperparameters)
        if "clamp_min" in hyperparameters or "clamp_max" in hyperparameters:
            low, high = hyperparameters.get("clamp_min"), hyperparameters.get("clamp_max")
            _clamp(state, present, low, high)

    def _apply_in_part(
        self,
        state: BlockState,
        gradient: Tensor,
        present: Mask | None,
        hyperparameters: HyperparameterValues,
    ) -> None:
        """One step on segments that are not all present, or have taken different steps."""
        kernel = self._kernel
        steps = state.segment_steps()
        here = np.ones(len(steps), dtype=np.bool_) if present is None else present
        counts = np.where(here, steps, -1)
        distinct = np.unique(steps[here])
        runs = _runs(state.bounds, counts)
        if len(runs) > _MAX_RUN_COUNT * len(distinct):
            for count in distinct.tolist():
                with _only(state, counts == count):
                    whole = _kernel_input(state, gradient, (0, state.values.numel(), count))
                    kernel.run(whole, hyperparameters)
        else:
            for run in runs:
                if not kernel.is_fused:
                    kernel.run(_kernel_input(state, gradient, run), hyperparameters)
                    continue
                begin, end, count = run
                low, high = begin - begin % BLOCK_ALIGNMENT_ELEMENTS, padded_length(end)
                with _kept(state, (low, begin), (end, min(high, state.length))):
                    kernel.run(_kernel_input(state, gradient, (low, high, count)), hyperparameters)
        steps[here] = kernel.steps_after(steps[here], hyperparameters)
        state.set_segment_steps(steps)


@contextmanager
def _only(state: BlockState, mask: Mask) -> Iterator[None]:
    """Undo at the end what was done to segments outside the mask."""
    outside = torch.ones(state.values.numel(), dtype=torch.bool)
    outside[: state.length] = torch.from_numpy(np.repeat(~mask, np.diff(state.bounds)))
    saved = [(tensor, tensor.clone()) for tensor in (state.values, *state.slots.values())]
    yield
    for tensor, before in saved:
        torch.where(outside, before, tensor, out=tensor)


@contextmanager
def _kept(state: BlockState, *sides: tuple[int, int]) -> Iterator[None]:
    """Undo at the end what was done to neighbours of a run, which its 64-aligned hull has."""
    touched = [state.values, *state.slots.values()]
    cuts = [tensor[low:high] for low, high in sides if low < high for tensor in touched]
    saved = [(cut, cut.clone()) for cut in cuts]
    yield
    for neighbour, before in saved:
        neighbour.copy_(before)


def initial_state_value(optimizer: OptimizerSpec, name: str) -> float:
    """The initial value of each element of a state."""
    if optimizer.kind is OptimizerKind.ADAGRAD and name == "sum":
        # The table's number: torch reads it when the optimizer is made, and never again.
        return dict(optimizer.merged(()))["initial_accumulator_value"]
    return 0.0


def _clamp(state: BlockState, present: Mask | None, low: float | None, high: float | None) -> None:
    """As `torch.clamp_` of the present tensors; what is behind the block's end stays zero."""
    runs = [(0, state.length, 0)]
    if present is not None:
        runs = _runs(state.bounds, np.where(present, 0, -1))
    for begin, end, _ in runs:
        state.values[begin:end].clamp_(low, high)


def _kernel_input(state: BlockState, gradient: Tensor, run: tuple[int, int, int]) -> KernelInput:
    begin, end, steps = run
    if begin == 0 and end == state.values.numel() == gradient.numel():
        return KernelInput(state.values, gradient, state.slots, steps)
    slots = {name: slot[begin:end] for name, slot in state.slots.items()}
    return KernelInput(state.values[begin:end], gradient[begin:end], slots, steps)


def _runs(
    bounds: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> list[tuple[int, int, int]]:
    """The maximal runs (begin, end, steps) of equal step counts; those below 0 are absent."""
    firsts = np.flatnonzero(np.diff(counts, prepend=-1, append=-1))
    found = zip(bounds[firsts[:-1]], bounds[firsts[1:]], counts[firsts[:-1]], strict=True)
    return [(int(begin), int(end), int(steps)) for begin, end, steps in found if steps >= 0]


class _Sgd(_Kernel):
    names = ("lr", "momentum", "dampening", "weight_decay")
    flags = ("nesterov",)

    def fills(self, hyperparameters: HyperparameterValues) -> Mapping[str, float]:
        return {"momentum_buffer": 0.0} if hyperparameters["momentum"] != 0 else {}

    def steps_after(self, steps: StepsT, hyperparameters: HyperparameterValues) -> StepsT | int:
        return 1 if hyperparameters["momentum"] != 0 else steps

    def run(self, given: KernelInput, hyperparameters: HyperparameterValues) -> None:
        tensors = [given.values], [given.gradient]
        kept = given.slots.get("momentum_buffer")
        options = self._options(hyperparameters)
        if self.is_fused:
            buffers = [kept] if hyperparameters["momentum"] != 0 else []
            self._function(*tensors, buffers, is_first_step=given.steps == 0, **options)
            return
        buffers = [kept if given.steps else None]
        self._function(*tensors, buffers, **options)
        if kept is not None and buffers[0] is not None and buffers[0] is not kept:
            kept.copy_(buffers[0])


class _Adam(_Kernel):
    names = ("lr", "beta1", "beta2", "eps", "weight_decay")
    flags = ("amsgrad",)

    def fills(self, _hyperparameters: HyperparameterValues) -> Mapping[str, float]:
        names = ["exp_avg", "exp_avg_sq"]
        return dict.fromkeys([*names, "max_exp_avg_sq"] if self._spec.amsgrad else names, 0.0)

    def run(self, given: KernelInput, hyperparameters: HyperparameterValues) -> None:
        largest = [given.slots["max_exp_avg_sq"]] if self._spec.amsgrad else []
        moments = [given.slots["exp_avg"]], [given.slots["exp_avg_sq"]], largest
        tensors = [given.values], [given.gradient], *moments
        self._function(*tensors, self._steps(given), **self._options(hyperparameters))


class _Adagrad(_Kernel):
    names = ("lr", "lr_decay", "eps", "weight_decay")

    @cached_property
    def _sum(self) -> Mapping[str, float]:
        return {"sum": initial_state_value(self._spec, "sum")}

    def fills(self, _hyperparameters: HyperparameterValues) -> Mapping[str, float]:
        return self._sum

    def run(self, given: KernelInput, hyperparameters: HyperparameterValues) -> None:
        tensors = [given.values], [given.gradient], [given.slots["sum"]]
        self._function(*tensors, self._steps(given), **self._options(hyperparameters))


class _Rmsprop(_Kernel):
    names = ("lr", "alpha", "eps", "weight_decay", "momentum")
    flags = ("centered",)

    def fills(self, hyperparameters: HyperparameterValues) -> Mapping[str, float]:
        names = ["square_avg"]
        if self._spec.centered:
            names.append("grad_avg")
        if hyperparameters["momentum"] > 0:
            names.append("momentum_buffer")
        return dict.fromkeys(names, 0.0)

    def run(self, given: KernelInput, hyperparameters: HyperparameterValues) -> None:
        if self._spec.kernels is Kernels.FAST:
            self._run_fast(given, hyperparameters)
            return
        slots = given.slots
        averages = [slots["grad_avg"]] if self._spec.centered else []
        buffers = [slots["momentum_buffer"]] if hyperparameters["momentum"] > 0 else []
        tensors = [given.values], [given.gradient], [slots["square_avg"]], averages, buffers
        self._function(*tensors, self._steps(given), **self._options(hyperparameters))

    def _run_fast(self, given: KernelInput, hyperparameters: HyperparameterValues) -> None:
        """Torch's single-tensor arithmetic, operation by operation, into pooled scratch."""
        values, gradient, square = given.values, given.gradient, given.slots["square_avg"]
        lr, alpha = hyperparameters["lr"], hyperparameters["alpha"]
        # Sizes are powers of two, so that the runs of changing presence do not fill the pool.
        size = 1 << (values.numel() - 1).bit_length()
        buffers = [self._pool.take(size, values.dtype)]
        scratch = buffers[0][: values.numel()]
        if self._spec.maximize or hyperparameters["weight_decay"] != 0:
            buffers.append(self._pool.take(size, values.dtype))
            adjusted = buffers[1][: values.numel()]
            gradient = self._adjusted(given, hyperparameters["weight_decay"], adjusted)
        square.mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
        if self._spec.centered:
            average = given.slots["grad_avg"].lerp_(gradient, 1 - alpha)
            torch.addcmul(square, average, average, value=-1, out=scratch).sqrt_()
        else:
            torch.sqrt(square, out=scratch)
        scratch.add_(hyperparameters["eps"])
        if hyperparameters["momentum"] > 0:
            buffer = given.slots["momentum_buffer"].mul_(hyperparameters["momentum"])
            values.add_(buffer.addcdiv_(gradient, scratch), alpha=-lr)
        else:
            values.addcdiv_(gradient, scratch, value=-lr)
        for used in buffers:
            self._pool.give_back(used)

    def _adjusted(self, given: KernelInput, weight_decay: float, out: Tensor) -> Tensor:
        gradient = torch.neg(given.gradient, out=out) if self._spec.maximize else given.gradient
        if weight_decay == 0:
            return gradient
        return torch.add(gradient, given.values, alpha=weight_decay, out=out)


KERNELS: dict[OptimizerKind, tuple[type[_Kernel], _Function, _Function | None]] = {
    OptimizerKind.SGD: (_Sgd, sgd, torch._fused_sgd_),
    OptimizerKind.ADAM: (_Adam, adam, torch._fused_adam_),
    OptimizerKind.ADAMW: (_Adam, adamw, torch._fused_adamw_),
    OptimizerKind.ADAGRAD: (_Adagrad, adagrad, torch._fused_adagrad_),
    OptimizerKind.RMSPROP: (_Rmsprop, rmsprop, None),
}
