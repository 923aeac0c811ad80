"""A scheduler that is killed and started again with its journal: nobody notices (G8)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

import ps_worker as ps
from ps_core.cluster_view import Role
from tests.integration import counted_steps
from tests.integration.counted_steps import Counted
from tests.integration.replicated_cluster import (
    DEADLINE_S,
    ReplicatedCluster,
    replicated_cluster,
)

pytestmark = pytest.mark.timeout(180)

WORKERS = 2
COUNTED = Counted(WORKERS, block_count=24)
GOES_ON_S = 8.0


@dataclass
class Scene:
    """A cluster whose scheduler keeps a journal, and its workers."""

    cluster: ReplicatedCluster
    clients: list[ps.Client]

    def tables(self, name: str) -> list[tuple[ps.Client, ps.TableHandle]]:
        """A table at each worker."""
        return [(client, COUNTED.create(client, name)) for client in self.clients]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with (
        replicated_cluster(servers=2, workers=WORKERS, has_journal=True) as cluster,
        ExitStack() as stack,
    ):
        clients = [
            stack.enter_context(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
            for _ in range(WORKERS)
        ]
        yield Scene(cluster, clients)


def test_five_kills_of_the_scheduler_under_load_are_no_event(scene: Scene) -> None:
    cluster = scene.cluster
    tables = scene.tables("loaded")
    before = cluster.views.newest
    with counted_steps.under_load(COUNTED, tables, GOES_ON_S, DEADLINE_S) as loads:
        for _ in range(5):
            cluster.kill_scheduler()
            counted_steps.progress(loads, GOES_ON_S, 3)
            cluster.start_scheduler_again()
            counted_steps.progress(loads, GOES_ON_S, 3)
        after = cluster.views.catch_up()
    assert after.ranges == before.ranges
    assert after.tables == before.tables
    assert [node for node in after.nodes if node.role is not Role.READER] == [
        node for node in before.nodes if node.role is not Role.READER
    ]
    for server in cluster.servers:
        assert not cluster.lines(server.process, "event=(fenced|registering_again)")
        assert len(cluster.lines(server.process, "event=registered")) == 1
    assert scene.tables("made afterwards")
