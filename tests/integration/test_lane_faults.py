"""Kills, pauses and broken streams on each lane: nothing is left behind, torn or lost.

Real processes; every wait is for an event.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest

import ps_worker as ps
from ps_runtime.cluster.wire import session_to_proto
from pushpull.v1 import parameters_pb2, parameters_pb2_grpc
from tests.integration.cut_wire import CutWire, cut_wire
from tests.integration.lane_cluster import LaneCluster, Served, lane_cluster, until
from tests.integration.raw_lane import RawLane
from tests.integration.warm_processes import warm_context

pytestmark = pytest.mark.slow

DEADLINE_S = 30.0
SHORT_S = 0.5
LANES = ("shm", "grpc")
BLOCK = 65_536
BLOCK_COUNT = 160
SIZE = BLOCK * BLOCK_COUNT
"""40 MiB: more than the ring and the window hold."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LaneCluster]:
    """For ASP tables; each test takes the next rank."""
    with lane_cluster(servers=2, workers=12) as cluster:
        yield cluster


def worker(cluster: LaneCluster, lane: str, **options: Any) -> ps.Client:
    return ps.connect(cluster.address, lane=lane, request_deadline_s=DEADLINE_S, **options)


def table(client: ps.Client, name: str) -> ps.TableHandle:
    return client.create_table(
        name, SIZE, optimizer=ps.SGD(lr=1.0), consistency=ps.ASP(), block_elements=BLOCK
    )


NUMBERS = np.arange(1, BLOCK_COUNT + 1, dtype=np.float32)
"""What every step pushes to each block, all over it: a torn or misplaced block is seen."""


def gradient() -> npt.NDArray[np.float32]:
    return np.repeat(NUMBERS, BLOCK)


def steps_in(client: ps.Client, handle: ps.TableHandle) -> npt.NDArray[Any]:
    """How many steps each block has, whole ones."""
    found = np.asarray(client.pull(handle)).reshape(BLOCK_COUNT, BLOCK)
    assert np.all(found == found[:, :1]), "a block is torn"
    counts: npt.NDArray[Any] = -found[:, 0] / NUMBERS
    assert np.all(counts == np.rint(counts))
    return counts


def memory_of_workers(cluster: LaneCluster) -> list[str]:
    """What the servers have mapped of other processes."""
    return [
        name
        for server in cluster.servers
        for name in server.mappings
        if name in ("pushpull-ring", "pushpull-buffer")
    ]


# --- a worker is killed


def push_until_killed(address: str, lane: str, name: str, pipe: Connection) -> None:
    """A worker process: steps without end, from shared memory and from its own in turn."""
    client = ps.connect(address, lane=lane)
    handle = table(client, name)
    gradients = [ps.empty_shared(SIZE), np.empty(SIZE, np.float32)]
    for each in gradients:
        each[:] = gradient()
    while True:
        for each in gradients:
            client.wait(client.push(handle, each, copy=False))
            pipe.send(handle.clock)


@contextmanager
def pushing(cluster: LaneCluster, lane: str, name: str) -> Iterator[Any]:
    """A worker process that has taken some steps, and goes on."""
    context = warm_context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=push_until_killed, args=(cluster.address, lane, name, theirs), daemon=True
    )
    process.start()
    theirs.close()
    try:
        for _ in range(4):
            assert ours.poll(DEADLINE_S)
            ours.recv()
        yield process
    finally:
        process.kill()
        process.join()
        ours.close()


@pytest.mark.parametrize("lane", LANES)
def test_a_worker_killed_while_it_pushes_leaves_nothing_behind(
    cluster: LaneCluster, lane: str
) -> None:
    name = f"killed over {lane}"
    in_files = {entry.name for entry in Path("/dev/shm").iterdir()}  # noqa: S108
    with worker(cluster, lane) as other:
        handle = table(other, name)
        with pushing(cluster, lane, name) as process:
            kinds = {"pushpull-ring", "pushpull-buffer"} if lane == "shm" else set()
            assert set(memory_of_workers(cluster)) == kinds
            sessions = cluster.shm_sessions
            assert sessions == ([2, 2] if lane == "shm" else [0, 0])
            process.kill()
            process.join()
            left = 1 if lane == "shm" else 0
            until(lambda: cluster.shm_sessions == [left, left], "its sessions have ended")
        own = ["pushpull-ring"] * 2 * left
        until(lambda: memory_of_workers(cluster) == own, "its memory is unmapped")
        assert {entry.name for entry in Path("/dev/shm").iterdir()} <= in_files  # noqa: S108
        before = steps_in(other, handle)
        for _ in range(2):
            other.wait(other.push(handle, gradient()))
        assert np.all(steps_in(other, handle) == before + 2)
    until(lambda: memory_of_workers(cluster) == [], "who leaves takes its memory along")


# --- a server is killed


@pytest.mark.thorough
@pytest.mark.parametrize("lane", LANES)
def test_a_server_killed_while_it_is_used_tears_no_value(lane: str) -> None:
    """The reader goes on reading where the dead server's values lie, or gets its error."""
    with (
        lane_cluster(servers=2, workers=1) as cluster,
        ps.connect(cluster.address, lane=lane, request_deadline_s=1.5) as client,
        ps.connect(cluster.address, lane=lane, role="reader", request_deadline_s=1.5) as reader,
    ):
        handle = table(client, "w")
        for _ in range(2):
            client.wait(client.push(handle, gradient()))
        own = reader.table("w")
        dying = cluster.servers[0]
        killer = threading.Thread(target=dying.process.send, args=(signal.SIGKILL,))

        def push_and_read() -> None:
            for step in range(1_000):
                if step == 3:
                    killer.start()
                client.push(handle, gradient())
                steps_in(reader, own)

        with pytest.raises(ps.WaitExpired, match=f"pull.*{dying.address}"):
            push_and_read()
        killer.join()
        with pytest.raises(ps.WaitExpired, match=r"server \d+ at .* cannot be reached"):
            client.wait(client.push(handle, gradient()), SHORT_S)
        client.close(leave=False)


