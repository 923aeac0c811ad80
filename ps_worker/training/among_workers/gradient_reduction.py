"""Gradients that the workers reduce among themselves, by torch.distributed.

    each worker: gradients, and some numbers --one all-reduce a dtype--> their mean, everywhere
    each worker: .grad <--times its unit-- the mean, which is kept

Rules:
    - All workers have the same mean, bit for bit: they add up the same values in rank order, or one
      all-reduce gives all of them the same.
    - Gradients in float16 are added up in float32, and rounded again when they are given back: the
      small ones are zero in float16 without their loss scale. bfloat16 has all that float32 has.
    - A parameter that has no gradient at a worker counts as zero there; one without a gradient at
      any worker has none after it.
    - Parameters in DistributedDataParallel, and FSDP's, have been reduced by then, and are left
      alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ps_runtime.system.interrupts import uninterrupted
from ps_worker.training.among_workers.peers import Peers
from ps_worker.training.tables.inspection import largest_of

_DIRECT_BYTES = 1 << 20
"""Values of all workers that each worker gets, and adds up itself: one hop in place of gloo's six,
and 4 ms in place of 10 with four workers on two cores. Beyond this the bytes count for more.
"""

_Kind: TypeAlias = tuple[torch.device, torch.dtype]

Group: TypeAlias = "distributed.ProcessGroup | None"
"""torch's process group of some workers; None: of all."""


def is_sharded(parameter: torch.Tensor) -> bool:
    """True if each worker has a part of it, as under FSDP2."""
    tensors = sys.modules.get("torch.distributed.tensor")  # whose import takes a second
    return tensors is not None and isinstance(parameter, tensors.DTensor)


def own_part(value: Any) -> Any:
    """This worker's part of a sharded tensor; other values as they are, without their graph."""
    if not isinstance(value, torch.Tensor):
        return value
    found: Any = value.detach()
    return found.to_local() if is_sharded(value) else found


def whole(tensor: Any) -> torch.Tensor:
    """All of a sharded tensor, which every worker asks for; another one as it is."""
    found: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return found


def clip_together(parameters: Iterable[torch.Tensor], max_norm: float) -> float:
    """As torch's `clip_grad_norm_`, which refuses whole and sharded gradients beside each other.
    Every worker calls it. Returns the norm.
    """
    own = [each for each in parameters if each.grad is not None]
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for each in own:
        by_mesh.setdefault(getattr(each.grad, "device_mesh", None), []).append(each)
    if len(by_mesh) <= 1:
        return float(whole(torch.nn.utils.clip_grad_norm_(own, max_norm)))
    gradients = ([p.grad for p in some if p.grad is not None] for some in by_mesh.values())
    parts = [float(whole(torch.nn.utils.get_total_norm(each))) for each in gradients]
    norm = torch.linalg.vector_norm(torch.tensor(parts))
    for some in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(some, max_norm, norm)
    return float(norm)


def unwrapped(module: nn.Module) -> nn.Module:
    """The script's own module, which `torch.compile` or DistributedDataParallel has wrapped."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if isinstance(module, DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def reduced_elsewhere(module: nn.Module) -> set[torch.Tensor]:
    """The parameters whose gradients torch's own wrappers reduce."""
    found: set[torch.Tensor] = {each for each in module.parameters() if is_sharded(each)}
    for each in module.modules():
        if isinstance(each, DistributedDataParallel):
            left_out = each.parameters_to_ignore
            found |= {p for name, p in each.module.named_parameters() if name not in left_out}
    return found


class _Bucket:
    """The gradients of one dtype on one device, one behind the other, after some numbers.

    Attributes:
        dtype: the gradients'.
    """

    def __init__(self, kind: _Kind, parameters: Sequence[torch.Tensor], head_count: int) -> None:
        device, self.dtype = kind
        self.parameters = parameters
        count = head_count + sum(parameter.numel() for parameter in parameters)
        summed = torch.float32 if self.dtype is torch.float16 else self.dtype
        self.values = torch.zeros(count, dtype=summed, device=device)
        self.head, self.gradients = self.values[:head_count], self.values[head_count:]
        self._is_mean = False
        self._work: Any = None
        self._received: torch.Tensor | None = None
        self.views = []
        at = 0
        for parameter in parameters:
            self.views.append(self.gradients[at : at + parameter.numel()].view(parameter.shape))
            at += parameter.numel()

    def fill(self, scale: float) -> None:
        """Take in the gradients, times `scale`."""
        self._is_mean = False
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif scale == 1.0 or view.dtype is not self.dtype:
                view.copy_(parameter.grad.detach())
            else:
                torch.mul(parameter.grad.detach(), scale, out=view)
        if scale != 1.0 and self.values.dtype is not self.dtype:
            self.gradients.mul_(scale)

    def begin(self, worker_count: int, group: Group) -> None:
        """Begin to add up the workers' values; `finish` waits."""
        if self.values.is_cpu and worker_count * self.values.nbytes <= _DIRECT_BYTES:
            self._received = torch.empty((worker_count, len(self.values)), dtype=self.values.dtype)
            sent = self.values.expand_as(self._received).contiguous()
            self._work = distributed.all_to_all_single(
                self._received.view(-1), sent.view(-1), group=group, async_op=True
            )
        else:
            self._received = None
            self._work = distributed.all_reduce(self.values, group=group, async_op=True)

    def finish(self, peers: Peers) -> None:
        """Wait for the sums of the workers' values, in place of this worker's; raises as
        `Peers.wait`, and may be called again then.
        """
        if self._work is None:
            return
        peers.wait(self._work, is_cpu=self.values.is_cpu)
        with uninterrupted():
            self._work = None
            if self._received is not None:
                first, *others = self._received
                self.values.copy_(first)
                for other in others:
                    self.values += other

    def divide(self, worker_count: int) -> None:
        """Make the sums means, once."""
        if not self._is_mean:
            self.gradients.mul_(1.0 / worker_count)
            self._is_mean = True

    def give_back(self, counts: Iterator[float], unit: float) -> None:
        """Write the mean times `unit` into the gradients; `counts` says how many workers had
        each.
        """
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if not next(counts):
                parameter.grad = None
                continue
            mean = view if unit == 1.0 else view * unit
            if parameter.grad is None:
                parameter.grad = mean.to(self.dtype, copy=unit == 1.0)
            else:
                parameter.grad.copy_(mean)


