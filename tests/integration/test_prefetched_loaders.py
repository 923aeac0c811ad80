"""`ps.prefetch` takes a batch ahead, and goes inside of what counts the batches of a loop."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import ps_worker as ps

pytestmark = pytest.mark.slow

SAMPLES, BATCH = 35, 4


class Trainer:
    """A worker that trains rows on batches of ids."""

    def __init__(self, client: ps.Client, name: str) -> None:
        self.rows = ps.Embedding(client, name, 2, optimizer=ps.SGD(lr=0.1), consistency="asp")
        self.asked: list[list[int]] = []

    def ahead(self, ids: Any) -> dict[ps.Embedding, torch.Tensor]:
        self.asked.append(list(ids))
        return {self.rows: torch.as_tensor(ids)}

    def step(self, ids: Any, weight: float = 1.0) -> list[int]:
        (weight * self.rows(torch.as_tensor(ids)).square().mean()).backward()
        self.rows.step()
        return list(map(int, ids))


@pytest.fixture(scope="module")
def client() -> Iterator[ps.Client]:
    with ps.local_cluster(1, 1) as cluster, ps.connect(cluster.address) as client:
        yield client


def loader(**options: Any) -> DataLoader[Any]:
    dataset: Any = range(SAMPLES)
    return DataLoader(dataset, **options)


def test_what_counts_the_batches_of_a_loop_is_refused(client: ps.Client) -> None:
    """A batch that was never trained on would count, and have the next one's weight."""
    sampler = ps.DistributedSampler(client, SAMPLES)
    shards = client.data_shards(SAMPLES, shard_size=BATCH, name="refused")
    batches = client.adaptive_batches(SAMPLES, BATCH)
    for counted, source in (
        (sampler.follow(loader(batch_size=BATCH, sampler=sampler)), "sampler.follow"),
        (shards.over(loader(batch_size=BATCH, sampler=shards)), "shards.over"),
        (shards.ranges(), "shards.over"),
        (batches.over(batches), "batches.over"),
    ):
        words = rf"`{source}`, which counts .* the other order: {source}\(ps\.prefetch\(loader, "
        with pytest.raises(ps.InvalidConfig, match=words):
            ps.prefetch(counted, lambda _: {})


@pytest.mark.thorough
def test_a_sampler_follows_what_is_prefetched(client: ps.Client) -> None:
    trainer = Trainer(client, "followed")
    sampler = ps.DistributedSampler(client, SAMPLES, name="followed")
    given = ps.prefetch(loader(batch_size=BATCH, sampler=sampler), trainer.ahead)
    seen: list[int] = []
    for ids in sampler.follow(given):
        assert sampler.state_dict()["taken"] == len(seen)
        assert len(trainer.asked) == min(len(seen) // BATCH + 1, SAMPLES // BATCH)
        seen += trainer.step(ids)
        assert sampler.epoch or sampler.state_dict()["taken"] in {len(seen), SAMPLES}
    assert sorted(seen) == list(range(SAMPLES))


def test_data_shards_go_over_what_is_prefetched(client: ps.Client) -> None:
    trainer = Trainer(client, "shards")
    shards = client.data_shards(SAMPLES, shard_size=2 * BATCH)
    dropping = ps.prefetch(loader(batch_size=BATCH, sampler=shards, drop_last=True), trainer.ahead)
    with pytest.raises(ps.InvalidConfig, match="drop_last=False"):
        next(shards.over(dropping))
    given = ps.prefetch(loader(batch_size=BATCH, sampler=shards), trainer.ahead)
    seen: list[int] = []
    for ids in shards.over(given):
        seen += trainer.step(ids)
        if len(seen) == 3 * BATCH:
            break
    for ids in shards.over(given):
        seen += trainer.step(ids)
    again = seen[2 * BATCH : 3 * BATCH]
    assert sorted(seen) == sorted([*range(SAMPLES), *again])


@pytest.mark.thorough
def test_adaptive_batches_go_over_what_is_prefetched() -> None:
    """The last step has three samples for two workers, which differ in their weight."""

    def work(client: ps.Client) -> list[tuple[int, float]]:
        trainer = Trainer(client, "both")
        batches = client.adaptive_batches(SAMPLES, BATCH, every=2)
        found: list[tuple[int, float]] = []
        last = SAMPLES % (2 * BATCH)
        for ids in batches.over(ps.prefetch(batches, trainer.ahead)):
            whole = 2 * BATCH if len(found) < SAMPLES // (2 * BATCH) else last
            found.append((len(trainer.step(ids, batches.weight)), batches.weight * whole / 2))
        return found

    with ps.local_cluster(1, 2) as cluster, ThreadPoolExecutor(2) as threads:
        clients = [ps.connect(cluster.address, rank=rank) for rank in range(2)]
        found = list(threads.map(work, clients))
        for client in clients:
            client.close()
    for steps in found:
        assert [size for size, _ in steps] == [pytest.approx(weighed) for _, weighed in steps]
    assert sorted(steps[-1][0] for steps in found) == [1, 2]