# --- a server pauses


@pytest.mark.thorough
@pytest.mark.parametrize("lane", LANES)
def test_a_server_that_pauses_while_it_is_pushed_to_loses_nothing(
    cluster: LaneCluster, lane: str
) -> None:
    paused = cluster.servers[0].process
    with worker(cluster, lane) as client:
        handle = table(client, f"paused over {lane}")
        client.wait(client.push(handle, gradient()))
        tickets = []
        paused.send(signal.SIGSTOP)
        try:
            tickets += [client.push(handle, gradient()) for _ in range(3)]
            with pytest.raises(ps.WaitExpired):
                client.wait(tickets[-1], SHORT_S)
        finally:
            paused.send(signal.SIGCONT)
        for ticket in tickets:
            client.wait(ticket)
        assert np.all(steps_in(client, handle) == 4)


# --- a stream breaks


def _ring(server: Served) -> str:
    """Which ring the server has mapped: the file's number."""
    maps = Path(f"/proc/{server.process.pid}/maps").read_text(encoding="utf-8").splitlines()
    rings = [line.split()[4] for line in maps if "pushpull-ring" in line]
    assert len(rings) <= 1, "the former ring is still there"
    return rings[0] if rings else ""


@pytest.mark.thorough
@pytest.mark.parametrize("lane", LANES)
def test_what_moves_is_counted_by_the_servers(cluster: LaneCluster, lane: str) -> None:
    names = ("received_bytes_total", "sent_bytes_total", "pull_duration_seconds_count")

    def counts() -> list[float]:
        return [cluster.metric(f"pushpull_server_{name}") for name in names]

    with worker(cluster, lane) as client:
        handle = table(client, f"counted over {lane}")
        before = counts()
        client.wait(client.push(handle, gradient()))
        assert np.all(steps_in(client, handle) == 1)
        received, sent, pulls = (now - was for now, was in zip(counts(), before, strict=True))
    assert received == sent == SIZE * 4
    assert pulls >= 2  # one at each server


@pytest.fixture(scope="module", params=[True, False], ids=["streams", "grpcio"])
def wire(request: pytest.FixtureRequest) -> Iterator[CutWire]:
    with cut_wire(workers=4, streams=request.param) as made:
        yield made


@pytest.mark.thorough
@pytest.mark.parametrize("lane", LANES)
def test_what_a_broken_stream_carried_arrives_once(wire: CutWire, lane: str) -> None:
    """The connection is cut again and again in the middle of a push, and right after it."""
    with worker(wire.cluster, lane) as client:
        handle = table(client, f"cut over {lane}")
        client.wait(client.push(handle, gradient()))
        rings = {_ring(wire.cluster.servers[0])}
        for step in range(2, 7):
            ticket = client.push(handle, gradient())
            wire.cut_after(step * 4_000_000 if lane == "grpc" else step * 800)
            client.wait(ticket)
            rings.add(_ring(wire.cluster.servers[0]))
            assert np.all(steps_in(client, handle) == step)
        assert wire.cut_count >= 3
        assert len(rings) > 1 if lane == "shm" else rings == {""}
        wire.go_on()


@pytest.mark.thorough
def test_a_read_that_waits_survives_the_end_of_its_stream(wire: CutWire) -> None:
    """It asked for values in memory that its connection had not been lent yet."""
    with worker(wire.cluster, "shm") as client:
        name = "parked read"
        handle = client.create_table(
            name, SIZE, optimizer=ps.SGD(lr=1.0), init=ps.FromRank0(), block_elements=BLOCK
        )
        other = table(client, "before the parked read")
        client.wait(client.push(other, gradient()))
        assert np.all(steps_in(client, other) == 1)
        reading: list[Any] = []
        reader = threading.Thread(target=lambda: reading.append(client.pull(handle)))
        reader.start()
        until(lambda: wire.cluster.metric("pushpull_server_parked_pulls") > 0, "the read is parked")
        wire.cut()
        wire.rank_0.assign(wire.rank_0.table(name), gradient())
        reader.join(DEADLINE_S)
        assert np.array_equal(reading[0], gradient())


# --- a server runs out of descriptors


def _first_free_descriptor(pid: int) -> int:
    used = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in count() if number not in used)


@pytest.mark.thorough
def test_a_server_without_descriptors_serves_on_and_lets_in_later(cluster: LaneCluster) -> None:
    server = cluster.servers[0]
    pid = server.process.pid
    with worker(cluster, "shm") as client, grpc.insecure_channel(server.address) as channel:
        handle = table(client, "no descriptors")
        client.wait(client.push(handle, gradient()))  # its ring is shared from now on
        opening = parameters_pb2.OpenSessionRequest(session=session_to_proto(client.session))
        stub = parameters_pb2_grpc.ParameterServiceStub(channel)
        offer = stub.OpenSession(opening, timeout=DEADLINE_S).same_host
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_first_free_descriptor(pid), before[1]))
        try:
            newcomer = RawLane(offer)
            until(lambda: _complaints(server) > 0, "the server says what it lacks")
            client.wait(client.push(handle, gradient()))
            assert np.all(steps_in(client, handle) == 2)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        with newcomer:
            newcomer.hello()
        assert _complaints(server) <= 20, "it asked without a pause"


def _complaints(server: Served) -> int:
    return sum("lane_not_accepted" in line for line in server.process.recent_lines)
