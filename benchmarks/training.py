"""In a process of its own: a byte LSTM in training, alone or on a cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

import ps_worker as ps
from benchmarks.child import obey, open_answers

BYTE_COUNT = 256
LEARNING_RATE = 1e-3


class ByteModel(nn.Module):
    """An LSTM that says how likely each byte follows those before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTE_COUNT, width // 2)
        self.memory = nn.LSTM(width // 2, width, batch_first=True)
        self.guess = nn.Linear(width, BYTE_COUNT)

    def loss(self, text: Tensor) -> Tensor:
        """Mean nats a byte of windows of shape (batch, length + 1)."""
        remembered, _ = self.memory(self.embedding(text[:, :-1]))
        logits: Tensor = self.guess(remembered)
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


class _Training:
    """Steps on random text; only the optimizer differs between alone and on a cluster."""

    def __init__(self, model: ByteModel, optimizer: torch.optim.Optimizer, shape: Shape) -> None:
        self._model = model
        self._optimizer = optimizer
        self._shape = shape

    def steps(self) -> float:
        """Take the steps; seconds of one of them."""
        began_s = time.perf_counter()
        for _ in range(self._shape.step_count):
            text = torch.randint(BYTE_COUNT, (self._shape.batch, self._shape.length + 1))
            self._optimizer.zero_grad()
            self._model.loss(text).backward()
            self._optimizer.step()
        return (time.perf_counter() - began_s) / self._shape.step_count


class Shape:
    """The sizes of a training: model, batch, and steps a run."""

    def __init__(self, width: str, batch: str, length: str, step_count: str) -> None:
        self.width = int(width)
        self.batch = int(batch)
        self.length = int(length)
        self.step_count = int(step_count)


def _transfer(client: ps.Client, element_count: int) -> Callable[[], float]:
    """Push and pull as many values as the model has, with nothing to hide behind; seconds."""
    table = client.create_table("transfer", element_count, optimizer=ps.Adam(lr=LEARNING_RATE))
    gradient = np.full(element_count, 1e-3, dtype=np.float32)
    values = np.zeros(element_count, dtype=np.float32)

    def round_trip() -> float:
        began_s = time.perf_counter()
        ticket = client.push(table, gradient, copy=False)
        client.pull(table, out=values)
        client.wait(ticket)
        return time.perf_counter() - began_s

    return round_trip


def main() -> None:
    """`SCHEDULER WIDTH BATCH LENGTH STEPS`; an empty SCHEDULER trains alone."""
    scheduler, *sizes = sys.argv[1:]
    answers = open_answers()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = Shape(*sizes)
    model = ByteModel(shape.width)
    element_count = sum(parameter.numel() for parameter in model.parameters())
    if not scheduler:
        alone = _Training(model, torch.optim.Adam(model.parameters(), lr=LEARNING_RATE), shape)
        obey(answers, {"steps": alone.steps, "parameters": lambda: element_count})
        return
    with ps.connect(scheduler) as client:
        optimizer = ps.DistributedOptimizer(client, model, ps.Adam(lr=LEARNING_RATE))
        together = _Training(model, optimizer, shape)
        obey(answers, {"steps": together.steps, "transfer": _transfer(client, element_count)})


if __name__ == "__main__":
    main()
