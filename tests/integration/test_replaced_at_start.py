"""A worker of a resumed run is replaced: before anybody's first step, and later."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker as ps
from tests.integration.resumed_training import DEADLINE_S, Position, together

pytestmark = pytest.mark.timeout(180)

SAVED = 4


class Training:
    """A worker's loop, with a schedule that goes on from its rate before, and a state of its own.

    The sampler's epoch has 16 steps in the run that was saved.
    """

    def __init__(self, client: ps.Client) -> None:
        self.client = client
        self.sampler = ps.DistributedSampler(client, 64)
        self.model = nn.Linear(3, 2)
        self.optimizer = ps.DistributedOptimizer(client, self.model, ps.SGD(lr=0.5))
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        client.attach_state("schedule", self.schedule)
        self.position = Position()
        client.attach_state("position", self.position, per_rank=True)
        if client.is_late_joiner:
            self.sampler.seek(self.optimizer.clock, 2)

    @property
    def place(self) -> tuple[Any, ...]:
        """All that it has attached."""
        rate = self.optimizer.param_groups[0]["lr"]
        return (rate, self.schedule.last_epoch, self.position.seen, list(self.sampler))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3)).sum().backward()
        self.optimizer.step()
        self.schedule.step()
        self.position.seen += 1 + self.client.rank


def saved(client: ps.Client) -> None:
    """Train, and save within an epoch."""
    training = Training(client)
    for number, _ in enumerate(training.sampler.follow(range(16), 2), 1):
        training.step()
        client.save_point()
        if number == SAVED:
            client.checkpoint("for the test").wait(DEADLINE_S)
            break


def test_it_goes_on_from_the_checkpoint_if_nobody_has_trained_since(tmp_path: Path) -> None:
    root = str(tmp_path / "checkpoints")
    with ps.local_cluster(1, 2, checkpoint_url=root) as cluster:
        together(cluster.address, 2, saved)
    with ps.local_cluster(1, 2, resume=root) as cluster, ThreadPoolExecutor(2) as threads:
        first, second = (ps.connect(cluster.address, rank=rank) for rank in (0, 1))
        stays, dies = Training(first), Training(second)
        expected = dies.place
        assert expected[1:3] == (SAVED, 2 * SAVED)
        second.abandon("it died")
        with first, ps.connect(cluster.address, rank=1) as another:
            assert another.is_late_joiner
            comes = Training(another)
            assert comes.place == expected
            list(threads.map(Training.step, (stays, comes)))
            assert comes.place[:3] == (*stays.place[:2], 2 * SAVED + 2)
            another.abandon("it died, too")
            stays.step()
            with ps.connect(cluster.address, rank=1) as late:
                assert Training(late).place[:3] == (0.5, 0, 0)
