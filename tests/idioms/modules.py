"""What models are made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.idioms.kit import IDIOMS, Idiom, Kit, batches, fit, idiom, loss_of, perceptron


class _Sequence(nn.Module):
    """A recurrent layer over an input that is cut into three steps."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner = kind(4, 8, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.inner(x.view(-1, 3, 4))[0][:, -1])
        return found


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.last = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.layer(x.view(-1, 3, 4)).flatten(1))
        return found


class _Images(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 2)
        self.norm = norm
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x.view(-1, 3, 2, 2)
        found: torch.Tensor = self.last(torch.relu(self.norm(self.first(images))).flatten(1))
        return found


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.last = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return found


class _Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(12)) for _ in range(3)])
        self.named = nn.ParameterDict({"gain": nn.Parameter(torch.ones(3))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.stack([x @ row for row in self.rows], dim=1)
        scaled: torch.Tensor = found * self.named["gain"]
        return scaled


class _Unused(nn.Module):
    """One branch is taken by every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 3), nn.Linear(12, 3)
        self.never = nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = (self.first if self.calls % 2 else self.second)(x)
        return found


def _rows(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), *between, nn.Linear(16, 3))


def _spectral() -> nn.Module:
    return _rows(parametrizations.spectral_norm(nn.Linear(16, 16)))


def _weight_norm() -> nn.Module:
    return _rows(parametrizations.weight_norm(nn.Linear(16, 16)), nn.ReLU())


def _channels_last(model: Any) -> Any:
    return model.to(memory_format=torch.channels_last)


def _lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
    model(torch.zeros(1, 12))
    return model


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: _rows(nn.BatchNorm1d(16), nn.ReLU()),
    "batch norm that counts for itself": lambda: _rows(nn.BatchNorm1d(16, momentum=None)),
    "layer norm": lambda: _rows(nn.LayerNorm(16)),
    "group norm": lambda: _rows(nn.GroupNorm(4, 16)),
    "dropout": lambda: _rows(nn.Dropout(0.4)),
    "PReLU": lambda: _rows(nn.PReLU(16)),
    "weight norm": _weight_norm,
    "spectral norm, whose vectors are buffers": _spectral,
    "LSTM": lambda: _Sequence(nn.LSTM),
    "GRU": lambda: _Sequence(nn.GRU),
    "a transformer layer": _Attention,
    "convolutions with batch norm": lambda: _Images(nn.BatchNorm2d(8)),
    "channels last": lambda: _channels_last(_Images(nn.GroupNorm(2, 8))),
    "tied weights": _Tied,
    "lists and dictionaries of parameters": _Lists,
    "branches that some batches do not take": _Unused,
    "lazy modules that have seen a batch": _lazy,
}


def _fits(kit: Kit, *, make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    model = make()
    optimizer = kit.optimizer(model, "Adam", lr=0.01)
    torch.manual_seed(1)
    return fit(model, optimizer, 4), model


IDIOMS.extend(Idiom(name, partial(_fits, make=make)) for name, make in _MODELS.items())


@idiom("a compiled model")
def compiled(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    return fit(torch.compile(model, backend="eager"), optimizer), model


@idiom("a lazy module before its first batch", refused="[Ll]azy|uninitialized")
def lazy_too_early(kit: Kit) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
    optimizer = kit.optimizer(model, lr=0.1)
    return fit(model, optimizer), model


@idiom("a dense embedding")
def embedding(kit: Kit) -> Any:
    torch.manual_seed(0)
    table = nn.Embedding(20, 4, padding_idx=0, max_norm=None)
    optimizer = kit.optimizer(table, "Adam", lr=0.05)
    for ids in ([1, 2, 2, 0], [5, 1, 0], [7, 7, 3]):
        optimizer.zero_grad()
        table(torch.tensor(ids)).square().sum().backward()
        optimizer.step()
    return table


@idiom("an embedding with max_norm, which is renormed in the forward pass")
def embedding_renormed(kit: Kit) -> Any:
    torch.manual_seed(0)
    table = nn.Embedding(20, 4, max_norm=1.0)
    optimizer = kit.optimizer(table, lr=0.05)
    for ids in ([1, 2, 2, 0], [5, 1, 0], [7, 7, 3]):
        optimizer.zero_grad()
        (table(torch.tensor(ids)) - 0.3).square().sum().backward()
        optimizer.step()
    return table


@idiom("teacher and student")
def distilled(kit: Kit) -> Any:
    teacher, student = perceptron(seed=3), perceptron(8)
    teacher.requires_grad_(False)
    optimizer = kit.optimizer(student, "AdamW", lr=0.01)
    losses = []
    for x, _ in batches(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(student(x), teacher(x))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, student


@idiom("a backbone with a rate of its own, and a new head")
def fine_tuned(kit: Kit) -> Any:
    backbone = perceptron()
    fit(backbone, torch.optim.SGD(backbone.parameters(), lr=0.1), 2)
    backbone[2] = nn.Linear(20, 3)
    nn.init.zeros_(backbone[2].weight)
    nn.init.zeros_(backbone[2].bias)
    groups = [
        {"params": backbone[0].parameters(), "lr": 1e-3},
        {"params": backbone[2].parameters()},
    ]
    return fit(backbone, kit.optimizer(groups, "Adam", module=backbone, lr=0.01)), backbone


@idiom("low-rank adapters beside frozen weights")
def adapters(kit: Kit) -> Any:
    model = perceptron()
    model.requires_grad_(False)
    torch.manual_seed(4)
    down, up = nn.Linear(12, 2, bias=False), nn.Linear(2, 3, bias=False)
    nn.init.zeros_(up.weight)
    both = nn.ModuleDict({"down": down, "up": up})
    optimizer = kit.optimizer(both, "AdamW", lr=0.05)
    losses = []
    for x, y in batches(4):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x) + up(down(x)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, both, model


@idiom("several heads, of which one is trained at a time")
def heads(kit: Kit) -> Any:
    torch.manual_seed(0)
    body, tops = nn.Linear(12, 8), nn.ModuleList([nn.Linear(8, 3) for _ in range(3)])
    model = nn.ModuleDict({"body": body, "tops": tops})
    optimizer = kit.optimizer(model, "Adam", lr=0.01, weight_decay=0.1)
    for number, batch in enumerate(batches(4)):
        optimizer.zero_grad()
        top = tops[number % 3]
        loss_of(nn.Sequential(body, nn.Tanh(), top), batch).backward()
        optimizer.step()
    return model


@idiom("an attention map that is not trained: buffers that the script sets")
def script_buffers(kit: Kit) -> Any:
    model = perceptron()
    model.register_buffer("seen", torch.zeros(3))
    optimizer = kit.optimizer(model, lr=0.1)
    for seed in range(3):
        model.seen += 1
        fit(model, optimizer, 1, seed=seed)
    return model