class Reduced(NamedTuple):
    """The result of a reduction, the same at all workers.

    Attributes:
        control: the sums of the workers' numbers.
        largest: the largest magnitude of the mean, by the dtype of the gradients; NaN if it has
            one.
    """

    control: list[float]
    largest: list[tuple[torch.dtype, float]]

    def fits(self, unit: float = 1.0, limit: float = math.inf) -> bool:
        """True if the mean times `unit` is finite in the gradients' dtype, and within the limit."""
        return all(
            magnitude * unit <= min(torch.finfo(dtype).max, limit)
            for dtype, magnitude in self.largest
        )

    def unit(self, wanted: float, limit: float = math.inf) -> float:
        """The first of `wanted`, its half, a quarter and so on that it fits in; 1 at least, unless
        less is wanted.
        """
        unit = wanted
        while unit > 1.0 and not self.fits(unit, limit):
            unit = max(unit / 2, 1.0)
        return unit


class GradientReduction:
    """Reduces the gradients of these parameters, in this order; all workers have the same.

    Args:
        control_count: numbers that travel with them, small enough for their sums to be exact in
            float32.
        group: the process group of these workers.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        control_count: int,
        worker_count: int,
        group: Group = None,
    ) -> None:
        self._worker_count = worker_count
        self._group = group
        self._control_count = control_count
        kinds: dict[_Kind, list[torch.Tensor]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        self._parameters = [each for some in kinds.values() for each in some]
        device = self._parameters[0].device if self._parameters else _default_device()
        head_kind = device, torch.float32
        head_count = control_count + len(self._parameters)
        self._head = _Bucket(head_kind, kinds.get(head_kind, ()), head_count)
        self._buckets = [
            self._head if kind == head_kind else _Bucket(kind, some, 0)
            for kind, some in kinds.items()
        ]
        others = [bucket for bucket in self._buckets if bucket is not self._head]
        self._sent = [self._head, *others]  # in the same order everywhere
        self._counts: list[float] = []  # the workers that had each gradient

    def begin(self, control: Sequence[float], scale: float) -> None:
        """Begin to reduce the workers' gradients times `scale`; `finish` must follow."""
        present = [float(each.grad is not None) for each in self._parameters]
        self._head.head.copy_(torch.tensor([*control, *present]))
        for bucket in self._buckets:
            bucket.fill(scale)
        if self._worker_count > 1:
            for bucket in self._sent:
                bucket.begin(self._worker_count, self._group)

    def wait(self, peers: Peers) -> None:
        """Wait until every worker has called `begin`. Blocks and raises as `Peers.wait`; a call
        after that waits on.
        """
        for bucket in self._sent:
            bucket.finish(peers)

    def finish(self) -> Reduced:
        """Take the mean of the workers' gradients, once `wait` has ended. May be called again."""
        for bucket in self._buckets:
            bucket.divide(self._worker_count)
        largest = [(bucket.dtype, largest_of(bucket.gradients)) for bucket in self._buckets]
        head: list[float] = self._head.head.tolist()
        self._counts = head[self._control_count :]
        return Reduced(head[: self._control_count], largest)

    def give_back(self, unit: float = 1.0) -> None:
        """Write the mean times `unit` into all gradients, after `finish`, as often as it is called.
        None where no worker has one.
        """
        counts = iter(self._counts)
        for bucket in self._buckets:
            bucket.give_back(counts, unit)


def _default_device() -> torch.device:
    """The device on which the process group reduces numbers of no parameter."""
    if not distributed.is_initialized() or "gloo" in str(distributed.get_backend_config()):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
