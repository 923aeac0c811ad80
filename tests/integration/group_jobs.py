"""Jobs of the workers in the tests of `aggregate_within`, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import ps_worker as ps
from tests.integration.training_models import Branched, batches, seeded, values

Values = dict[str, torch.Tensor]

EXACT: dict[str, Any] = {"kernels": "exact", "block_elements": 64}


def optimizer_for(
    client: ps.Client, model: nn.Module, groups: Sequence[str], **options: Any
) -> ps.DistributedOptimizer:
    """Each worker gives the name of its group; without names there are no groups."""
    ours = options.pop("optimizer", ps.SGD(lr=0.1, momentum=0.9))
    if groups:
        options["aggregate_within"] = groups[client.rank]
    return ps.DistributedOptimizer(client, model, ours, **{**EXACT, **options})


def is_long(step: int, rank: int) -> bool:
    """Odd ranks leave out a branch in odd steps."""
    return (step * rank) % 2 == 0


@dataclass
class Trained:
    """What came of a run, after its first step."""

    history: list[Values]
    pushed_bytes: int
    pulled_bytes: int


def train(
    client: ps.Client, name: str, groups: Sequence[str], steps: int, **options: Any
) -> Trained:
    model = seeded(Branched, seed=client.rank)
    optimizer = optimizer_for(client, model, groups, name=name, **options)
    history = []
    before = client.progress()
    for step, x in enumerate(batches(steps, rank=client.rank)):
        optimizer.zero_grad()
        model(x, is_long=is_long(step, client.rank)).square().mean().backward()
        optimizer.step()
        history.append(values(model))
    after = client.progress()
    return Trained(
        history, after.pushed_bytes - before.pushed_bytes, after.pulled_bytes - before.pulled_bytes
    )
