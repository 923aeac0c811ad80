"""Servers with one replica and an update log: whoever is killed comes back with all that it did.

Real processes, a lease of a second. A cluster for each lane serves all tests;
`make check` has one of them, `make lanes-check` both.
"""

from __future__ import annotations

import re
import resource
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ps_worker as ps
from ps_runtime.launch.cluster_shape import ClusterShape, UpdateLogPlan
from ps_runtime.launch.launcher import Launcher, start_scheduler, start_server
from tests.integration import counted_steps
from tests.integration.counted_steps import BLOCK, Counted, Load
from tests.integration.lane_cluster import Served
from tests.integration.replicated_cluster import (
    DEADLINE_S,
    Lines,
    ReplicatedCluster,
    replicated_cluster,
    together,
)
from tests.integration.rows_alone import RowsAlone

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

WORKERS = 2
COUNTED = Counted(WORKERS, block_count=24)
SIZE = 24 * BLOCK
STEPS = 45
BOUND_MB = 8
"""So small that segments are begun and dropped all the time: a step is 0.4 MB."""


MOST_BYTES = 500_000
"""Less than a segment has, in a file of a server that may write no more."""


class Scene:
    """A cluster, its workers, and where its logs are."""

    def __init__(self, cluster: ReplicatedCluster, clients: list[ps.Client], path: Path) -> None:
        self.cluster = cluster
        self.clients = clients
        self.path = path
        self._count = 0

    def create(
        self, make: Callable[[ps.Client, str], ps.TableHandle]
    ) -> list[tuple[ps.Client, ps.TableHandle]]:
        """A table of a new name at each worker."""
        self._count += 1
        name = f"table {self._count}"
        return [(client, make(client, name)) for client in self.clients]

    def kill_and_start_again(self, server: Served) -> Served:
        """SIGKILL; the one that follows has its log, and its ranges."""
        had = {r.range_id for r in self.cluster.primary_of(server)}
        assert had
        self.cluster.kill(server)
        again = self.cluster.start_again(server)
        assert {r.range_id for r in self.cluster.primary_of(again)} == had
        return again


@pytest.fixture(scope="module", params=[pytest.param("grpc", marks=pytest.mark.second_lane), "shm"])
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    path = tmp_path_factory.mktemp("logs")
    shape: dict[str, Any] = {"replica_count": 1, "update_log": UpdateLogPlan(str(path), BOUND_MB)}
    with replicated_cluster(2, WORKERS, **shape) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(
                ps.connect(cluster.address, lane=request.param, request_deadline_s=DEADLINE_S)
            )
            for _ in range(WORKERS)
        ]
        scene = Scene(cluster, clients, path)
        scene.create(COUNTED.create)  # ranges have nobody until they hold something
        yield scene


def under_load(scene: Scene) -> AbstractContextManager[list[Load]]:
    """See `counted_steps.under_load`, with a table of its own."""
    return counted_steps.under_load(COUNTED, scene.create(COUNTED.create), DEADLINE_S, DEADLINE_S)


def progress(loads: list[Load], count: int = 5) -> None:
    """Each worker commits so many more steps."""
    counted_steps.progress(loads, DEADLINE_S, count)


def test_a_killed_server_comes_back_with_all_that_was_committed(scene: Scene) -> None:
    server = scene.cluster.living[0]
    with under_load(scene) as loads:
        for _ in range(2):  # the one that came back may be killed, too
            server = scene.kill_and_start_again(server)
            progress(loads)


@pytest.mark.thorough
def test_a_killed_server_comes_back_with_its_rows(scene: Scene) -> None:
    """Whole numbers: each sum is exact."""
    adds = ps.SGD(lr=1.0, maximize=True)
    tables = scene.create(lambda client, name: client.create_embedding(name, 4, optimizer=adds))
    draws, expected = np.random.default_rng(1), np.zeros(300)
    for step in range(12):
        tickets = []
        for client, table in tables:
            ids = draws.integers(300, size=80)
            np.add.at(expected, ids, 1.0)
            rows = np.full((80, 4), float(WORKERS), np.float32)  # the mean divides it
            tickets.append((client, client.push_rows(table, ids, rows)))
        for client, ticket in tickets:
            client.wait(ticket)
        if step in (4, 8):
            scene.kill_and_start_again(scene.cluster.living[0])
    for client, table in tables:
        assert np.array_equal(client.pull_rows(table, np.arange(300))[:, 3], expected)


