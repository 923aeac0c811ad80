"""A process: a worker that trains one data pass, on a fixed share of the data, shard by shard, or
in batches of a size that follows its speed.
"""

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

_ELEMENTS = 1024  # of the tables that steps push to
_EVERY = 8
"""Steps between two agreements on the sizes of batches: a pass has 60 at least."""


@contextlib.contextmanager
def shard_worker(
    scheduler: str, lane: str, rank: str, consistency: str, step_ms: str, *sizes: str
) -> Iterator[Actions]:
    """A worker whose computation of a usual batch takes so long; `sizes` are the samples of the
    data, of a batch and of a shard. Its actions return the samples that it has trained on.
    """
    sample_count, batch_size, shard_size = map(int, sizes)
    with ps.connect(scheduler, rank=int(rank), lane=lane) as client:
        gradient = np.full(_ELEMENTS, 1e-3, np.float32)
        dataset: Any = range(sample_count)
        table = client.create_table(
            "model", _ELEMENTS, optimizer=ps.SGD(lr=0.1), consistency=consistency
        )

        def train(
            batches: Callable[[Any], Iterable[Any]],
            loader: DataLoader[Any],
            weight: Callable[[], float] = lambda: 1.0,
        ) -> int:
            count = 0
            for batch in batches(loader):
                time.sleep(float(step_ms) / 1e3 * len(batch) / batch_size)
                client.push_pull(table, gradient * np.float32(weight()))
                count += len(batch)
            return count

        fixed = ps.DistributedSampler(client, dataset)
        shards = client.data_shards(dataset, shard_size=shard_size)
        adaptive = client.adaptive_batches(dataset, batch_size, every=_EVERY)
        by = partial(DataLoader, dataset)
        yield {
            "fixed": partial(train, fixed.follow, by(batch_size, sampler=fixed)),
            "shards": partial(train, shards.over, by(batch_size, sampler=shards)),
            "adaptive": partial(
                train, adaptive.over, by(batch_sampler=adaptive), lambda: adaptive.weight
            ),
        }
