"""Parameter groups that come later, and workers that are replaced."""

from __future__ import annotations

import signal

import pytest
from torch import nn

import ps_worker as ps
from tests.integration.lane_cluster import lane_cluster
from tests.integration.ordered_workers import PATIENCE, ordered_workers
from tests.integration.training_models import batches, seeded

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(180)]


class Grown:
    """A model under ASP whose second layer comes later."""

    def __init__(self, client: ps.Client) -> None:
        self.first, self.second = seeded(lambda: nn.Linear(4, 4)), seeded(lambda: nn.Linear(4, 2))
        self.optimizer = ps.DistributedOptimizer(
            client, self.first.parameters(), ps.SGD(lr=0.1), consistency="asp"
        )

    def train(self, steps: range) -> None:
        for x in batches(len(steps)):
            self.optimizer.zero_grad()
            self.second(self.first(x[:, :4])).square().mean().backward()
            self.optimizer.step()

    def change(self) -> None:
        self.optimizer.add_param_group({"params": self.second.parameters()})

    @property
    def values(self) -> list[str]:
        return [table.name for table in self.optimizer.trained_model.tables]


def test_a_group_waits_for_the_worker_that_replaces_rank_0() -> None:
    """Under ASP the others go on: a table that they made would have no values, and get none."""
    with (
        lane_cluster(servers=1, workers=2, environment=PATIENCE) as cluster,
        ordered_workers(cluster, "", Grown, 2) as (victim, other),
    ):
        other.pipe.send("change")
        victim.signal(signal.SIGKILL)
        with ps.connect(cluster.address, rank=0) as client:
            trainer = Grown(client)
            trainer.change()
            assert other.hear() == "changed"
            other.pipe.send("values")
            assert other.hear() == trainer.values == ["model/0/float32", "model/1@1/float32"]