@pytest.mark.thorough
def test_the_rows_that_it_evicted_and_those_it_did_not_admit_are_as_they_were(
    scene: Scene,
) -> None:
    """Bit by bit as on a server that was not killed: ages and candidates are in the log, and rows
    that were rounded are rounded alike.
    """
    terms: dict[str, Any] = {"max_rows": 60, "partitions": 3, "evict_after": 9, "admit_after": 2}
    terms["storage"] = "bfloat16"
    tables = scene.create(
        lambda client, name: client.create_embedding(
            name, 4, optimizer=ps.Adagrad(lr=0.1), init=ps.Uniform(1.0), **terms
        )
    )
    draws, alone = np.random.default_rng(2), RowsAlone(tables[0][1])
    for step in range(14):
        pushes = [
            ((draws.zipf(1.3, 40) - 1) % 300, draws.standard_normal((40, 4)).astype(np.float32))
            for _ in tables
        ]
        tickets = [
            (client, client.push_rows(table, *push))
            for (client, table), push in zip(tables, pushes, strict=True)
        ]
        for client, ticket in tickets:
            client.wait(ticket)
        alone.step(pushes)
        if step in (4, 9):
            scene.kill_and_start_again(scene.cluster.living[0])
    assert 0 < alone.store.row_count < 300
    for client, table in tables:
        found = client.pull_rows(table, np.arange(300))
        assert np.array_equal(found, alone.pull(np.arange(300)))


@pytest.mark.thorough
def test_all_servers_may_be_killed_at_once(scene: Scene) -> None:
    with under_load(scene):
        killed = list(scene.cluster.living)
        for server in killed:
            scene.cluster.kill(server)
        for server in killed:
            scene.cluster.start_again(server)


@pytest.mark.thorough
def test_a_server_whose_log_takes_no_more_ends_and_has_lost_nothing(scene: Scene) -> None:
    """As on a full disk: what the log does not take is answered to nobody."""
    server = scene.cluster.living[0]
    with under_load(scene) as loads:
        _, hard = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (MOST_BYTES, hard))
        ended = server.process.wait(DEADLINE_S)
        assert ended is not None
        assert ended.returncode == 1
        (said,) = scene.cluster.lines(server.process, "event=update_log_failed")
        assert re.search(r"/server-\d: the update log cannot be written: .*File too large", said)
        scene.cluster.start_again(server)
        progress(loads)


@pytest.mark.thorough
def test_the_log_stays_near_its_bound(scene: Scene) -> None:
    """Beyond it goes what the newest bases do not need; a killed server has enough left."""
    with under_load(scene) as loads:
        progress(loads, 100)
        for directory in scene.path.iterdir():
            segments = sorted(directory.glob("*.log"))
            assert segments[0].name != "00000001.log", "nothing was ever dropped"
            size_mb = sum(segment.stat().st_size for segment in segments) / 1e6
            assert size_mb < 3 * BOUND_MB, f"{directory}: {size_mb:.1f} MB"
        scene.kill_and_start_again(scene.cluster.living[0])


def train(
    client: ps.Client, table: ps.TableHandle, on_step: Callable[[int], None]
) -> npt.NDArray[np.float32]:
    """A BSP run whose every rounding is its own: the values after `STEPS` steps."""
    draw = np.random.default_rng(client.rank)
    for step in range(STEPS):
        on_step(step)
        gradient = draw.standard_normal(SIZE, np.float32)
        values = client.push_pull(table, gradient, timeout_s=DEADLINE_S)
    return np.asarray(values).copy()


def bsp_table(client: ps.Client, name: str) -> ps.TableHandle:
    return client.create_table(name, SIZE, optimizer=ps.Adam(lr=0.01), block_elements=BLOCK)


