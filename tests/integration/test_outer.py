"""Outer: each worker trains by itself for some steps, and the servers average what they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker as ps

WORKERS = 2
INNER_STEPS = 3
ADAMW = partial(torch.optim.AdamW, lr=0.02)

Values = list[torch.Tensor]
_names = count()


@pytest.fixture(scope="module", params=["shm", pytest.param("grpc", marks=pytest.mark.second_lane)])
def workers(request: pytest.FixtureRequest) -> Iterator[list[ps.Client]]:
    with ps.local_cluster(servers=2, workers=WORKERS) as cluster:
        clients = [
            ps.connect(cluster.address, rank=rank, lane=request.param) for rank in range(WORKERS)
        ]
        yield clients
        for client in clients:
            client.close(leave=False)


class Quadratic(nn.Module):
    """Its gradients are element by element, so they have the same bits in every process."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)  # its own: threads share the default one
        self.weight = nn.Parameter(torch.randn(20, 30, generator=draw))
        self.bias = nn.Parameter(torch.randn(30, generator=draw))

    def loss(self, rank: int, step: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(1000 * rank + step)
        distances = (each - torch.randn(each.shape, generator=draw) for each in self.parameters())
        return torch.stack([each.square().sum() for each in distances]).sum()


def values_of(model: nn.Module) -> Values:
    return [parameter.detach().clone() for parameter in model.parameters()]


def together(workers: list[ps.Client], train: Callable[[ps.Client], Any]) -> list[Any]:
    """Train at all workers at once; the name is new in each call."""
    with ThreadPoolExecutor(len(workers)) as threads:
        return list(threads.map(train, workers))


def train(
    client: ps.Client, outer: ps.Outer, name: str, steps: int, **options: Any
) -> list[Values]:
    """The parameters after each inner step."""
    model = Quadratic(seed=client.rank)
    optimizer = ps.DistributedOptimizer(
        client, model, outer, name=name, block_elements=128, **options
    )
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        model.loss(client.rank, step).backward()
        optimizer.step()
        history.append(values_of(model))
    optimizer.close()
    return history


def twin(outer: ps.Outer, steps: int) -> list[list[Values]]:
    """What each worker of one process has after each step, with the arithmetic of the servers."""
    models = [Quadratic(seed=0) for _ in range(WORKERS)]
    locals_ = [outer.factory([{"params": list(model.parameters())}]) for model in models]
    anchors = [parameter.detach().clone() for parameter in models[0].parameters()]
    servers = torch.optim.SGD(
        anchors, lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov, foreach=False
    )
    history = []
    for step in range(steps):
        for rank, (model, local) in enumerate(zip(models, locals_, strict=True)):
            local.zero_grad()
            model.loss(rank, step).backward()
            local.step()
        if (step + 1) % outer.inner_steps == 0:
            for anchor, *moved in zip(anchors, *(m.parameters() for m in models), strict=True):
                total = sum(anchor - each.detach() for each in moved)
                assert isinstance(total, torch.Tensor)
                anchor.grad = total / len(models)
            servers.step()
            with torch.no_grad():
                for model in models:
                    for parameter, anchor in zip(model.parameters(), anchors, strict=True):
                        parameter.copy_(anchor)
        history.append([values_of(model) for model in models])
    return history


def is_same(first: Values, second: Values) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("nesterov", [True, False])
def test_two_workers_have_the_bits_of_one_process(workers: list[ps.Client], nesterov: bool) -> None:
    outer = ps.Outer(ADAMW, inner_steps=INNER_STEPS, lr=0.7, momentum=0.9, nesterov=nesterov)
    steps, name = 4 * INNER_STEPS + 1, f"model-{next(_names)}"
    found = together(workers, lambda c: train(c, outer, name, steps, kernels="exact"))
    expected = twin(outer, steps)
    for step in range(steps):
        for rank in range(WORKERS):
            assert is_same(found[rank][step], expected[step][rank]), f"{step=} {rank=}"
        is_outer = (step + 1) % INNER_STEPS == 0
        assert is_same(found[0][step], found[1][step]) == is_outer
