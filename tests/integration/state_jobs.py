"""What workers do with optimizer state, and one process that does the same with torch alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import ps_worker as ps
from tests.integration.training_jobs import Values, optimizer_for
from tests.integration.training_models import Branched, batches, seeded, values

STEPS = 6
StateDict = dict[str, Any]

PAIRS: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (ps.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        ps.SGD(lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "adam": (ps.Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    "amsgrad": (
        ps.AdamW(lr=0.01, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    ),
    "adagrad": (
        ps.Adagrad(lr=0.05, initial_accumulator_value=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    ),
    "rmsprop": (
        ps.RMSprop(lr=0.01, momentum=0.5, centered=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    ),
}


def is_long(step: int, rank: int, first_at: int = 0) -> bool:
    """Whether a rank's step uses the branch: at first nobody's does, until step `first_at`."""
    return step >= first_at and (step * rank) % 2 == 0


@dataclass
class OneProcess:
    """All workers' gradients, and torch's own optimizer."""

    kind: str
    worker_count: int = 2
    first_at: int = 0
    model: Any = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.model = seeded(Branched)
        self.optimizer = PAIRS[self.kind][1](self.model.parameters())

    def train(self, first: int, last: int) -> list[Values]:
        """The parameters after each of these steps."""
        inputs = [list(batches(STEPS, rank=rank)) for rank in range(self.worker_count)]
        history = []
        for step in range(first, last):
            sums: dict[torch.Tensor, torch.Tensor] = {}
            for rank in range(self.worker_count):
                self.model.zero_grad()
                x, uses = inputs[rank][step], is_long(step, rank, self.first_at)
                self.model(x, is_long=uses).square().mean().backward()
                for p in self.model.parameters():
                    if p.grad is not None:
                        sums[p] = sums[p] + p.grad if p in sums else p.grad.clone()
            for p in self.model.parameters():
                p.grad = sums[p] * torch.tensor(1.0 / self.worker_count) if p in sums else None
            self.optimizer.step()
            history.append(values(self.model))
        return history


def copied(state: Any) -> Any:
    """As a script's own torch.save and torch.load leave it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def train(
    client: ps.Client,
    name: str,
    kind: str,
    steps: tuple[int, int],
    *,
    saved: tuple[StateDict, StateDict] | None = None,
    first_at: int = 0,
    **options: Any,
) -> tuple[list[Values], StateDict, StateDict]:
    """The parameters after each step, and what a script saves in the end.

    Args:
        client: the worker's.
        name: the optimizer's.
        kind: which of `PAIRS`.
        steps: from which to which.
        saved: of the model, loaded before the optimizer is made, and of the optimizer.
        first_at: as `is_long`.
        options: the optimizer's.
    """
    model = seeded(Branched)
    if saved is not None:
        model.load_state_dict(saved[0])
    optimizer = optimizer_for(client, model, name=name, optimizer=PAIRS[kind][0], **options)
    if saved is not None:
        optimizer.load_state_dict(saved[1])
    history = []
    for step, x in list(enumerate(batches(STEPS, rank=client.rank)))[slice(*steps)]:
        optimizer.zero_grad()
        uses = is_long(step, client.rank, first_at)
        model(x, is_long=uses).square().mean().backward()
        optimizer.step()
        history.append(values(model))
    kept = copied({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    optimizer.close()
    return history, kept["model"], kept["optimizer"]
