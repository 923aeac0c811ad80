"""What the tests of devices train: on the cluster from a device, and beside it with torch.optim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker as ps
from ps_cli.bench.devices import CUDA, name_of
from ps_core.errors import InvalidConfig
from tests import fake_accelerator
from tests.integration.training_models import BLOCK, Branched, batches, seeded, twin, values

LEARNING_RATE = 0.1


class Counting(nn.Module):
    """Its gradients are sums of its inputs, whatever its values are: of integers they are exact,
    in whatever order a device adds them up.
    """

    def __init__(self, width: int, heights: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, height) for height in heights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).sum() for layer in self.layers]).sum()


class Split(nn.Module):
    """Begins on the CPU and ends on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first = nn.Linear(12, 20)
        self.last = nn.Linear(20, 3).to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x.cpu())).to(self.last.weight.device)
        result: torch.Tensor = self.last(hidden)
        return result


def whole_numbers(count: int, width: int) -> Iterator[torch.Tensor]:
    """Inputs of small integers."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        yield torch.randint(-8, 9, (6, width), generator=generator).float()


def squared(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss of a model's outputs, wherever the model is."""
    found: torch.Tensor = model(x.to(next(model.parameters()).device)).square().mean()
    return found


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


class Pair:
    """A model that the cluster trains, and its twin of the same values, which torch.optim does.

    Args:
        client: a worker's client.
        name: the optimizer's name on the cluster.
        model: on the device.
        twin_device: where the twin is, if not where the model is.
        optimizers: ours, and what makes torch's; SGD with momentum by default.
        options: of the `DistributedOptimizer`.
    """

    def __init__(
        self,
        client: ps.Client,
        name: str,
        model: nn.Module,
        *,
        twin_device: torch.device | None = None,
        optimizers: tuple[Any, Callable[[Any], torch.optim.Optimizer]] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        ours, theirs = optimizers or (ps.SGD(lr=LEARNING_RATE, momentum=0.9), sgd)
        self.model: Any = model
        self.twin = twin(model)
        if twin_device is not None:
            self.twin = self.twin.to(twin_device)
        chosen = {"kernels": "exact", "block_elements": BLOCK, **(options or {})}
        self.optimizer = ps.DistributedOptimizer(client, self.model, ours, name=name, **chosen)
        self.reference = theirs(self.twin.parameters())

    @property
    def sides(self) -> tuple[tuple[Any, torch.optim.Optimizer], ...]:
        return (self.model, self.optimizer), (self.twin, self.reference)

    def train(self, step_count: int = 3) -> None:
        """Both sides, as any script does."""
        for x in batches(step_count):
            for model, optimizer in self.sides:
                optimizer.zero_grad()
                squared(model, x).backward()
                optimizer.step()

    def check_close(self, tolerance: float = 1e-5) -> None:
        """Both have the same values, up to what a device rounds differently."""
        theirs = values(self.twin)
        for name, mine in values(self.model).items():
            torch.testing.assert_close(
                mine.cpu(), theirs[name].cpu(), rtol=tolerance, atol=tolerance, msg=name
            )

    def check_bits(self, what: object = "") -> None:
        """Both have the same values, bit for bit."""
        theirs = values(self.twin)
        for name, mine in values(self.model).items():
            assert torch.equal(mine.cpu(), theirs[name].cpu()), f"{what}: {name}"


def train_on_device(client: ps.Client, name: str, steps: int, device: str) -> dict[str, Any]:
    """What one of several workers does; its parameters afterwards, on the CPU."""
    if device.startswith(fake_accelerator.NAME):
        fake_accelerator.register()
    model = seeded(Branched, seed=client.rank).to(device)
    optimizer = ps.DistributedOptimizer(
        client, model, ps.SGD(lr=LEARNING_RATE), name=name, block_elements=BLOCK
    )
    for x in batches(steps, rank=client.rank):
        optimizer.zero_grad()
        squared(model, x).backward()
        optimizer.step()
    return {name: tensor.cpu() for name, tensor in values(model).items()}


def one_worker() -> Iterator[ps.Client]:
    """The client of a cluster's only worker."""
    with (
        ps.local_cluster(servers=2, workers=1) as cluster,
        ps.connect(cluster.address, request_deadline_s=30.0) as client,
    ):
        yield client


def cuda_device() -> torch.device:
    """The first CUDA device. Without one the run ends: no test here passes by not running."""
    try:
        name_of(CUDA)
    except InvalidConfig as error:
        pytest.exit(error.message, returncode=1)
    return torch.device(CUDA, 0)
