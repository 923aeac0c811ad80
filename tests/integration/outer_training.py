"""A small training with `Outer`, and the same in one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

import ps_worker as ps
from ps_worker.spec.optimizers import ServerOptimizer

WORKERS = 2
INNER_STEPS = 3
ADAMW = partial(torch.optim.AdamW, lr=0.02)
SGD = partial(torch.optim.SGD, lr=1.0)

Values = list[torch.Tensor]
_names = count()


def new_name() -> str:
    return f"model-{next(_names)}"


class Quadratic(nn.Module):
    """Its gradients are element by element, so they have the same bits in every process."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)  # its own: threads share the default one
        self.weight = nn.Parameter(torch.randn(20, 30, generator=draw))
        self.bias = nn.Parameter(torch.randn(30, generator=draw))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(2))

    def loss(self, rank: int, step: int) -> torch.Tensor:
        """A quarter of the way to the worker's own place, which is near 1."""
        draw = torch.Generator().manual_seed(1000 * rank + step)
        self.seen += 1 + rank
        return torch.stack([
            (each - 1 - 0.1 * torch.randn(each.shape, generator=draw)).square().sum() / 8
            for each in self.parameters()
        ]).sum()  # fmt: skip


def values_of(model: nn.Module) -> Values:
    return [parameter.detach().clone() for parameter in model.parameters()]


def is_same(first: Values, second: Values) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def differences(first: Values, second: Values) -> list[str]:
    """Words for the tensors that differ: how many elements do, where, and by how much at most."""
    found = []
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        places = (a != b).flatten().nonzero().flatten()
        if len(places):
            most = float((a.double() - b.double()).abs().max())
            shown = places[:8].tolist()
            found.append(
                f"tensor {number}: {len(places)} elements ({shown}), by {most:.3g} at most"
            )
    return found


def adamw(inner_steps: int = INNER_STEPS, **outer: Any) -> ps.Outer:
    return ps.Outer(ADAMW, inner_steps=inner_steps, **outer)


class Trainer:
    """One worker's loop; `history` has the parameters after each inner step."""

    def __init__(
        self, client: ps.Client, name: str, optimizer: ServerOptimizer, **options: Any
    ) -> None:
        self.client = client
        self.model = Quadratic(client.rank)
        options = {"kernels": "exact", "block_elements": 128, **options}
        self.optimizer = ps.DistributedOptimizer(
            client, self.model, optimizer, name=name, **options
        )
        model = self.optimizer.trained_model
        self.step_count = model.inner_steps.per_clock * model.clock
        self.history: list[Values] = []

    def step(self) -> Values:
        self.optimizer.zero_grad()
        self.model.loss(self.client.rank, self.step_count).backward()
        self.optimizer.step()
        self.step_count += 1
        self.history.append(values_of(self.model))
        return self.history[-1]


class Twin:
    """All workers and servers in one process, with the servers' arithmetic."""

    def __init__(self, outer: ps.Outer) -> None:
        self.models = [Quadratic() for _ in range(WORKERS)]
        self.locals = [outer.factory([{"params": list(m.parameters())}]) for m in self.models]
        self.anchors = values_of(self.models[0])
        self.servers = torch.optim.SGD(
            self.anchors, outer.lr, outer.momentum, nesterov=outer.nesterov, foreach=False
        )
        self.history: list[list[Values]] = [[] for _ in self.models]

    def step(self, step: int, clip_norm: float | None = None) -> None:
        for rank, (model, local) in enumerate(zip(self.models, self.locals, strict=True)):
            local.zero_grad()
            model.loss(rank, step).backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            local.step()
            self.history[rank].append(values_of(model))

    @torch.no_grad()
    def outer_step(self) -> None:
        for anchor, *own in zip(self.anchors, *(m.parameters() for m in self.models), strict=True):
            anchor.grad = torch.stack([anchor - each for each in own]).sum(0) / len(own)
        self.servers.step()
        for model, history in zip(self.models, self.history, strict=True):
            for parameter, anchor in zip(model.parameters(), self.anchors, strict=True):
                parameter.copy_(anchor)
            history[-1] = values_of(model)


def twin(outer: ps.Outer, steps: int) -> list[list[Values]]:
    """What each worker has after each step."""
    found = Twin(outer)
    for step in range(steps):
        found.step(step)
        if (step + 1) % outer.inner_steps == 0:
            found.outer_step()
    return found.history


def together(clients: list[ps.Client], work: Callable[[ps.Client], Any]) -> list[Any]:
    """Do `work` at all workers at once; what each gave, by rank."""
    with ThreadPoolExecutor(len(clients)) as threads:
        return list(threads.map(work, clients))
