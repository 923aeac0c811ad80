"""Workers whose gradients are clipped, and what one process makes of the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import ps_worker as ps
from tests.integration.training_models import Branched, batches, seeded, values

WORKERS = 2
STEPS = 6
MAX_NORM = 0.25
"""Some of the gradients' norms are below it."""

DEADLINE_S = 20.0
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

names = count()


def _warm_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def _one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS + 1)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a worker comes by its gradient."""

    passes: int = 1
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] = _warm_up
    autocast: torch.dtype | None = None
    overflow_at: int = -1
    """The step in which worker 1 multiplies its loss by infinity; with a scaler."""


RECIPES = {
    "plain": Recipe(),
    "accumulated": Recipe(passes=3, schedule=_one_cycle),
    "bfloat16": Recipe(autocast=torch.bfloat16, overflow_at=2),
    "float16": Recipe(passes=2, autocast=torch.float16, overflow_at=3),
}


class Side:
    """A model with the optimizer that is stepped, its schedule and its scaler."""

    def __init__(self, rank: int, recipe: Recipe, make: Callable[[Any], Any]) -> None:
        self.rank = rank
        self.recipe = recipe
        self.model: Any = seeded(Branched)
        self.optimizer: Any = make(self.model)
        self.schedule = recipe.schedule(self.optimizer)
        self.scaler = torch.amp.GradScaler(
            "cpu", enabled=recipe.autocast is not None, init_scale=2.0**8, growth_interval=2
        )
        self._inputs = list(batches(STEPS * recipe.passes, rank=rank))

    def backward(self, step: int) -> None:
        recipe = self.recipe
        self.optimizer.zero_grad()
        for number in range(recipe.passes):
            x = self._inputs[step * recipe.passes + number]
            with torch.autocast("cpu", recipe.autocast, enabled=recipe.autocast is not None):
                loss = self.model(x, is_long=step % 2 == 0).square().mean() / recipe.passes
            if (step, self.rank) == (recipe.overflow_at, 1):
                loss = loss * float("inf")
            self.scaler.scale(loss).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()

    def unscaled(self) -> dict[str, torch.Tensor] | None:
        """The gradients that there are; None if they overflowed."""
        self.scaler.unscale_(self.optimizer)
        found = {
            name: parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        return found if all(g.isfinite().all() for g in found.values()) else None


def ours(
    client: ps.Client, recipe: Recipe, optimizer: Any, name: str, **options: Any
) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        return ps.DistributedOptimizer(
            client,
            model,
            optimizer,
            **{
                "name": name,
                "clip_norm": MAX_NORM,
                "accumulate": recipe.passes,
                "kernels": "exact",
                "block_elements": 64,
                **options,
            },
        )

    return make


def sides_of(
    workers: Sequence[ps.Client], recipe: Recipe, optimizer: Any, **options: Any
) -> list[Side]:
    """One for each worker, of one model."""
    name = f"clip-{next(names)}"
    return [
        Side(rank, recipe, ours(client, recipe, optimizer, name, **options))
        for rank, client in enumerate(workers)
    ]


def train_together(
    workers: Sequence[ps.Client], recipe: Recipe, optimizer: Any, **options: Any
) -> list[list[dict[str, torch.Tensor]]]:
    """The parameters after each step of each worker, under BSP."""

    def train(side: Side) -> list[dict[str, torch.Tensor]]:
        history = []
        for step in range(STEPS):
            side.backward(step)
            side.step()
            history.append(values(side.model))
        return history

    with ThreadPoolExecutor(WORKERS) as threads:
        return list(threads.map(train, sides_of(workers, recipe, optimizer, **options)))


def as_torch(parameters: Iterator[torch.Tensor]) -> None:
    """Clips them as torch does, whose norm is a float32."""
    clip_grad_norm_(parameters, MAX_NORM)


def mean_clipped(
    recipe: Recipe, factory: Any, clip: Callable[[Iterator[torch.Tensor]], None] = as_torch
) -> Iterator[dict[str, torch.Tensor]]:
    """One process: the mean of the workers' gradients, in rank order, clipped."""
    sides = [Side(rank, recipe, lambda m: factory(m.parameters())) for rank in range(WORKERS)]
    main = sides[0]
    for step in range(STEPS):
        found = []
        for side in sides:
            side.model.load_state_dict(main.model.state_dict())
            side.backward(step)
            found.append(side.unscaled())
        taking_part = [gradients for gradients in found if gradients is not None]
        for name, parameter in main.model.named_parameters():
            given = [gradients[name] for gradients in taking_part if name in gradients]
            total = sum(given[1:], given[0].clone()) if given else None
            parameter.grad = None if total is None else total * (1.0 / len(taking_part))
        clip(main.model.parameters())
        main.optimizer.step()
        main.schedule.step()
        for side in sides:
            side.scaler.update()
        yield values(main.model)
