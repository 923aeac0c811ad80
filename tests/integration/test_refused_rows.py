"""Steps of a model with several tables whose rows a server refuses, at some workers or at each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker as ps

pytestmark = [pytest.mark.timeout(120), pytest.mark.thorough]

WORKERS, DIM, DEADLINE_S = 2, 4, 20.0
EVERYTHING = torch.arange(20)


class Pairs(nn.Module):
    """Rows of two tables, and a head over their sums."""

    def __init__(self, client: ps.Client) -> None:
        super().__init__()
        options: dict[str, Any] = {"optimizer": ps.SGD(lr=0.1), "seed": 5}
        self.users = ps.Embedding(client, "users", DIM, **options)
        self.items = ps.Embedding(client, "items", DIM, **options)
        torch.manual_seed(1)
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.users(ids) + self.items(ids))
        return found


class Worker:
    """One that trains with ids of its own; a server refuses what is not finite."""

    def __init__(self, client: ps.Client, **options: Any) -> None:
        self.client = client
        self.model = Pairs(client)
        self.optimizer = ps.DistributedOptimizer(
            client, self.model, ps.SGD(lr=0.1), allow_non_finite=True, **options
        )
        self.ids = EVERYTHING[10 * client.rank : 10 * client.rank + 10]

    def step(self, bad: ps.Embedding | None) -> None:
        """A step; it is refused if a gradient of `bad` is not finite."""
        self.optimizer.zero_grad()
        (self.model(self.ids) - 1.0).square().mean().backward()
        if bad is None:
            self.optimizer.step()
            return
        (bad(self.ids) * float("inf")).sum().backward()
        with pytest.raises(ps.InvalidTensor, match="not finite"):
            self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        """All parameters, and all rows."""
        found = [each.detach().clone() for each in self.model.head.parameters()]
        with torch.no_grad():
            return [*found, self.model.users(EVERYTHING), self.model.items(EVERYTHING)]


def trained(steps: Callable[[Worker], None], **options: Any) -> Sequence[list[torch.Tensor]]:
    """What each worker has after these steps."""
    with ps.local_cluster(servers=2, workers=WORKERS) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
            for _ in range(WORKERS)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(WORKERS))

        def run(client: ps.Client) -> list[torch.Tensor]:
            worker = Worker(client, **options)
            steps(worker)
            return worker.values()

        return list(pool.map(run, clients))


def assert_alike(all_found: Sequence[list[torch.Tensor]]) -> None:
    for found in all_found[1:]:
        assert [a.tolist() for a in found] == [a.tolist() for a in all_found[0]]


def test_clipped_steps_that_are_refused_at_each_worker_end_with_the_error() -> None:
    """Another table at each, so that no worker has taken part in all updates."""

    def steps(worker: Worker) -> None:
        worker.step(None)
        worker.step([worker.model.users, worker.model.items][worker.client.rank])
        worker.step(None)
        assert worker.optimizer.clock == 3

    assert_alike(trained(steps, clip_norm=1.0))


@pytest.mark.parametrize("overlap_pull", [False, True])
def test_a_step_that_is_refused_on_one_table_is_taken_on_none(overlap_pull: bool) -> None:
    """The others take theirs, and the next forward pass has their update, awaited or not."""

    def steps(worker: Worker) -> None:
        worker.step(None)
        before = worker.values()
        worker.step(worker.model.users if worker.client.rank == 0 else None)
        values.append(worker.values())
        for rows, rows_before in zip(values[-1][2:], before[2:], strict=True):
            assert torch.equal(rows[:10], rows_before[:10]), "these are worker 0's"
            assert not torch.equal(rows[10:], rows_before[10:])
        worker.step(None)

    values: list[list[torch.Tensor]] = []
    assert_alike(trained(steps, overlap_pull=overlap_pull))
    assert_alike(values)
