"""A server is killed under each way of training; a worker dies with it; readers and changes."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import ps_worker as ps
from tests.integration.counted_steps import BLOCK, Counted, Load, stop_together
from tests.integration.replicated_cluster import (
    DEADLINE_S,
    ReplicatedCluster,
    replicated_cluster,
    together,
)
from tests.integration.warm_processes import warm_context

pytestmark = [pytest.mark.timeout(180), pytest.mark.thorough]

WORKERS = 2
BLOCK_COUNT = 12
SIZE = BLOCK_COUNT * BLOCK
STEPS = 24
READS = 16
"""Many: of those that are read without a cut only some are seen to be of several clocks."""
COUNTED = Counted(WORKERS, BLOCK_COUNT)
PATIENCE = {"PUSHPULL_WORKER_TIMEOUT_S": "2.5"}

Array = npt.NDArray[np.float32]
Then = Callable[[], None]
Step = Callable[[ps.Client, ps.TableHandle, Array, Then], Any]
"""`Then` is called when the step is committed; what it led to is read after that."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ReplicatedCluster]:
    with replicated_cluster(servers=3, workers=WORKERS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def clients(cluster: ReplicatedCluster) -> Iterator[list[ps.Client]]:
    with ExitStack() as stack:
        made = [ps.connect(cluster.address, request_deadline_s=DEADLINE_S) for _ in range(WORKERS)]
        first = [COUNTED.create(client, "first") for client in made]
        assert len(first) == WORKERS  # ranges have nobody until they hold something
        for client in made:
            stack.enter_context(client)
        yield made


# --- every way of training


def plain(client: ps.Client, table: ps.TableHandle, gradient: Array, then: Then) -> Any:
    client.wait(client.push(table, gradient))
    then()
    return client.pull(table)


def clipped(client: ps.Client, table: ps.TableHandle, gradient: Array, then: Then) -> Any:
    """The update waits for the scale that follows from its norm over all servers."""
    client.push(table, gradient, seal=False)
    told = client.wait(client.seal(table, clip_scale=1.0))
    norm = math.sqrt(math.fsum(told.squares.values()))  # the same at all, in whichever order
    client.wait(client.scale_update(table, told.clock, min(1.0, 1.0 / norm)))
    then()
    return client.pull(table)


def trained(
    client: ps.Client, step: Step, options: dict[str, Any], on_step: Callable[[int], None]
) -> Array:
    """What a worker sees at the end of each of its steps, in a row."""
    table = client.create_table(options["name"], SIZE, **options["table"])
    draw = np.random.default_rng(client.rank)
    seen = []
    for number in range(STEPS):
        gradient = draw.standard_normal(SIZE, np.float32)
        then = partial(on_step, number)
        seen.append(np.asarray(step(client, table, gradient, then)).copy())
    return np.stack(seen)


def _nothing(step: int) -> None:
    del step


@pytest.mark.parametrize(
    ("optimizer", "step"),
    [
        (ps.SGD(lr=0.05, momentum=0.9), plain),
        (ps.Adam(lr=1e-2), plain),
        (ps.Aggregate(), plain),
        (ps.SGD(lr=0.05, momentum=0.9), clipped),
    ],
    ids=["momentum", "adam", "aggregate", "clipped"],
)
def test_every_step_is_as_in_a_run_without_a_kill(
    cluster: ReplicatedCluster,
    clients: list[ps.Client],
    request: pytest.FixtureRequest,
    optimizer: ps.SGD,
    step: Step,
) -> None:
    dying = cluster.have(3)[0]

    def run(name: str, on_step: Callable[[int], None]) -> list[Array]:
        table = {"optimizer": optimizer, "block_elements": BLOCK}
        options = {"name": f"{request.node.callspec.id} {name}", "table": table}
        hooks = [on_step, *[_nothing] * (WORKERS - 1)]
        return together(
            partial(trained, client, step, options, hook)
            for client, hook in zip(clients, hooks, strict=True)
        )

    def kill(number: int) -> None:
        if number == STEPS // 3:
            dying.process.send(signal.SIGKILL)

    calm, disturbed = run("calm", _nothing), run("disturbed", kill)
    cluster.kill(dying)  # which it is: this waits for its end
    cluster.taken_over_from(dying)
    for found in (*calm, *disturbed):
        assert np.array_equal(found.view(np.uint32), calm[0].view(np.uint32))


# --- readers, and a setting that changes


def test_a_whole_model_is_read_by_a_cut_while_ranges_are_taken_over() -> None:
    """A server that does not answer is asked again, and so is the one that has its ranges then."""
    with (
        replicated_cluster(servers=2, workers=1) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
        ps.connect(cluster.address, role="reader", request_deadline_s=DEADLINE_S) as reader,
    ):
        model, read = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        groups = [{"params": [parameter]} for parameter in model.parameters()]
        optimizer = ps.DistributedOptimizer(
            client, groups, module=model, optimizer=ps.SGD(lr=0.5), consistency="ssp:2"
        )
        model(torch.ones(64)).sum().backward()
        optimizer.step()
        cluster.healed()
        assert ps.pull_model(reader, read) == 1
        with torch.no_grad():
            for parameter in read.parameters():
                parameter.zero_()
        cluster.kill(cluster.a_primary())
        assert ps.pull_model(reader, read) == 1
        for found, expected in zip(read.parameters(), model.parameters(), strict=True):
            assert torch.equal(found, expected)


def test_a_consistent_read_and_a_change_of_consistency_end_well(
    cluster: ReplicatedCluster, clients: list[ps.Client]
) -> None:
    dying = cluster.have(3)[0]
    made = [(client, COUNTED.create(client, "changing", "ssp:2")) for client in clients]
    loads = [Load(COUNTED, client, table) for client, table in made]
    read: list[npt.NDArray[np.int64]] = []

    def change(consistency: str) -> None:
        clients[0].set_consistency(made[0][1], consistency)

    with ps.connect(cluster.address, role="reader", request_deadline_s=DEADLINE_S) as reader:

        def look() -> None:
            for _ in range(READS):
                handle = reader.table("changing")
                read.append(COUNTED.steps(reader.pull(handle, consistent=True)))

        def disturb() -> None:
            try:
                for load in loads:
                    load.more(2, DEADLINE_S)
                dying.process.send(signal.SIGKILL)
                look()
                change("asp")
                change("ssp:1")
                look()
            finally:
                stop_together(loads)

        *taken, _ = together([*(load.run for load in loads), disturb])
    cluster.kill(dying)
    cluster.taken_over_from(dying)
    for found in read:
        assert np.all(found == found[0]), "a consistent read is of several clocks"
    COUNTED.check(clients[0].pull(made[0][1]), taken)


# --- a worker dies with a server


def push_until_killed(address: str, pipe: Connection) -> None:
    """A worker process: steps without end."""
    with suppress(ps.PushpullError):
        client = ps.connect(address, rank=1, request_deadline_s=DEADLINE_S)
        table = client.create_table(
            "short", SIZE, optimizer=ps.SGD(lr=1.0), reduction="sum", block_elements=BLOCK
        )
        while True:
            client.push_pull(table, COUNTED.gradient(1))
            pipe.send(table.clock)
    os._exit(1)


def test_a_worker_and_a_server_are_killed_at_once() -> None:
    """BSP: what the dead worker was told is in all of the values; of a last step some have it."""
    context = warm_context()
    ours, theirs = context.Pipe(duplex=False)
    with (
        replicated_cluster(servers=2, workers=WORKERS, environment=PATIENCE) as cluster,
        ps.connect(cluster.address, rank=0, request_deadline_s=DEADLINE_S) as client,
    ):
        dying = context.Process(target=push_until_killed, args=(cluster.address, theirs))
        dying.start()
        table = client.create_table(
            "short", SIZE, optimizer=ps.SGD(lr=1.0), reduction="sum", block_elements=BLOCK
        )
        enough = threading.Event()
        told: list[int] = []

        def train() -> int:
            while not enough.is_set():
                client.push_pull(table, COUNTED.gradient(0))
            return table.clock

        def kill() -> None:
            try:
                for _ in range(5):
                    assert ours.poll(DEADLINE_S)
                    told.append(ours.recv())
                server = cluster.living[0]
                assert cluster.primary_of(server)
                dying.kill()
                cluster.kill(server)
                cluster.taken_over_from(server)
                cluster.wait_line(cluster.scheduler, "event=worker_gone")
                clock = table.clock
                while table.clock < clock + 5:  # each step is a round over the network
                    client.pull(table)
            finally:
                enough.set()

        taken, _ = together([train, kill])
        dying.join()
        while ours.poll():
            told.append(ours.recv())
        found = COUNTED.steps(client.pull(table))
        assert np.all(found[:, 0] == taken)
        of_the_dead = set(found[:, 1].tolist())
        assert max(of_the_dead) - min(of_the_dead) <= 1, of_the_dead
        assert told[-1] <= min(of_the_dead) < taken
