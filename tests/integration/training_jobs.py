"""What the workers of a pool run in the optimizer tests; each returns what the test compares."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn

import ps_worker as ps
from tests.integration.training_models import BLOCK, Branched, batches, seeded, values

Values = dict[str, torch.Tensor]

EXACT: dict[str, Any] = {"kernels": "exact", "block_elements": BLOCK}


def normed() -> nn.Module:
    """A model with running statistics, a frozen constant and a flag."""
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model.register_buffer("seen", torch.tensor([True, False]))
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    return model


def optimizer_for(client: ps.Client, model: Any, **options: Any) -> ps.DistributedOptimizer:
    ours = options.pop("optimizer", ps.SGD(lr=0.1, momentum=0.9))
    return ps.DistributedOptimizer(client, model, ours, **{**EXACT, **options})


def train_branched(client: ps.Client, name: str, steps: int, **options: Any) -> list[Values]:
    """The parameters after each step; odd ranks skip a branch in odd steps."""
    model = seeded(Branched, seed=client.rank)
    optimizer = optimizer_for(client, model, name=name, **options)
    history = []
    for step, x in enumerate(batches(steps, rank=client.rank)):
        optimizer.zero_grad()
        model(x, is_long=(step * client.rank) % 2 == 0).square().mean().backward()
        optimizer.step()
        history.append(values(model))
    return history


def train_aggregate(client: ps.Client, name: str, steps: int) -> list[Values]:
    return train_branched(client, name, steps, optimizer=ps.Aggregate(nadam))


def nadam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(groups, lr=0.05)


def train_without_gradient(client: ps.Client, name: str, idle_rank: int) -> Values:
    """One worker never runs backward."""
    model = seeded(Branched)
    optimizer = optimizer_for(client, model, name=name)
    for x in batches(2, rank=client.rank):
        optimizer.zero_grad()
        if client.rank != idle_rank:
            model(x).square().mean().backward()
        optimizer.step()
    return values(model)


def train_with_scaler(client: ps.Client, name: str, overflow_rank: int) -> tuple[Values, float]:
    """One worker's loss overflows in the second of three steps."""
    model = seeded(Branched)
    optimizer = optimizer_for(client, model, name=name)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step, x in enumerate(batches(3, rank=client.rank)):
        factor = float("inf") if (step, client.rank) == (1, overflow_rank) else 1.0
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    return values(model), scaler.get_scale()


def train_normed(client: ps.Client, name: str, **options: Any) -> list[Values]:
    """What each worker's model holds after each step, and before the buffers were shared."""
    model: Any = seeded(normed, seed=client.rank)
    optimizer = optimizer_for(client, model, name=name, **options)
    history = []
    for x in batches(2, rank=client.rank):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if client.rank == 1:
            model(x)  # a second forward pass: its own statistics move on
        history.append(values(model))
        optimizer.step()
        history.append(values(model))
    return history


def train_without_buffers(client: ps.Client, name: str) -> tuple[str, Values]:
    """All take a layer with shared buffers away before the second step, and put it back."""
    model: Any = seeded(normed)
    optimizer = optimizer_for(client, model, name=name)
    message, layer = "", model[1]
    for step, x in enumerate(batches(2, rank=client.rank)):
        optimizer.zero_grad()
        if step == 1:
            model[1] = nn.Identity()
        model(x).square().mean().backward()
        try:
            optimizer.step()
        except ps.InvalidTensor as error:
            message = error.message
            model[1] = layer
            optimizer.step()
    return message, values(model)


def train_with_nan(client: ps.Client, name: str, bad_rank: int) -> tuple[str, Values]:
    """One worker's gradient is not finite in the second of three steps."""
    model = seeded(Branched)
    optimizer = optimizer_for(client, model, name=name)
    message = ""
    for step, x in enumerate(batches(3, rank=client.rank)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if (step, client.rank) == (1, bad_rank):
            model.last.weight.grad[0, 0] = float("nan")
        try:
            optimizer.step()
        except ps.InvalidTensor as error:
            message = error.message
    return message, values(model)


def train_uneven(client: ps.Client, name: str) -> Values:
    """Rank r takes r + 1 steps and leaves."""
    model = seeded(Branched)
    optimizer = optimizer_for(client, model, name=name)
    for x in batches(client.rank + 1, rank=client.rank):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    client.leave()
    return values(model)


def disagree(client: ps.Client, name: str) -> None:
    """Every worker has another learning rate."""
    model = seeded(Branched)
    optimizer = optimizer_for(client, model, name=name)
    optimizer.param_groups[0]["lr"] = 0.1 * (client.rank + 1)
    model(next(batches(1))).sum().backward()
    optimizer.step()


def train_another_model(client: ps.Client, name: str) -> None:
    """The last rank brings a model of another shape."""
    width = 8 if client.rank + 1 < client.world_size else 9
    optimizer_for(client, nn.Linear(4, width), name=name)


def zeroed() -> Any:
    """A model of zeros; the sum of its values has a gradient of ones."""
    model = Branched()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def sum_of(model: nn.Module) -> torch.Tensor:
    total = sum(parameter.sum() for parameter in model.parameters())
    assert isinstance(total, torch.Tensor)
    return total


def count_down(client: ps.Client, name: str, steps: int) -> None:
    """Every step takes 1 from every parameter."""
    model = zeroed()
    optimizer = optimizer_for(
        client, model, name=name, consistency=ps.ASP(), optimizer=ps.SGD(lr=1.0)
    )
    for _ in range(steps):
        optimizer.zero_grad()
        sum_of(model).backward()
        optimizer.step()


def pulled(client: ps.Client, name: str, make: Callable[[], nn.Module]) -> Values:
    """What the servers hold."""
    model = make()
    ps.pull_model(client, model, name, consistent=False)
    return values(model)


def train_in_data_parallel(
    client: ps.Client, name: str, file: str, *, is_late: bool
) -> tuple[str, int]:
    """What a model that is in DistributedDataParallel is refused with, and the clock then.

    Args:
        client: the worker's.
        name: the optimizer's.
        file: where the processes meet.
        is_late: it is wrapped when the optimizer has been made, as frameworks do it.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=client.rank, world_size=client.world_size
    )
    optimizer: Any = None
    try:
        model = nn.Linear(3, 1)
        if is_late:
            optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name=name)
        wrapped = nn.parallel.DistributedDataParallel(model)
        if not is_late:
            optimizer = ps.DistributedOptimizer(client, wrapped, ps.SGD(lr=0.1), name=name)
        wrapped(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    except ps.InvalidConfig as error:
        return error.message, 0 if optimizer is None else optimizer.clock
    finally:
        distributed.destroy_process_group()
    return "", optimizer.clock
