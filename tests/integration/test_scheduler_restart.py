"""A scheduler that is killed and started again with its journal: nobody notices (G8)."""

from __future__ import annotations

import resource
import shutil
import socket
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

WORKERS = 2
COUNTED = Counted(WORKERS, block_count=24)
MOST_BYTES = 4096
NOT_WRITTEN = "pushpull_scheduler_journal_not_written"
NO_LIMIT = resource.getrlimit(resource.RLIMIT_FSIZE)
LEASE_S = 10.0
"""On a busy machine, too, ranges stay where they are because nothing happened to their servers."""


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
        replicated_cluster(2, WORKERS, has_journal=True, lease_s=LEASE_S) as cluster,
        ExitStack() as stack,
    ):
        clients = [
            stack.enter_context(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
            for _ in range(WORKERS)
        ]
        yield Scene(cluster, clients)


@pytest.mark.parametrize("kills", [2, pytest.param(5, marks=pytest.mark.thorough)])
def test_kills_of_the_scheduler_under_load_are_no_event(scene: Scene, kills: int) -> None:
    cluster = scene.cluster
    tables = scene.tables(f"loaded {kills}")
    before = cluster.views.newest
    with counted_steps.under_load(COUNTED, tables, DEADLINE_S, DEADLINE_S) as loads:
        for _ in range(kills):
            cluster.kill_scheduler()
            counted_steps.progress(loads, DEADLINE_S, 3)
            cluster.start_scheduler_again()
            counted_steps.progress(loads, DEADLINE_S, 3)
        after = cluster.views.catch_up()
    assert after.ranges == before.ranges
    assert after.tables == before.tables
    assert [node for node in after.nodes if node.role is not Role.READER] == [
        node for node in before.nodes if node.role is not Role.READER
    ]
    for server in cluster.servers:
        assert not cluster.lines(server.process, "event=(fenced|registering_again)")
        assert len(cluster.lines(server.process, "event=registered")) == 1
    assert scene.tables(f"made after {kills}")


@pytest.mark.thorough
def test_nobody_gets_the_port_of_a_killed_scheduler_before_it_is_back(scene: Scene) -> None:
    cluster = scene.cluster
    cluster.kill_scheduler()
    host, port = cluster.address.split(":")
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind((host, int(port)))
    cluster.start_scheduler_again()
    assert cluster.views.newest.cluster_id


@pytest.mark.thorough
def test_an_older_copy_of_the_journal_ends_the_scheduler_and_the_newest_goes_on(
    scene: Scene, tmp_path: Path
) -> None:
    cluster = scene.cluster
    tables = scene.tables("copied")
    kept, copied, newest = cluster.journal_directory, tmp_path / "copied", tmp_path / "newest"
    with counted_steps.under_load(COUNTED, tables, DEADLINE_S, DEADLINE_S) as loads:
        cluster.kill_scheduler()
        shutil.copytree(kept, copied)
        cluster.start_scheduler_again()
        assert scene.tables("made after the copy")
        before = cluster.views.catch_up()
        cluster.kill_scheduler()
        shutil.copytree(kept, newest)
        _put(copied, kept)
        cluster.begin_scheduler_again()
        ended = cluster.scheduler.wait(DEADLINE_S)
        assert ended is not None
        assert ended.returncode == 2
        assert "it is an older copy. Put the newest" in ended.reason
        counted_steps.progress(loads, DEADLINE_S, 3)
        _put(newest, kept)
        cluster.start_scheduler_again()
        after = cluster.views.catch_up()
    assert after.ranges == before.ranges
    assert after.tables == before.tables
    for server in cluster.servers:
        assert not cluster.lines(server.process, "event=(fenced|registering_again)")


@pytest.mark.thorough
def test_a_full_disk_stops_what_is_new_and_nothing_else(scene: Scene) -> None:
    """No file of the scheduler's grows: it says so, and goes on when there is room again; or it is
    killed, and the next one has what was written last.
    """
    cluster = scene.cluster
    tables = scene.tables("while the disk is full")
    before = cluster.views.catch_up()
    with (
        counted_steps.under_load(COUNTED, tables, DEADLINE_S, DEADLINE_S) as loads,
        ThreadPoolExecutor(1) as pool,
    ):
        joins = _full_disk(cluster, pool, 1)
        assert "cannot be written" in _page(cluster, "healthz")
        assert f"{NOT_WRITTEN} 1.0" in _page(cluster, "metrics").splitlines()
        counted_steps.progress(loads, DEADLINE_S, 3)
        resource.prlimit(cluster.scheduler.pid, resource.RLIMIT_FSIZE, NO_LIMIT)
        cluster.wait_line(cluster.scheduler, "event=journal_written_again")
        joins.result(DEADLINE_S).close()
        assert f"{NOT_WRITTEN} 0.0" in _page(cluster, "metrics").splitlines()

        joins = _full_disk(cluster, pool, 2)
        cluster.kill_scheduler()
        cluster.start_scheduler_again()
        joins.result(DEADLINE_S).close()
        after = cluster.views.catch_up()
    assert after.ranges == before.ranges
    assert after.tables == before.tables


def _page(cluster: ReplicatedCluster, path: str) -> str:
    address = f"http://{cluster.scheduler_http}/{path}"
    with urllib.request.urlopen(address, timeout=20) as page:
        text: str = page.read().decode()
    return text


def _full_disk(cluster: ReplicatedCluster, pool: ThreadPoolExecutor, count: int) -> Future[Any]:
    """The journal takes no more, as the scheduler says when somebody comes: who that is waits."""
    resource.prlimit(cluster.scheduler.pid, resource.RLIMIT_FSIZE, (MOST_BYTES, NO_LIMIT[1]))
    joins = pool.submit(ps.connect, cluster.address, role="reader", connect_deadline_s=DEADLINE_S)
    words = "event=journal_not_written .*cannot be written .*: free space there"
    cluster.wait_line(cluster.scheduler, words, count)
    assert not joins.done()
    return joins


def _put(copy: Path, place: Path) -> None:
    shutil.rmtree(place)
    shutil.copytree(copy, place)
