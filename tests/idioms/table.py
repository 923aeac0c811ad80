"""The whole table, and how one of it is run: by two workers and, beside them, in plain torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import ps_worker as ps
from tests.idioms import (  # noqa: F401 - each enters its idioms into the table
    accelerate_runs,
    gradients,
    lightning_runs,
    modules,
    optimizers,
    parameters,
    schedules,
    trainer_runs,
)
from tests.idioms.kit import IDIOMS, Idiom, Kit, differences, kept
from tests.integration.worker_pool import Pool, Workers

WORKERS = 2


def run(client: ps.Client | None, name: str, number: int) -> Any:
    """The idiom of that name, by a worker or in plain torch: its result, or what refused it."""
    found = next(known for known in IDIOMS if known.name == name)
    torch.manual_seed(number)
    try:
        return kept(found.run(Kit(client, f"idiom{number}")))
    except ps.PushpullError as error:
        if found.refused is None or not re.search(found.refused, str(error)):
            raise
        return ("refused", str(error))


class Comparison:
    """Two workers of a cluster, and one process with torch.optim."""

    def __init__(self, pool: Pool, workers: Workers) -> None:
        self._pool = pool
        self._workers = workers

    def check(self, found: Idiom) -> None:
        """The idiom's results are equal to the bit, or it is refused at both workers."""
        given = {"name": found.name, "number": IDIOMS.index(found)}
        plain = self._pool.begin_alone(run, **given)
        results = self._workers.run(run, **given)
        expected = plain.result()
        if found.refused is None:
            assert [differences(expected, result) for result in results] == [[], []]
        else:
            assert all(result[0] == "refused" for result in results), "neither equal nor refused"


@contextmanager
def comparison(also: Sequence[str] = ()) -> Iterator[Comparison]:
    """A cluster; its workers, and who compares, have these modules imported."""
    pool = Pool(WORKERS + 1, also)
    with ps.local_cluster(servers=2, workers=WORKERS) as cluster:
        with pool.connected(cluster.address, WORKERS, leave=False) as workers:
            yield Comparison(pool, workers)
        pool.stop()
