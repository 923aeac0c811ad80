"""A process: one of several workers that train a perceptron, under DDP or on a cluster."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import ps_worker as ps
from ps_cli.bench.contenders.child import Actions

INPUT_COUNT, CLASS_COUNT = 784, 10
LEARNING_RATE = 1e-3


def perceptron(width: int) -> nn.Sequential:
    """Two hidden layers of `width`, the same in each process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUT_COUNT, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASS_COUNT),
    )


class _Training:
    """Steps on random images of this worker's own."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, sizes: tuple[int, int]
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        batch, self._step_count = sizes
        draws = torch.Generator().manual_seed(rank)
        self._images = torch.randn(batch, INPUT_COUNT, generator=draws)
        self._classes = torch.randint(CLASS_COUNT, (batch,), generator=draws)
        self.loss = 0.0

    def steps(self) -> float:
        """Take the steps; the seconds of one."""
        began_s = time.perf_counter()
        for _ in range(self._step_count):
            self._optimizer.zero_grad()
            guesses: Tensor = self._model(self._images)
            loss = nn.functional.cross_entropy(guesses, self._classes)
            loss.backward()
            self._optimizer.step()
        self.loss = float(loss)
        return (time.perf_counter() - began_s) / self._step_count

    def parameter_sum(self) -> float:
        return float(sum(each.detach().double().sum() for each in self._model.parameters()))


def _actions(training: _Training) -> Actions:
    return {
        "steps": training.steps,
        "sum": training.parameter_sum,
        "loss": lambda: training.loss,
        "parameters": lambda: sum(each.numel() for each in training._model.parameters()),
    }


@contextlib.contextmanager
def ddp(store: str, rank: str, worker_count: str, width: str, *sizes: str) -> Iterator[Actions]:
    """Under DDP with gloo, and torch's fused Adam."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(worker_count)
    )
    model = DistributedDataParallel(perceptron(int(width)), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
    batch, step_count = map(int, sizes)
    yield _actions(_Training(model, optimizer, int(rank), (batch, step_count)))
    distributed.destroy_process_group()


@contextlib.contextmanager
def member(
    scheduler: str, lane: str, rank: str, overlap: str, width: str, *sizes: str
) -> Iterator[Actions]:
    """A worker of a cluster; `overlap`: "overlap" lets pulls overlap the next forward pass."""
    torch.set_num_threads(1)
    with ps.connect(scheduler, rank=int(rank), lane=lane) as client:
        model = perceptron(int(width))
        optimizer = ps.DistributedOptimizer(
            client, model, ps.Adam(lr=LEARNING_RATE), overlap_pull=overlap == "overlap"
        )
        batch, step_count = map(int, sizes)
        training = _Training(model, optimizer, int(rank), (batch, step_count))
        yield {**_actions(training), "lane": lambda: client.progress().lane}
