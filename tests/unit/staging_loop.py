"""A training loop around one table's staging, and a device that is slow to copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ps_core.keys import TableId
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_worker.spec.flat_layout import TORCH_DTYPE, dtype_of, layout_of
from ps_worker.spec.settings import tensors_of
from ps_worker.spec.values import BlockValues
from ps_worker.training.tables.device_copies import Moves, to_host
from ps_worker.training.tables.inspection import ColumnSums, true_numbers
from ps_worker.training.tables.staging import CopyToHost, GradientStaging


class Loop:
    """A table's staging with real hooks; `left` is what backward let go."""

    def __init__(
        self, *parameters: nn.Parameter, accumulate: int = 1, copy: CopyToHost = to_host
    ) -> None:
        self.parameters = parameters
        dtype = dtype_of("p0", parameters[0])
        layout = layout_of("t", dtype, [(f"p{i}", p) for i, p in enumerate(parameters)])
        assert layout is not None
        spec = TableSpec(
            "t", dtype, layout.element_count, OptimizerSpec(OptimizerKind.SGD), 64,
            tensors_of("", layout.shapes()),
        ).validated()  # fmt: skip
        self.table = Table(TableId(1), 0, spec)
        self.staging = GradientStaging(layout, self.table, accumulate, copy=copy)
        self.left: list[BlockValues] = []
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(index))

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        return lambda _: self.left.extend(self.staging.hooked(index))

    def backward(self, *used: int, scale: float = 1.0) -> list[int]:
        self.left.clear()
        loss = sum(((self.parameters[i] * scale) ** 2).sum() for i in used)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return [part.block for part in self.left]

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.staging.discard()

    def held(self, parts: list[BlockValues]) -> dict[int, torch.Tensor]:
        dtype = TORCH_DTYPE[self.table.spec.dtype]
        return {p.block: torch.frombuffer(bytearray(p.payload), dtype=dtype) for p in parts}


def ones(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


def has_changed(before: ColumnSums, tensor: torch.Tensor) -> bool:
    """True if a tensor has other sums than it had."""
    return bool(true_numbers(ColumnSums([tensor.numel()]).differing(before, [(0, tensor)])))


def sums_of(tensor: torch.Tensor) -> ColumnSums:
    sums = ColumnSums([tensor.numel()])
    sums.take([(0, tensor)])
    return sums


@dataclass(eq=False)
class SlowCopy:
    """Copies that a `SlowDevice` has been given together."""

    device: SlowDevice
    moves: Moves
    has_ended: bool = False

    def query(self) -> bool:
        return self.has_ended

    def synchronize(self) -> None:
        while not self.has_ended:
            self.device.run_one()


class SlowDevice:
    """Copies in order, as a CUDA stream does, always `lag_count` copies behind; what it reads is
    the source as it is when its turn comes.
    """

    def __init__(self, lag_count: int) -> None:
        self._lag_count = lag_count
        self._queue: deque[SlowCopy] = deque()

    @property
    def waiting_count(self) -> int:
        return len(self._queue)

    def copy(self, moves: Moves) -> SlowCopy:
        given = SlowCopy(self, moves)
        self._queue.append(given)
        while len(self._queue) > self._lag_count:
            self.run_one()
        return given

    def run_one(self) -> None:
        first = self._queue.popleft()
        for target, source in first.moves:
            target.copy_(source)
        first.has_ended = True
