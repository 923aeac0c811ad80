"""Workers that are killed or paused: the others finish all their steps, and name who is missing.

Real processes; every wait is for an event. The scheduler's patience is a few seconds, not half a
minute.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ps_worker as ps
from ps_cli.console import scheduler_query
from ps_cli.status.document import status_document
from ps_runtime.launch.launcher import RoleProcess
from tests.integration.lane_cluster import LaneCluster, lane_cluster, until
from tests.integration.warm_processes import warm_context

pytestmark = pytest.mark.slow

WORKERS = 3
VICTIM = 2
STEPS = 30
DEADLINE_S = 45.0
BLOCK = 16 * 1024
SIZE = 12 * BLOCK
PATIENCE = {
    "PUSHPULL_HEARTBEAT_INTERVAL_S": "0.2",
    "PUSHPULL_LEASE_S": "1.0",
    "PUSHPULL_WORKER_TIMEOUT_S": "2.5",
}
GONE = rf"worker {VICTIM} was declared gone after \d+(\.\d)? s of silence"


@pytest.fixture
def cluster() -> Iterator[LaneCluster]:
    with lane_cluster(servers=2, workers=WORKERS, environment=PATIENCE) as cluster:
        yield cluster


def table(client: ps.Client, consistency: str, **options: Any) -> ps.TableHandle:
    return client.create_table(
        f"table under {consistency}",
        SIZE,
        optimizer=ps.SGD(lr=1.0),
        consistency=consistency,
        block_elements=BLOCK,
        **options,
    )


def gradient(rank: int) -> npt.NDArray[np.float32]:
    """Whose it was is seen in any sum: 1, 10 or 100 all over it."""
    return np.full(SIZE, 10.0**rank, np.float32)


# --- the victim


def take_steps(address: str, lane: str, consistency: str, pipe: Connection) -> None:
    """A worker process: steps without end, until it is told otherwise; says how it ended."""
    client = ps.connect(address, rank=VICTIM, lane=lane, request_deadline_s=DEADLINE_S)
    try:
        handle = table(client, consistency)
        while True:
            client.push_pull(handle, gradient(VICTIM))
            pipe.send(handle.clock)
    except ps.PushpullError as error:
        pipe.send((type(error).__name__, str(error)))
    finally:
        os._exit(0)


def push_half(address: str, lane: str, consistency: str, pipe: Connection) -> None:
    """A worker process: a whole step, then one that it never seals."""
    client = ps.connect(address, rank=VICTIM, lane=lane, request_deadline_s=DEADLINE_S)
    handle = table(client, consistency)
    client.wait(client.push(handle, gradient(VICTIM)), DEADLINE_S)
    client.push(handle, gradient(VICTIM), seal=False)
    pipe.send(handle.clock)
    signal.pause()


@dataclass
class Victim:
    """The worker that is killed or paused."""

    process: BaseProcess
    pipe: Connection

    def hear(self) -> Any:
        """What it says next."""
        assert self.pipe.poll(DEADLINE_S), "the victim says nothing"
        return self.pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def victim(cluster: LaneCluster, lane: str, consistency: str, life: Any) -> Iterator[Victim]:
    context = warm_context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=life, args=(cluster.address, lane, consistency, theirs), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield Victim(process, ours)
    finally:
        process.kill()
        process.join()
        ours.close()


# --- the others


@contextmanager
def living(cluster: LaneCluster) -> Iterator[list[ps.Client]]:
    clients = [
        ps.connect(cluster.address, rank=rank, request_deadline_s=DEADLINE_S)
        for rank in range(WORKERS)
        if rank != VICTIM
    ]
    yield clients
    for client in clients:
        client.close(leave=False)


def train(client: ps.Client, handle: ps.TableHandle, steps: int) -> None:
    for _ in range(steps):
        client.push_pull(handle, gradient(client.session.rank))


def steps_of_victim(client: ps.Client, handle: ps.TableHandle, *, is_bsp: bool) -> set[int]:
    """How many steps of the victim are in the blocks, all of the others' being in each."""
    found = np.asarray(client.pull(handle)).reshape(-1, BLOCK)
    assert np.all(found == found[:, :1]), "a block is torn"
    sums = -found[:, 0].astype(np.float64)
    if is_bsp:  # means of three workers' steps, then of two
        counts = (sums - handle.clock * 11 / 2) / (111 / 3 - 11 / 2)
    else:
        counts = (sums - handle.clock * 11) / 100
    assert np.all(counts == np.rint(counts)), sums
    return set(counts.astype(int).tolist())


def states(cluster: LaneCluster) -> dict[int | None, str]:
    """The workers' states by rank, as `pushpull status` shows them."""
    response = asyncio.run(scheduler_query.first_status(cluster.address)).response
    nodes = status_document(response, {})["nodes"]
    return {node["rank"]: node["state"] for node in nodes if node["role"] == "worker"}


