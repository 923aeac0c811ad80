"""Models and loops that the optimizer tests train twice: on a cluster, and in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

BLOCK = 64
"""Elements a block: small, so that small models have many blocks on every server."""


class Branched(nn.Module):
    """Has a branch that some steps do not use, a tied weight and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 20)
        self.sometimes = nn.Linear(20, 20)
        self.last = nn.Linear(20, 3)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, *, is_long: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if is_long:
            hidden = torch.tanh(self.sometimes(hidden))
        result: torch.Tensor = self.last(hidden) * self.gain
        return result


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    """A module with initial values that depend on the seed alone."""
    torch.manual_seed(seed)
    return make()


def batches(count: int, *, rank: int = 0, size: int = 6, width: int = 12) -> Iterator[torch.Tensor]:
    """Inputs that every process can make again."""
    generator = torch.Generator().manual_seed(1000 + rank)
    for _ in range(count):
        yield torch.randn(size, width, generator=generator)


def twin(model: nn.Module) -> Any:
    """A second model of the same values."""
    return copy.deepcopy(model)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a model's parameters and buffers."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """The names whose tensors are not equal, bit for bit (NaN equals NaN)."""
    assert first.keys() == second.keys()
    return [
        name
        for name, tensor in first.items()
        if not torch.equal(tensor.nan_to_num(12345.0), second[name].nan_to_num(12345.0))
    ]
