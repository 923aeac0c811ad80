"""What an idiom is written with: the same lines run in plain torch and on a cluster.

An idiom is a function of a `Kit`. It makes its optimizers with `kit.optimizer`, trains, and returns
what its author would look at: parameters, buffers, losses, learning rates. Every worker of the
cluster runs it on the same inputs, so the mean of their gradients is the gradient of each, to the
bit; what it returns must then equal what one process with torch.optim gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import ps_worker as ps

BLOCK = 64
"""Elements a block: small models have several, on both servers."""


class Kit:
    """What makes optimizers, of the cluster or of torch.

    Args:
        client: the worker's client; None: plain torch.
        name: the first part of the tables' names; one idiom may make several optimizers.
        options: of every `DistributedOptimizer` that it makes.
    """

    def __init__(self, client: ps.Client | None, name: str, **options: Any) -> None:
        self.client = client
        self._name = name
        self._options = {"kernels": "exact", "block_elements": BLOCK, **options}
        self._count = 0

    def optimizer(
        self,
        parameters: nn.Module | Iterable[Any],
        kind: str = "SGD",
        *,
        module: nn.Module | None = None,
        **numbers: Any,
    ) -> torch.optim.Optimizer:
        """`torch.optim.<kind>(parameters, **numbers)`, or the servers' of that name."""
        if self.client is None:
            given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
            plain: torch.optim.Optimizer = getattr(torch.optim, kind)(given, **numbers)
            return plain
        return self.on_servers(parameters, getattr(ps, kind)(**numbers), module=module)

    def local(self, parameters: nn.Module, wrap: Any, kind: Any, **numbers: Any) -> Any:
        """`kind(parameters, **numbers)` of torch, or each worker's own behind `Aggregate` or
        `Add`.
        """
        if self.client is None:
            return kind(parameters.parameters(), **numbers)
        return self.on_servers(parameters, wrap(partial(kind, **numbers)))

    def on_servers(
        self, parameters: Any, update: Any, *, module: nn.Module | None = None
    ) -> torch.optim.Optimizer:
        """A `DistributedOptimizer` with a name of its own."""
        assert self.client is not None
        self._count += 1
        name = f"{self._name}-{self._count}"
        return ps.DistributedOptimizer(
            self.client, parameters, update, name=name, module=module, **self._options
        )


@dataclass(frozen=True)
class Idiom:
    """One of them.

    Attributes:
        name: what a user would call it.
        run: it; returns what is compared.
        refused: None: the results are equal. Else what the error says, which names the remedy.
        is_of_framework: it imports a framework.
    """

    name: str
    run: Callable[[Kit], Any]
    refused: str | None = None
    is_of_framework: bool = False


IDIOMS: list[Idiom] = []


def idiom(
    name: str, *, refused: str | None = None
) -> Callable[[Callable[[Kit], Any]], Callable[[Kit], Any]]:
    """Enter a function into the table."""

    def enter(run: Callable[[Kit], Any]) -> Callable[[Kit], Any]:
        assert name not in {known.name for known in IDIOMS}, name
        IDIOMS.append(Idiom(name, run, refused))
        return run

    return enter


# --- what idioms are made of


def perceptron(width: int = 20, *, seed: int = 0) -> Any:
    """A small model, whose initial values depend on the seed alone."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 3))


def batches(count: int = 3, *, width: int = 12, rows: int = 6, seed: int = 7) -> Iterator[Any]:
    """Inputs and targets, the same for every worker."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield (
            torch.randn(rows, width, generator=generator),
            torch.randn(rows, 3, generator=generator),
        )


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """The mean squared error of a batch."""
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def fit(model: Any, optimizer: Any, count: int = 3, *, seed: int = 7, **shape: int) -> list[float]:
    """The loop that every tutorial begins with; the losses."""
    losses = []
    for batch in batches(count, seed=seed, **shape):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- results


def kept(result: Any) -> Any:
    """A result as it is now: what a model has may change later."""
    if isinstance(result, nn.Module):
        return kept(dict(result.state_dict()))
    if isinstance(result, torch.Tensor):
        return result.detach().clone()
    if isinstance(result, dict):
        return {str(key): kept(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [kept(value) for value in result]
    return result


def differences(expected: Any, found: Any, where: str = "result") -> list[str]:
    """What is not equal to the bit, and how far apart it is."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), where
        if (expected.dtype, expected.shape) != (found.dtype, found.shape):
            return [f"{where}: {found.dtype} {found.shape}, not {expected.dtype} {expected.shape}"]
        if torch.equal(expected, found):
            return []
        return [f"{where}: {(expected.double() - found.double()).abs().max():.3g} apart"]
    if isinstance(expected, dict | list):
        assert type(expected) is type(found), where
        assert len(expected) == len(found), where
        keys = expected if isinstance(expected, dict) else range(len(expected))
        return [
            words
            for key in keys
            for words in differences(expected[key], found[key], f"{where}[{key}]")
        ]
    return [] if expected == found else [f"{where}: {found}, not {expected}"]