@pytest.mark.thorough
def test_bsp_parameters_are_those_of_an_undisturbed_run(scene: Scene) -> None:
    def run(on_step: Callable[[int], None]) -> list[npt.NDArray[np.float32]]:
        return together(
            partial(train, client, table, on_step if client.rank == 0 else _nothing)
            for client, table in scene.create(bsp_table)
        )

    def strike(step: int) -> None:
        if step in (STEPS // 3, STEPS // 2):
            scene.kill_and_start_again(scene.cluster.living[-1])

    undisturbed, struck = run(_nothing), run(strike)
    for one, other in zip(undisturbed, struck, strict=True):
        assert np.array_equal(one, other)


def _nothing(step: int) -> None:
    del step


@pytest.mark.thorough
def test_a_server_that_ends_by_itself_comes_back_too(scene: Scene) -> None:
    """SIGTERM: it leaves the cluster, and its log has all."""
    with under_load(scene) as loads:
        server = scene.cluster.living[0]
        scene.cluster.stop(server)
        [said] = scene.cluster.lines(server.process, "event=leaves_with_the_only_copy")
        assert "no place for checkpoints: its update log alone has them" in said
        scene.cluster.start_again(server)
        progress(loads)


@pytest.mark.thorough
def test_a_log_has_one_server_at_a_time(scene: Scene) -> None:
    """Who comes with the log of one that lives waits for its lock, and takes nothing from it."""
    server = scene.cluster.living[0]
    with under_load(scene) as loads:
        second = scene.cluster.begin_again(server)
        scene.cluster.wait_line(second, "event=waiting_for_update_log")
        progress(loads)
        scene.cluster.kill(server)
        scene.cluster.served(second)


@pytest.mark.thorough
def test_an_empty_log_is_given_nothing(scene: Scene, tmp_path: Path) -> None:
    """What was kept elsewhere cannot be told from what is lost: its ranges wait for their log."""
    server = scene.cluster.living[0]
    kept = scene.path / f"server-{server.process.command.index}"
    with under_load(scene) as loads:
        node_id = scene.cluster.node_id(server)
        scene.cluster.kill(server)
        kept.rename(tmp_path / "kept")
        stranger = scene.cluster.start_again(server)
        assert not scene.cluster.primary_of(stranger)
        assert any(r.primary == node_id for r in scene.cluster.views.newest.ranges)
        scene.cluster.kill(stranger)
        shutil.rmtree(kept)
        (tmp_path / "kept").rename(kept)
        again = scene.cluster.start_again(stranger)
        assert all(r.primary != node_id for r in scene.cluster.views.newest.ranges)
        assert scene.cluster.primary_of(again)
        progress(loads)


@pytest.mark.thorough
def test_another_cluster_of_other_ranges_begins_anew_with_its_log(tmp_path: Path) -> None:
    """What the log has is of another cluster; it is kept as history."""
    shape = ClusterShape(1, 1, update_log=UpdateLogPlan(str(tmp_path)))
    found = []
    for ranges in ("9", "3", "64"):
        of_ranges = replace(shape, environment={"PUSHPULL_RANGES": ranges})
        with ps.LocalCluster.of(of_ranges) as cluster, ps.connect(cluster.address) as client:
            assert len(client.engine.view.ranges) == int(ranges)
            table = bsp_table(client, "the same")
            client.push_pull(table, np.ones(SIZE, np.float32))
            found.append(np.array(client.pull(table)))
    assert all(np.array_equal(each, found[0]) for each in found)
    assert len(list((tmp_path / "server-0").glob("*.log"))) >= len(found)


@pytest.mark.thorough
def test_a_new_cluster_that_waits_for_its_server_has_nothing_of_an_old_log(tmp_path: Path) -> None:
    """Its ranges are placed with the server at the moment when that comes with the log."""
    shape = ClusterShape(1, 1, update_log=UpdateLogPlan(str(tmp_path)))
    for _ in range(2):
        lines = Lines()
        with Launcher(on_line=lines.add) as launcher:
            address = start_scheduler(launcher, shape).address
            with ps.connect(address) as client, ThreadPoolExecutor(1) as pool:
                making = pool.submit(bsp_table, client, "the same")
                lines.wait(launcher.processes[0], "event=table_waits", 1)
                launcher.wait_ready(start_server(launcher, shape, address, 0), DEADLINE_S)
                table = making.result(DEADLINE_S)
                assert not np.any(client.pull(table))
                client.push_pull(table, np.ones(SIZE, np.float32))