def says(cluster: LaneCluster, event: str, words: str) -> None:
    """The scheduler logs it, and every server once it has heard, each of them once."""
    assert len(cluster.roles) == 3

    def lines_of(role: RoleProcess) -> list[str]:
        return [line for line in role.recent_lines if f"event={event}" in line]

    until(lambda: all(map(lines_of, cluster.roles)), f"all say {event}")
    for role in cluster.roles:
        lines = lines_of(role)
        assert len(lines) == 1, lines
        assert re.search(words, lines[0]), lines


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "consistency",
    [
        "bsp",
        *(pytest.param(each, marks=pytest.mark.thorough) for each in ("bsp:backup=1", "ssp:1")),
    ],
)
def test_the_others_finish_when_one_is_killed(cluster: LaneCluster, consistency: str) -> None:
    with (
        victim(cluster, "auto", consistency, take_steps) as dying,
        living(cluster) as clients,
        ThreadPoolExecutor(2) as threads,
    ):
        handles = [table(client, consistency) for client in clients]
        runs = [threads.submit(train, c, h, STEPS) for c, h in zip(clients, handles, strict=True)]
        clock = 0
        while clock < 3:
            clock = dying.hear()
        dying.signal(signal.SIGKILL)
        for run in runs:
            run.result(DEADLINE_S)
        until(lambda: states(cluster)[VICTIM] == "gone", "the victim is gone")
        assert states(cluster)[0] == "alive"
        says(cluster, "worker_gone", GONE)
        assert cluster.metric("pushpull_server_gate_bytes") == 0
        if consistency != "bsp:backup=1":  # where steps of the living may be missing too
            found = steps_of_victim(clients[0], handles[0], is_bsp=consistency == "bsp")
            assert clock <= min(found) <= max(found) < STEPS
            assert max(found) - min(found) <= 1, "two steps were cut"
        if consistency == "bsp":
            assert cluster.metric("pushpull_server_short_updates_total") > 0
        late = [client.create_table("late", SIZE, optimizer=ps.SGD(lr=1.0)) for client in clients]
        for run in [threads.submit(train, c, h, 2) for c, h in zip(clients, late, strict=True)]:
            run.result(DEADLINE_S)


@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.parametrize("lane", ["shm", "grpc"])
def test_one_that_was_paused_for_too_long_is_fenced_and_changes_nothing(
    cluster: LaneCluster, lane: str
) -> None:
    with (
        victim(cluster, lane, "bsp", take_steps) as paused,
        living(cluster) as clients,
        ThreadPoolExecutor(2) as threads,
    ):
        handles = [table(client, "bsp") for client in clients]
        runs = [threads.submit(train, c, h, STEPS) for c, h in zip(clients, handles, strict=True)]
        while paused.hear() < 3:
            pass
        paused.signal(signal.SIGSTOP)
        for run in runs:
            run.result(DEADLINE_S)
        before = np.asarray(clients[0].pull(handles[0])).copy()
        paused.signal(signal.SIGCONT)
        told = paused.hear()
        while isinstance(told, int):  # what it had read before it was paused
            told = paused.hear()
        name, message = told
        assert name == "Fenced"
        assert f"worker {VICTIM} was declared gone after" in message
        assert "register again" in message
        assert np.array_equal(np.asarray(clients[0].pull(handles[0])), before)
        assert cluster.metric("pushpull_server_gate_bytes") == 0
        assert states(cluster)[VICTIM] == "gone"


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_a_half_delivered_step_holds_neither_room_nor_anybody(cluster: LaneCluster) -> None:
    with (
        victim(cluster, "grpc", "bsp", push_half) as dying,
        living(cluster) as clients,
        ThreadPoolExecutor(2) as threads,
    ):
        handles = [table(client, "bsp") for client in clients]
        runs = [threads.submit(train, c, h, 1) for c, h in zip(clients, handles, strict=True)]
        assert dying.hear() == 1
        for run in runs:
            run.result(DEADLINE_S)
        until(lambda: cluster.metric("pushpull_server_gate_bytes") > 0, "half a step is staged")
        dying.signal(signal.SIGKILL)
        until(lambda: cluster.metric("pushpull_server_gate_bytes") == 0, "it is dropped")
        for run in [threads.submit(train, c, h, 1) for c, h in zip(clients, handles, strict=True)]:
            run.result(DEADLINE_S)
        assert steps_of_victim(clients[0], handles[0], is_bsp=True) == {1}


def join_and_wait(address: str, lane: str, consistency: str, pipe: Connection) -> None:
    """A worker process that is to assign the initial values, and does not."""
    client = ps.connect(address, rank=VICTIM - 2, lane=lane)
    table(client, consistency, init=ps.FromRank0())
    pipe.send("joined")
    signal.pause()


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_a_table_whose_rank_zero_died_before_it_assigned_says_so(cluster: LaneCluster) -> None:
    with victim(cluster, "auto", "bsp", join_and_wait) as dying:
        assert dying.hear() == "joined"
        with ps.connect(cluster.address, rank=1, request_deadline_s=DEADLINE_S) as client:
            handle = table(client, "bsp", init=ps.FromRank0())
            dying.signal(signal.SIGKILL)
            with pytest.raises(ps.InvalidConfig, match="gets none: worker 0 was declared gone"):
                client.pull(handle)
            client.close(leave=False)
