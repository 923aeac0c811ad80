"""A run that has added a group of parameters is stopped, and goes on from its checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker as ps
from tests.integration.resumed_training import DEADLINE_S, all_state, together

pytestmark = pytest.mark.slow

BORN, SAVED, END = 3, 5, 8
_one_at_a_time = threading.Lock()


class Layers(nn.Module):
    """The second layer is trained later than the first."""

    def __init__(self) -> None:
        super().__init__()
        with _one_at_a_time:  # workers are threads here, and torch's generator is one for all
            torch.manual_seed(3)
            self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 4)

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        """Both."""
        found: torch.Tensor = self.second(self.first(examples).tanh())
        return found


def train(
    client: ps.Client, optimizer: Any, until: int, *, at_once: bool = False, save_at: int = 0
) -> nn.Module:
    """Train up to clock `until`; the second group comes after step `BORN`, or where that is past:
    before any step, or `at_once` with the first.
    """
    model = Layers()
    groups: list[dict[str, Any]] = [
        {"params": list(model.first.parameters())},
        {"params": list(model.second.parameters()), "lr": 2e-2},
    ]
    mine = ps.DistributedOptimizer(
        client, groups if at_once else groups[:1], optimizer, module=model, block_elements=64
    )
    while mine.clock < until:
        if mine.clock >= BORN and len(mine.param_groups) == 1:
            mine.add_param_group(groups[1])
        draw = torch.Generator().manual_seed(100 * client.rank + mine.clock)
        mine.zero_grad()
        model(torch.randn(8, 12, generator=draw)).square().mean().backward()
        mine.step()
        for group in mine.param_groups:
            group["lr"] *= 0.9
        client.save_point()
        if mine.clock == save_at:
            client.checkpoint("for the test").wait(DEADLINE_S)
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: ps.Adam(lr=1e-2),
        lambda: ps.Aggregate(lambda groups: torch.optim.Adam(groups, lr=1e-2)),
    ],
    ids=["Adam", "Aggregate"],
)
def test_a_group_that_came_later_goes_on_where_it_was(
    tmp_path: Path, optimizer: Callable[[], Any], at_once: bool
) -> None:
    root = str(tmp_path / "checkpoints")
    with ps.local_cluster(1, 2) as cluster:
        expected = together(cluster.address, 2, lambda c: train(c, optimizer(), END))
    with ps.local_cluster(1, 2, checkpoint_url=root) as cluster:
        together(cluster.address, 2, lambda c: train(c, optimizer(), SAVED + 1, save_at=SAVED))
    with ps.local_cluster(2, 2, resume=root) as cluster:
        found = together(cluster.address, 2, lambda c: train(c, optimizer(), END, at_once=at_once))
    for name, tensors in all_state([*expected, *found]):
        assert all(torch.equal(tensors[0], each) for each in tensors), name
