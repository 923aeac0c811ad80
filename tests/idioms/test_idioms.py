"""Each idiom of the table, by two workers of a cluster and by plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ps_worker as ps
from tests.idioms.kit import IDIOMS, Idiom, differences
from tests.idioms.table import run_on_cluster, run_plain
from tests.integration.worker_pool import Pool, Workers


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = Pool(2)
    with ps.local_cluster(servers=2, workers=2) as cluster:
        with pool.connected(cluster.address, 2, leave=False) as workers:
            yield workers
        pool.stop()


def test_the_table_is_as_long_as_the_page_says() -> None:
    assert len(IDIOMS) >= 80


@pytest.mark.parametrize("found", IDIOMS, ids=lambda found: found.name.replace(" ", "-"))
def test_it_is_equal_or_refused(found: Idiom, workers: Workers) -> None:
    number = IDIOMS.index(found)
    expected = run_plain(found, number)
    results = workers.run(run_on_cluster, name=found.name, number=number)
    if found.refused is None:
        assert [differences(expected, result) for result in results] == [[], []]
    else:
        assert all(result[0] == "refused" for result in results), "neither equal nor refused"
