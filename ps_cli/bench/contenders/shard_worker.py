"""A process: a worker that trains one data pass, on a fixed share of the data or shard by shard."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

import ps_worker as ps
from ps_cli.bench.contenders.child import Actions

_ELEMENTS = 1024  # of the table that each step pushes to


@contextlib.contextmanager
def shard_worker(
    scheduler: str, lane: str, rank: str, step_ms: str, *sizes: str
) -> Iterator[Actions]:
    """A worker whose computation of a step takes so long; `sizes` are the samples of the data, of a
    batch and of a shard. Its actions return the steps taken.
    """
    sample_count, batch_size, shard_size = map(int, sizes)
    with ps.connect(scheduler, rank=int(rank), lane=lane) as client:
        table = client.create_table("model", _ELEMENTS, optimizer=ps.SGD(lr=0.1), consistency="asp")
        gradient = np.full(_ELEMENTS, 1e-3, np.float32)
        dataset: Any = range(sample_count)

        def train(batches: Callable[[Any], Iterable[Any]], sampler: Any) -> int:
            count = 0
            for _ in batches(DataLoader(dataset, batch_size, sampler=sampler)):
                time.sleep(float(step_ms) / 1e3)
                client.push_pull(table, gradient)
                count += 1
            return count

        fixed = ps.DistributedSampler(client, dataset)
        shards = client.data_shards(dataset, shard_size=shard_size)
        yield {
            "fixed": partial(train, fixed.follow, fixed),
            "shards": partial(train, shards.over, shards),
        }
