"""Servers that are replaced one after the other under load: nothing is lost, no push fails."""

from __future__ import annotations

import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import ps_worker as ps
from ps_cli.__main__ import app
from ps_runtime.launch.cluster_shape import CheckpointPlan
from tests.integration.lane_cluster import Served, until
from tests.integration.replicated_cluster import (
    DEADLINE_S,
    LEASE_S,
    ReplicatedCluster,
    replicated_cluster,
)

pytestmark = pytest.mark.slow

ELEMENTS = 64 * 512


@pytest.fixture(scope="module")
def cluster() -> Iterator[ReplicatedCluster]:
    with replicated_cluster(servers=2, workers=1, lease_s=3.0) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: ReplicatedCluster) -> Iterator[ps.Client]:
    with ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client:
        yield client


class Load:
    """A thread that pushes ones all the time."""

    def __init__(self, client: ps.Client, name: str) -> None:
        self._client = client
        self.table = client.create_table(
            name, ELEMENTS, optimizer=ps.SGD(lr=1.0), consistency="asp", block_elements=64
        )
        self.count = 0
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._push, daemon=True)
        self._thread.start()

    def _push(self) -> None:
        ones = np.ones(ELEMENTS, np.float32)
        try:
            while not self._stop.is_set():
                self._client.wait(self._client.push(self.table, ones))
                self.count += 1
        except ps.PushpullError as error:
            self._failure = error

    def cut_off(self) -> None:
        """Nobody is left to push to."""
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def end(self) -> None:
        """All that was acknowledged is there once, and nothing failed."""
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert self._failure is None, self._failure
        assert self.count > 0
        values = np.asarray(self._client.pull(self.table))
        assert set(values) == {-float(self.count)}


def is_ready(server: Served) -> tuple[bool, str]:
    try:
        with urllib.request.urlopen(f"http://{server.http_address}/readyz", timeout=5) as answer:
            return True, answer.read().decode()
    except urllib.error.HTTPError as error:
        return False, error.read().decode()


def is_empty(server: Served) -> bool:
    with urllib.request.urlopen(f"http://{server.http_address}/metrics", timeout=5) as page:
        return b"pushpull_server_state_bytes 0.0" in page.read()


@pytest.mark.thorough
@pytest.mark.timeout(150)
def test_each_server_is_stopped_and_another_comes(
    cluster: ReplicatedCluster, client: ps.Client
) -> None:
    load = Load(client, "rolled")
    for _ in range(2):
        for server in list(cluster.living):
            cluster.stop(server)
            assert server.process.exit is not None
            assert server.process.exit.how == "exit code 0"
            cluster.start()
    load.end()


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_who_has_the_only_copy_waits_for_another_to_have_it(
    cluster: ReplicatedCluster, client: ps.Client
) -> None:
    """Nobody else is there; then the one that comes is brought up to date first."""
    load = Load(client, "alone")
    cluster.healed()
    first, second = cluster.living
    cluster.stop(first)
    second.process.send(signal.SIGTERM)
    cluster.wait_line(second.process, "event=stays_for_now.*another server to hold it")
    assert is_ready(second) == (False, "told to stop\n")
    assert second.process.exit is None
    (third,) = cluster.start()
    assert second.process.wait(DEADLINE_S) is not None
    assert cluster.lines(second.process, "leaves_with_the_only_copy") == []
    load.end()
    assert is_ready(third)[0]
    cluster.start()
    cluster.healed()


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_two_that_are_stopped_at_once_do_not_both_leave(
    cluster: ReplicatedCluster, client: ps.Client
) -> None:
    load = Load(client, "both")
    cluster.healed()
    both = cluster.living
    for server in both:
        server.process.send(signal.SIGTERM)
    stays = [server for server in both if not _leaves(cluster, server)]
    assert len(stays) == 1
    cluster.start()
    assert stays[0].process.wait(DEADLINE_S) is not None
    load.end()
    cluster.start()
    cluster.healed()


def _leaves(cluster: ReplicatedCluster, server: Served) -> bool:
    """Whether it ends, or says that it stays: first each waits for a sign of life of the other."""
    said = "event=(stays_for_now.*the only copy|deregistered)"
    return "stays_for_now" not in cluster.wait_line(server.process, said)[0]


@pytest.mark.timeout(60)
def test_a_person_who_presses_ctrl_c_waits_for_nothing(cluster: ReplicatedCluster) -> None:
    server = cluster.living[0]
    server.process.send(signal.SIGINT)
    ended = server.process.wait(10.0)
    assert ended is not None
    assert cluster.lines(server.process, "stays_for_now") == []


@pytest.mark.timeout(90)
def test_without_replicas_a_checkpoint_is_made_before_it_leaves(tmp_path: Path) -> None:
    plan = CheckpointPlan(str(tmp_path))
    with (
        replicated_cluster(1, 1, replica_count=1, checkpoints=plan) as cluster,
        ps.connect(cluster.address, request_deadline_s=5.0) as client,
    ):
        load = Load(client, "single")
        (server,) = cluster.living
        cluster.stop(server)
        assert cluster.lines(server.process, "leaves_with_the_only_copy") == []
        (made,) = cluster.lines(cluster.scheduler, "event=checkpoint_made")
        assert str(tmp_path) in made
        load.cut_off()
        client.close(leave=False)


