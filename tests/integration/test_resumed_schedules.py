"""A run is stopped while its schedules warm up, and goes on at the learning rates that it had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import ps_worker as ps
from tests.integration.resumed_training import DEADLINE_S, together

pytestmark = pytest.mark.thorough

SAVED, END = 4, 9


def warm_then_cosine(optimizer: Any) -> Any:
    warm = schedules.LinearLR(optimizer, 0.1, total_iters=6)
    return schedules.SequentialLR(optimizer, [warm, schedules.CosineAnnealingLR(optimizer, 4)], [6])


def train(client: ps.Client, until: int, save_at: int = 0) -> list[Any]:
    """The rates of each step, and the parameters at its end; one layer is trained on the servers,
    and the other by a local optimizer.
    """
    torch.manual_seed(3)
    first, second = nn.Linear(6, 5), nn.Linear(5, 2)
    mine = [
        ps.DistributedOptimizer(client, first, ps.AdamW(lr=1e-2), name="first"),
        ps.DistributedOptimizer(
            client,
            second,
            ps.Aggregate(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.5)),
            name="second",
        ),
    ]
    rates = [warm_then_cosine(mine[0]), schedules.OneCycleLR(mine[1], 0.2, total_steps=END + 1)]
    for name, schedule in zip(("first", "second"), rates, strict=True):
        client.attach_state(f"schedule/{name}", schedule)
    history = []
    while mine[0].clock < until:
        draw = torch.Generator().manual_seed(100 * client.rank + mine[0].clock)
        for optimizer in mine:
            optimizer.zero_grad()
        second(first(torch.randn(8, 6, generator=draw)).tanh()).square().mean().backward()
        numbers = [
            (group["lr"], group.get("momentum")) for each in mine for group in each.param_groups
        ]
        for optimizer, schedule in zip(mine, rates, strict=True):
            optimizer.step()
            schedule.step()
        history.append((numbers, [p.tolist() for p in (*first.parameters(), *second.parameters())]))
        client.save_point()
        if mine[0].clock == save_at:
            client.checkpoint("for the test").wait(DEADLINE_S)
    return history


def test_the_rates_of_every_step_are_those_of_a_run_that_was_not_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = str(tmp_path / "checkpoints")
    with ps.local_cluster(1, 1, checkpoint_url=root) as cluster:
        (expected,) = together(cluster.address, 1, lambda c: train(c, END, save_at=SAVED))
    with ps.local_cluster(1, 1, resume=str(next(Path(root).glob("*1-*")))) as cluster:
        (found,) = together(cluster.address, 1, lambda c: train(c, END))
    assert found == expected[SAVED:]
    assert "hyperparameters_not_of_checkpoint" not in caplog.text
