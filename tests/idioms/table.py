"""The whole table, and how one of it is run: by two workers and, beside them, in plain torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
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

A_CLUSTERS = 55
"""Idioms for one cluster."""


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
    """Two workers of a cluster, and one process with torch.optim.

    A table is a cluster's for good, and each node hears of all of them again with every new one: so
    a cluster is given up when it has seen many idioms.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._cluster = ExitStack()
        self._workers: Workers | None = None
        self._count = 0

    def check(self, found: Idiom) -> None:
        """The idiom's results are equal to the bit, or it is refused at both workers."""
        given = {"name": found.name, "number": IDIOMS.index(found)}
        workers = self._connected()
        plain = self._pool.begin_alone(run, **given)
        results = workers.run(run, **given)
        expected = plain.result()
        if found.refused is None:
            assert [differences(expected, result) for result in results] == [[], []]
        else:
            assert all(result[0] == "refused" for result in results), "neither equal nor refused"

    def _connected(self) -> Workers:
        if self._workers is None or self._count % A_CLUSTERS == 0:
            self.close()
            cluster = self._cluster.enter_context(ps.local_cluster(servers=2, workers=WORKERS))
            connected = self._pool.connected(cluster.address, WORKERS, leave=False)
            self._workers = self._cluster.enter_context(connected)
        self._count += 1
        return self._workers

    def close(self) -> None:
        """The workers are of no cluster."""
        self._cluster.close()


@contextmanager
def comparison(also: Sequence[str] = ()) -> Iterator[Comparison]:
    """Workers, and who compares; they have these modules imported."""
    pool = Pool(WORKERS + 1, also)
    with closing(Comparison(pool)) as compared:
        yield compared
    pool.stop()
