"""A small training with everything that a checkpoint has to bring back, for the tests of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import ps_worker as ps

DEADLINE_S = 30.0


@dataclass
class Recipe:
    """What is trained, and how."""

    optimizer: Callable[[], Any] = lambda: ps.Adam(lr=1e-2)
    consistency: str = "bsp"
    lane: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    synchronizes: bool = False  # after every other step
    made: list[Any] = field(default_factory=list)


class Position:
    """Which examples a worker has seen: its own, and no other's."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


_one_at_a_time = threading.Lock()


def _model() -> nn.Module:
    with _one_at_a_time:  # workers are threads here, and torch's generator is one for all
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 6))


def train(client: ps.Client, recipe: Recipe, until: int, save_at: int = 0) -> nn.Module:
    """Train up to clock `until`; after step `save_at` every worker asks for a checkpoint."""
    model = _model()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 3e-3},
    ]
    optimizer = ps.DistributedOptimizer(
        client,
        groups,
        recipe.optimizer(),
        module=model,
        consistency=recipe.consistency,
        block_elements=64,
        **recipe.options,
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    noise, position = torch.Generator().manual_seed(50 + client.rank), Position()
    client.attach_state("schedule", schedule)
    client.attach_state("noise", ps.RandomState(noise=noise), per_rank=True)
    client.attach_state("position", position, per_rank=True)
    ticket = None
    while optimizer.clock < until:
        optimizer.zero_grad()
        examples = torch.randn(8, 20, generator=noise)
        loss = model(examples).square().mean() + position.seen * 1e-3 * model(examples).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        position.seen += 8
        if recipe.synchronizes and optimizer.clock % 2 == 0:
            optimizer.synchronize()
        client.save_point()
        if optimizer.clock == save_at:
            ticket = client.checkpoint("for the test")
    if ticket is not None:
        recipe.made.append(ticket.wait(DEADLINE_S))
    return model


def together(
    address: str, count: int, work: Callable[[ps.Client], Any], lane: str = "auto", **settings: Any
) -> list[Any]:
    """Do `work` at so many workers at once; what each gave, by rank."""

    def one(rank: int) -> Any:
        options: Any = {"rank": rank, "lane": lane, "request_deadline_s": DEADLINE_S, **settings}
        with ps.connect(address, **options) as client:
            return work(client)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def all_state(models: list[nn.Module]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """The same tensor of every model, one after the other."""
    for name in models[0].state_dict():
        yield name, [model.state_dict()[name] for model in models]
