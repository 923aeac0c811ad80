"""Which way a client's streams take to a server: its stream port, or its gRPC port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import numpy as np
import pytest

import ps_worker as ps
from ps_core.cluster_view import Node, NodeState, Role
from ps_core.keys import Incarnation, NodeId
from ps_runtime.http2.stream_port import StreamPort
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import Launcher, start_scheduler
from ps_runtime.observe import logs
from tests.integration.cut_wire import CutWire, grpc_port, start_behind
from tests.integration.lane_cluster import LaneCluster, Served, lane_cluster

pytestmark = pytest.mark.slow

DEADLINE_S = 20.0
SIZE = 300_000
"""More than a read that is answered on the push stream: a Pull of its own comes too."""


def train(address: str, name: str) -> None:
    """Push and pull by bytes, and check what comes."""
    with ps.connect(address, lane="grpc", request_deadline_s=DEADLINE_S) as client:
        handle = client.create_table(
            name, SIZE, optimizer=ps.SGD(lr=1.0), consistency=ps.ASP(), block_elements=64_000
        )
        ones = np.ones(SIZE, np.float32)
        for step in (1, 2, 3):
            client.wait(client.push(handle, ones))
            assert np.all(np.asarray(client.pull(handle)) == -float(step))


def connections(server: Served) -> float:
    return server.metric("pushpull_server_stream_connections")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LaneCluster]:
    with lane_cluster(servers=1, workers=2) as made:
        yield made


def test_streams_take_the_stream_port(cluster: LaneCluster) -> None:
    with ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client:
        client.create_table("held", 64, optimizer=ps.SGD(lr=1.0), consistency=ps.ASP())
        before = connections(cluster.servers[0])
        train(cluster.address, "streams")
        client.push_pull(client.table("held"), np.ones(64, np.float32))
        assert connections(cluster.servers[0]) >= before >= 1


def test_a_server_without_one_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logs.LOGGER_NAME)
    with lane_cluster(servers=1, workers=1, environment={"PUSHPULL_STREAM_LISTEN": "off"}) as bare:
        train(bare.address, "bare")
        assert connections(bare.servers[0]) == 0
    assert "stream_port_not_used" not in caplog.text


def test_a_port_that_does_not_answer_is_not_tried_at_each_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A firewall that drops packets: as a listener whose queue is full."""
    now_s = 100.0

    async def whole() -> None:
        nonlocal now_s
        with contextlib.ExitStack() as sockets:
            mute = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            port = mute.getsockname()[1]
            for _ in range(3):  # they fill its queue
                waiting = sockets.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.1", port))
            node = Node(NodeId(1), Incarnation(1), Role.SERVER, 0, "127.0.0.1:1", NodeState.ALIVE)
            to = StreamPort(node, lambda: now_s, connect_s=0.2)
            loop = asyncio.get_running_loop()

            async def took_s() -> float:
                began_s = loop.time()
                assert await to.connect(port, 10.0) is None
                return loop.time() - began_s

            assert await took_s() >= 0.2
            assert sum([await took_s() for _ in range(20)]) < 0.2
            now_s += 60.0
            assert await took_s() >= 0.2

    asyncio.run(asyncio.wait_for(whole(), DEADLINE_S))
    (line,) = [each.getMessage() for each in caplog.records if "not_used" in each.getMessage()]
    assert "it does not answer, and is not tried again for 60 s" in line


@contextlib.contextmanager
def behind_wires(count: int) -> Iterator[tuple[str, list[CutWire], list[int]]]:
    """Servers behind wires that do not relay yet, and their gRPC ports."""
    with Launcher() as launcher, contextlib.ExitStack() as stack:
        scheduler = start_scheduler(launcher, ClusterShape(count, 1))
        wires = [CutWire() for _ in range(count)]
        for wire in wires:
            stack.callback(wire.stop)
        servers = [
            start_behind(wire, launcher, scheduler.address, index=index)
            for index, wire in enumerate(wires)
        ]
        ports = [grpc_port(*each) for each in zip(wires, servers, strict=True)]
        yield scheduler.address, wires, ports


def test_a_port_that_is_another_servers_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Ports that are mapped alike: what is said to be this server's leads to its neighbour."""
    with behind_wires(2) as (address, wires, ports):
        wires[0].start(ports[0], stream_port=wires[1].stream_port)
        wires[1].start(ports[1])
        train(address, "mapped")
        counts = [connections(wire.cluster.servers[0]) for wire in wires]
    assert counts[0] == 0
    refusals = [each.getMessage() for each in caplog.records if "not_used" in each.getMessage()]
    assert len(refusals) == 1
    assert "answers there" in refusals[0]


def test_a_port_that_nobody_reaches_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    with behind_wires(1) as (address, wires, ports):
        wires[0].close_streams()
        wires[0].start(ports[0])
        train(address, "closed")
        assert connections(wires[0].cluster.servers[0]) == 0
    refusals = [each.getMessage() for each in caplog.records if "not_used" in each.getMessage()]
    assert len(refusals) == 1
    assert "cannot be reached" in refusals[0]
