"""Servers that are killed or paused under load: training goes on, nothing is lost or done twice.

Real processes, two replicas, a lease of a second. One cluster a lane serves all tests: each says
how many servers it begins with, and those that are missing are started.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

import ps_worker as ps
from tests.integration import counted_steps
from tests.integration.counted_steps import BLOCK, Counted, Load
from tests.integration.replicated_cluster import (
    DEADLINE_S,
    ReplicatedCluster,
    replicated_cluster,
    together,
)

pytestmark = pytest.mark.timeout(180)

WORKERS = 2
COUNTED = Counted(WORKERS, block_count=24)
SIZE = 24 * BLOCK
STEPS = 45

GOES_ON_S = 8.0
"""Training goes on within it: less than the ten seconds after which a worker asks again, who would
cover up for servers that lost what they said to each other.
"""


@dataclass
class Scene:
    """A cluster and its workers."""

    cluster: ReplicatedCluster
    clients: list[ps.Client]

    def __post_init__(self) -> None:
        self._count = 0

    def create(
        self, make: Callable[[ps.Client, str], ps.TableHandle]
    ) -> list[tuple[ps.Client, ps.TableHandle]]:
        """A table of a new name at each worker."""
        self._count += 1
        name = f"table {self._count}"
        return [(client, make(client, name)) for client in self.clients]


@pytest.fixture(scope="module", params=["grpc", pytest.param("shm", marks=pytest.mark.second_lane)])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with replicated_cluster(servers=3, workers=WORKERS) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(
                ps.connect(cluster.address, lane=request.param, request_deadline_s=DEADLINE_S)
            )
            for _ in range(WORKERS)
        ]
        scene = Scene(cluster, clients)
        scene.create(COUNTED.create)  # ranges have nobody until they hold something
        yield scene


def under_load(scene: Scene) -> AbstractContextManager[list[Load]]:
    """See `counted_steps.under_load`, with a table of its own."""
    return counted_steps.under_load(COUNTED, scene.create(COUNTED.create), GOES_ON_S, DEADLINE_S)


def progress(loads: list[Load], count: int = 5) -> None:
    """Each worker commits so many more steps."""
    counted_steps.progress(loads, GOES_ON_S, count)


# --- SIGKILL


@pytest.mark.slow
def test_a_killed_servers_ranges_go_on_under_load(scene: Scene) -> None:
    cluster = scene.cluster
    cluster.have(3)
    with under_load(scene) as loads:
        dying = cluster.a_primary()
        cluster.kill(dying)
        cluster.taken_over_from(dying)
        progress(loads)
        cluster.healed()


def train(
    client: ps.Client, table: ps.TableHandle, on_step: Callable[[int], None]
) -> npt.NDArray[np.float32]:
    """A BSP run whose every rounding is its own: the values after `STEPS` steps."""
    draw = np.random.default_rng(client.rank)
    for step in range(STEPS):
        on_step(step)
        gradient = draw.standard_normal(SIZE, np.float32)
        values = client.push_pull(table, gradient, timeout_s=GOES_ON_S)
    return np.asarray(values).copy()


def bsp_table(client: ps.Client, name: str, codec: str) -> ps.TableHandle:
    optimizer = ps.SGD(lr=0.01, momentum=0.9)
    return client.create_table(
        name, SIZE, optimizer=optimizer, block_elements=BLOCK, push_codec=codec
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "codec",
    [
        "none",
        *(
            pytest.param(codec, marks=pytest.mark.thorough)
            for codec in ("int8", "sign", "topk:0.1", "randomk:0.1", "lowrank:2")
        ),
    ],
)
def test_bsp_parameters_are_those_of_an_undisturbed_run(scene: Scene, codec: str) -> None:
    cluster = scene.cluster
    dying = cluster.have(3)[1]

    def run(on_step: Callable[[int], None]) -> list[npt.NDArray[np.float32]]:
        return together(
            partial(train, client, table, on_step if client.rank == 0 else _nothing)
            for client, table in scene.create(partial(bsp_table, codec=codec))
        )

    calm = run(_nothing)
    disturbed = run(lambda step: dying.process.send(signal.SIGKILL) if step == STEPS // 3 else None)
    cluster.kill(dying)  # which it is: this waits for its end
    cluster.taken_over_from(dying)
    for found in (*calm, *disturbed):
        assert np.array_equal(found.view(np.uint32), calm[0].view(np.uint32))


def _nothing(step: int) -> None:
    del step


# --- SIGSTOP


@pytest.mark.thorough
@pytest.mark.slow
def test_a_server_paused_for_longer_than_the_lease_comes_back_as_a_backup(scene: Scene) -> None:
    cluster = scene.cluster
    cluster.have(2)
    with under_load(scene) as loads:
        paused = cluster.a_primary()
        (other,) = (server for server in cluster.living if server is not paused)
        paused.process.send(signal.SIGSTOP)
        try:
            cluster.taken_over_from(paused)
            progress(loads)
        finally:
            paused.process.send(signal.SIGCONT)
        cluster.wait_line(paused.process, "event=ranges_given_up")
        cluster.healed()
        assert cluster.primary_of(paused) == []
        cluster.kill(other)
        cluster.taken_over_from(other)
        progress(loads)


def test_a_read_at_a_paused_server_is_answered_by_another_one(scene: Scene) -> None:
    cluster = scene.cluster
    cluster.have(3)
    (client, table), _ = scene.create(COUNTED.create)
    client.wait(client.push(table, COUNTED.gradient(client.rank)))
    paused = cluster.a_primary()
    paused.process.send(signal.SIGSTOP)
    try:
        COUNTED.check(client.pull(table, timeout_s=GOES_ON_S), [1, 0])
    finally:
        paused.process.send(signal.SIGCONT)
    cluster.wait_line(paused.process, "event=ranges_given_up")


# --- the dead are replaced


@pytest.mark.thorough
@pytest.mark.slow
def test_a_new_server_is_brought_up_to_date_and_stands_in_for_an_older_one(scene: Scene) -> None:
    cluster = scene.cluster
    first, second = cluster.have(2)
    with under_load(scene) as loads:
        cluster.kill(first)
        (new,) = cluster.start()
        cluster.healed()
        assert {second.address, new.address} == _addresses_of_in_sync(cluster)
        cluster.kill(second)
        cluster.taken_over_from(second)
        progress(loads)


def _addresses_of_in_sync(cluster: ReplicatedCluster) -> set[str]:
    view = cluster.views.newest
    return {view.nodes_by_id[node_id].address for r in view.ranges for node_id in r.in_sync}