@pytest.mark.thorough
@pytest.mark.timeout(90)
def test_it_waits_for_a_scheduler_that_comes_back_and_makes_one(tmp_path: Path) -> None:
    """Both are told to stop at once, and the scheduler is started again first."""
    plan = CheckpointPlan(str(tmp_path))
    with (
        replicated_cluster(1, 1, replica_count=1, checkpoints=plan, has_journal=True) as cluster,
        ps.connect(cluster.address, request_deadline_s=5.0) as client,
    ):
        load = Load(client, "single")
        (server,) = cluster.living
        cluster.kill_scheduler()
        server.process.send(signal.SIGTERM)
        cluster.wait_line(server.process, "event=told_to_stop")
        assert server.process.wait(3 * LEASE_S) is None, "it stays beyond a lease"
        cluster.start_scheduler_again()
        cluster.wait_line(cluster.scheduler, "event=checkpoint_made")
        assert server.process.wait(DEADLINE_S) is not None
        assert cluster.lines(server.process, "leaves_") == []
        load.cut_off()
        client.close(leave=False)


@pytest.mark.thorough
@pytest.mark.timeout(150)
def test_a_checkpoint_is_made_once_and_the_server_stays_with_a_named_run(tmp_path: Path) -> None:
    """No checkpoint has its values; when the run is removed another is made, and it leaves."""
    plan = CheckpointPlan(str(tmp_path))
    with (
        replicated_cluster(
            1, 1, replica_count=1, checkpoints=plan, environment={"PUSHPULL_DRAIN_GRACE_S": "90"}
        ) as cluster,
        ps.connect(cluster.address, request_deadline_s=5.0) as client,
    ):
        with ps.connect(cluster.address, run="nightly", world_size=1) as named:
            named.create_table("model", ELEMENTS, optimizer=ps.SGD(lr=1.0), block_elements=64)
        load = Load(client, "single")
        (server,) = cluster.living
        server.process.send(signal.SIGTERM)
        words = "event=stays_for_now.*only copy of values of run 'nightly', which no checkpoint"
        cluster.wait_line(server.process, words)
        (made,) = cluster.wait_line(cluster.scheduler, "event=checkpoint_made")
        assert str(tmp_path) in made
        result = CliRunner().invoke(
            app, ["runs", "remove", "nightly", "--scheduler", cluster.address]
        )
        assert result.exit_code == 0, result.output
        assert server.process.wait(DEADLINE_S) is not None
        assert cluster.lines(server.process, "leaves_with_the_only_copy") == []
        assert len(cluster.wait_line(cluster.scheduler, "event=checkpoint_made", 2)) == 2
        load.cut_off()
        client.close(leave=False)


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_a_server_that_had_values_of_a_removed_run_alone_leaves_and_ends_no_run() -> None:
    """Its ranges are empty: the next table is trained on them, on the server in its place."""
    with (
        replicated_cluster(2, 1, replica_count=1) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        with ps.connect(cluster.address, run="over", world_size=1) as named:
            made = named.create_table("model", ELEMENTS, optimizer=ps.SGD(lr=1.0))
            named.push_pull(made, np.ones(ELEMENTS, np.float32))
        first = cluster.a_primary()
        (second,) = (each for each in cluster.living if each is not first)
        result = CliRunner().invoke(app, ["runs", "remove", "over", "--scheduler", cluster.address])
        assert result.exit_code == 0, result.output
        until(lambda: is_empty(first), "the server has dropped what was removed")
        cluster.stop(first)
        assert cluster.lines(first.process, "leaves_with_the_only_copy") == []
        cluster.wait_line(cluster.scheduler, "event=ranges_unplaced")
        (third,) = cluster.start()
        table = client.create_table("next", ELEMENTS, optimizer=ps.SGD(lr=1.0), block_elements=64)
        values = client.push_pull(table, np.full(ELEMENTS, -2.0, np.float32))
        assert set(np.asarray(values).tolist()) == {2.0}
        primaries = {each.primary for each in cluster.views.catch_up().ranges}
        assert primaries == {cluster.node_id(second), cluster.node_id(third)}
        assert cluster.lines(cluster.scheduler, "event=ranges_lost") == []


@pytest.mark.timeout(90)
def test_what_is_lost_all_the_same_is_told_at_once() -> None:
    """One copy, no place for checkpoints: nothing could have it when its server is stopped."""
    with (
        replicated_cluster(1, 2, replica_count=1) as cluster,
        ps.connect(cluster.address, rank=0, request_deadline_s=DEADLINE_S) as client,
        ps.connect(cluster.address, role="reader", request_deadline_s=DEADLINE_S) as reader,
    ):
        table = client.create_table("gone", ELEMENTS, optimizer=ps.SGD(lr=1.0), block_elements=64)
        waits = client.push(table, np.ones(ELEMENTS, np.float32))  # for worker 1, which never comes
        (server,) = cluster.living
        had = f"server {cluster.node_id(server)} had the only copy"
        cluster.stop(server)
        assert cluster.lines(server.process, "leaves_with_the_only_copy ranges=64")
        words = f"key ranges are lost, with values of 'gone': {had}.*Restore a"
        with pytest.raises(ps.PushpullError, match=words) as told:
            client.wait(waits)
        assert told.value.code == "VALUES_LOST"
        with pytest.raises(ps.PushpullError, match=words):
            reader.pull(reader.table("gone"))
        cluster.wait_line(cluster.scheduler, "event=ranges_lost ranges=64")
        with urllib.request.urlopen(f"http://{cluster.scheduler_http}/healthz", timeout=5) as page:
            assert page.read().startswith(b"degraded: 64 of 64 key ranges are lost")
        with urllib.request.urlopen(f"http://{cluster.scheduler_http}/metrics", timeout=5) as page:
            assert b"pushpull_scheduler_lost_ranges 64.0" in page.read()
        client.close(leave=False)
