"""min_in_sync=2: with one server of two, pushes wait for another; what is committed can be read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from rich.console import Console

import ps_worker as ps
from ps_cli.console import scheduler_query
from ps_cli.status.document import status_document
from ps_cli.status.view import status_view
from tests.integration.counted_steps import Counted
from tests.integration.replicated_cluster import (
    DEADLINE_S,
    ReplicatedCluster,
    replicated_cluster,
)

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

COUNTED = Counted(world=1)
SHORT_S = 1.5


@pytest.fixture
def cluster() -> Iterator[ReplicatedCluster]:
    with replicated_cluster(servers=2, workers=1, min_in_sync=2) as cluster:
        yield cluster


def status(cluster: ReplicatedCluster) -> str:
    """What `pushpull status` shows."""
    response = asyncio.run(scheduler_query.first_status(cluster.address)).response
    console = Console(width=200)
    with console.capture() as shown:
        console.print(status_view(status_document(response, {})))
    return shown.get()


@pytest.mark.thorough
def test_pushes_wait_while_too_few_servers_have_them(cluster: ReplicatedCluster) -> None:
    with (
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
        ps.connect(cluster.address, role="reader", request_deadline_s=DEADLINE_S) as reader,
    ):
        table = COUNTED.create(client, "counted")
        gradient = COUNTED.gradient(0)
        for _ in range(3):
            client.wait(client.push(table, gradient))
        assert "degraded" not in status(cluster)
        dying, last = cluster.living
        cluster.kill(dying)
        cluster.taken_over_from(dying)
        COUNTED.check(reader.pull(reader.table("counted")), [3])
        tickets = [client.push(table, gradient) for _ in range(2)]
        with pytest.raises(ps.WaitExpired):
            client.wait(tickets[0], SHORT_S)
        shown = status(cluster)
        assert "ranges have fewer than 2 replicas" in shown, shown
        assert "take no pushes until 2 are in sync" in shown, shown
        cluster.start()
        for ticket in tickets:
            client.wait(ticket)
        cluster.healed()
        assert "degraded" not in status(cluster)
        COUNTED.check(client.pull(table), [5])
        cluster.kill(last)
        cluster.taken_over_from(last)
        COUNTED.check(client.pull(table), [5])
        client.close(leave=False)  # its goodbye would wait for another server
