"""A process: a byte LSTM in training, alone or on a cluster."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import ps_worker as ps
from ps_cli.bench.contenders.child import Actions
from ps_cli.bench.devices import CUDA
from ps_runtime.grpc.channels import tune_allocator
from ps_runtime.system.capacity import usable_core_count

BYTE_COUNT = 256
LEARNING_RATE = 1e-3

PLAIN, TUNED = "plain", "tuned"
"""Ways to train alone: as any script, and with the allocator settings of `ps_worker`."""


def on_all_cores(run: Callable[[], float]) -> float:
    """Do it while torch has all cores, and not as many as in the others; in the main thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(usable_core_count())
    try:
        return run()
    finally:
        torch.set_num_threads(before)


class ByteModel(nn.Module):
    """An LSTM that predicts the next byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTE_COUNT, width // 2)
        self.memory = nn.LSTM(width // 2, width, batch_first=True)
        self.guess = nn.Linear(width, BYTE_COUNT)

    def loss(self, text: Tensor) -> Tensor:
        """Mean nats per byte of windows of shape (batch, length + 1)."""
        remembered, _ = self.memory(self.embedding(text[:, :-1]))
        logits: Tensor = self.guess(remembered)
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


@dataclass(frozen=True, slots=True)
class Shape:
    """The device of a training, and the sizes of its model, its batches and its runs."""

    device: str
    width: int
    batch: int
    length: int
    step_count: int


class _Training:
    """Steps on random text; only the optimizer differs between alone and on a cluster."""

    def __init__(self, model: ByteModel, optimizer: torch.optim.Optimizer, shape: Shape) -> None:
        self._model = model
        self._optimizer = optimizer
        self._shape = shape

    def steps(self) -> float:
        """Take the steps; the seconds of one."""
        return self._run(self._optimizer.step)

    def bare_steps(self) -> float:
        """Forward and backward without an update; the seconds of one."""
        return self._run(lambda: None)

    def detection(self) -> float:
        """Look for the script's edits once more than `step` does; the seconds of one look."""
        optimizer, looks_s = self._optimizer, 0.0
        tables = optimizer._tables if isinstance(optimizer, ps.DistributedOptimizer) else []

        def look_and_step() -> None:
            nonlocal looks_s
            began_s = time.perf_counter()
            for table in tables:
                table.edited(looks=True)
            looks_s += time.perf_counter() - began_s
            optimizer.step()

        self._run(look_and_step)
        return looks_s / self._shape.step_count

    def _run(self, update: Callable[[], object]) -> float:
        began_s = time.perf_counter()
        for _ in range(self._shape.step_count):
            size = (self._shape.batch, self._shape.length + 1)
            text = torch.randint(BYTE_COUNT, size, device=self._shape.device)
            self._optimizer.zero_grad()
            self._model.loss(text).backward()
            update()
        if self._shape.device == CUDA:
            torch.cuda.synchronize()
        return (time.perf_counter() - began_s) / self._shape.step_count


def _transfer(client: ps.Client, device: str, element_count: int) -> Callable[[], float]:
    """A function that pushes and pulls as many values as the model has, and returns the seconds;
    no computation hides them. Values of a CUDA device go through pinned memory.
    """
    table = client.create_table("transfer", element_count, optimizer=ps.Adam(lr=LEARNING_RATE))
    is_far = device == CUDA
    gradient = torch.full((element_count,), 1e-3, pin_memory=is_far)
    values = torch.full((element_count,), 0.0, pin_memory=is_far)
    far_gradient, far_values = gradient.to(device), values.to(device)

    def round_trip() -> float:
        began_s = time.perf_counter()
        if is_far:
            gradient.copy_(far_gradient)
        ticket = client.push(table, gradient, copy=False)
        client.pull(table, out=values)
        client.wait(ticket)
        if is_far:
            far_values.copy_(values)
        return time.perf_counter() - began_s

    return round_trip


@contextlib.contextmanager
def training(way: str, scheduler: str, device: str, *sizes: str) -> Iterator[Actions]:
    """A training; the way is plain, tuned, or a lane, and the sizes are those of `Shape`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = Shape(device, *map(int, sizes))
    model = ByteModel(shape.width).to(device)
    element_count = sum(parameter.numel() for parameter in model.parameters())
    if way in (PLAIN, TUNED):
        if way == TUNED:
            tune_allocator()
        plain = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        fused = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
        alone = _Training(model, fused, shape)
        yield {
            "steps": _Training(model, plain, shape).steps,
            "fused steps": alone.steps,
            "all cores steps": partial(on_all_cores, alone.steps),
            "bare steps": alone.bare_steps,
            "parameters": lambda: element_count,
        }
        return
    with ps.connect(scheduler, lane=way) as client:
        optimizer = ps.DistributedOptimizer(client, model, ps.Adam(lr=LEARNING_RATE))
        together = _Training(model, optimizer, shape)
        yield {
            "steps": together.steps,
            "detection": together.detection,
            "transfer": _transfer(client, device, element_count),
            "lane": lambda: client.progress().lane,
        }
