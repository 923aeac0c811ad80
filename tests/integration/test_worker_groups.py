"""Four workers that push and pull in groups (`aggregate_within`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

import ps_worker as ps
from tests.integration import group_jobs as jobs
from tests.integration.group_jobs import Values
from tests.integration.training_models import Branched, batches, differing, seeded, values
from tests.integration.worker_pool import Pool, Workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

WORKERS, STEPS = 4, 4
IMPORTED = ("tests.integration.group_jobs",)

NONE: tuple[str, ...] = ()
PAIRS = "a", "b", "a", "b"
ONE = "a", "a", "a", "a"
UNEQUAL = "a", "b", "a", "a"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(WORKERS, IMPORTED)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def workers(pool: Pool) -> Iterator[Workers]:
    with (
        ps.local_cluster(servers=2, workers=WORKERS) as cluster,
        pool.connected(cluster.address, WORKERS) as connected,
    ):
        yield connected


def reduced(gradients: Sequence[torch.Tensor | None], groups: Sequence[str]) -> torch.Tensor | None:
    """The mean of all workers' gradients, in the order of addition of groups."""
    if all(gradient is None for gradient in gradients):
        return None
    whole = next(gradient for gradient in gradients if gradient is not None)
    filled = [torch.zeros_like(whole) if each is None else each for each in gradients]
    total = None
    for group in dict.fromkeys(groups):
        first, *others = (g for g, name in zip(filled, groups, strict=True) if name == group)
        mean = first.clone()
        for other in others:
            mean += other
        count = 1 + len(others)
        mean *= 1.0 / count
        mean *= count
        total = mean if total is None else total + mean
    assert total is not None
    return total * (1.0 / len(groups))


def in_one_process(groups: Sequence[str]) -> list[Values]:
    model = seeded(Branched, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = []
    inputs = zip(*(batches(STEPS, rank=rank) for rank in range(WORKERS)), strict=True)
    for step, of_all in enumerate(inputs):
        found = []
        for rank, x in enumerate(of_all):
            model.zero_grad()
            model(x, is_long=jobs.is_long(step, rank)).square().mean().backward()
            found.append([p.grad for p in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *found, strict=True):
            parameter.grad = reduced(gradients, groups)
        optimizer.step()
        history.append(values(model))
    return history


@pytest.mark.parametrize("groups", [PAIRS, ONE, UNEQUAL], ids=["pairs", "one", "unequal"])
def test_groups_train_as_one_process(workers: Workers, groups: Sequence[str]) -> None:
    runs = workers.run(jobs.train, name="-".join(groups), groups=groups, steps=STEPS)
    expected = in_one_process(groups)
    for run in runs:
        for found, wanted in zip(run.history, expected, strict=True):
            assert differing(found, wanted) == []
    print([(run.pushed_bytes, run.pulled_bytes) for run in runs])
