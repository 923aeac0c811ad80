"""Tables that a worker creates after it has skipped clocks under backup workers (SEMANTICS S7)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import ps_worker as ps

pytestmark = pytest.mark.slow

SIZE = 4
COUNT = 12  # more than MAX_UNCOMMITTED_STEP_COUNT
ONES = np.ones(SIZE, np.float32)
SETTING = "bsp:backup=1"


@pytest.fixture(scope="module")
def late() -> Iterator[ps.Client]:
    """A worker that has skipped COUNT clocks on a table, the only one then."""
    with (
        ps.local_cluster(servers=1, workers=2) as cluster,
        ps.connect(cluster.address, rank=0, request_deadline_s=5.0) as fast,
        ps.connect(cluster.address, rank=1, request_deadline_s=5.0) as late,
    ):
        fasts, lates = (
            client.create_table("first", SIZE, optimizer=ps.SGD(), consistency=SETTING)
            for client in (fast, late)
        )
        for _ in range(COUNT):
            fast.push_pull(fasts, ONES)
        late.pull(lates)
        assert lates.clock == COUNT
        yield late


@pytest.mark.parametrize("verb", ["push", "push_pull"])
def test_the_first_step_skips_more_clocks_than_may_be_on_their_way(
    late: ps.Client, verb: str
) -> None:
    table = late.create_table(verb, SIZE, optimizer=ps.SGD(), consistency=SETTING)
    found = getattr(late, verb)(table, ONES)
    if verb == "push":
        late.wait(found)
    assert table.clock == COUNT + 1


def test_so_does_that_of_an_embedding(late: ps.Client) -> None:
    rows = ps.Embedding(late, "rows", SIZE, optimizer=ps.SGD(), consistency="asp")
    rows(torch.tensor([3])).sum().backward()
    rows.step()
    assert rows.table.clock == COUNT + 1
