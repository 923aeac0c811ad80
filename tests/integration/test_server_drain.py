"""A server that is told to stop does so at once, whoever waits on it."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

import ps_worker as ps
from ps_core.limits import LEASE_S
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import READY_DEADLINE_S, Launcher, start_scheduler, start_servers
from ps_runtime.observe.metrics import SchedulerMetrics, new_registry
from ps_runtime.system.clock import now_s
from pushpull.v1 import parameters_pb2
from scheduler.edge.servicer import SchedulerServicer
from scheduler.machine.cluster import Decision
from tests.integration.raw_wire import Wire, refused
from tests.integration.test_runtime_scheduler_link import SETTINGS as LINK_SETTINGS
from tests.integration.test_runtime_scheduler_link import Scheduler, run, served
from tests.joining import SECRET

STARTED_S = 20.0
SETTINGS = replace(LINK_SETTINGS, worker_count=1)


class LateFarewells(SchedulerServicer):
    """The answers to farewells wait until somebody says so."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.has_decided, self.answers = asyncio.Event(), asyncio.Event()

    async def DeregisterNode(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        answer = await super().DeregisterNode(request, context)
        self.has_decided.set()
        await self.answers.wait()
        return answer


@pytest.mark.timeout(90)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_has_left_ends_well_whatever_it_hears_first(number: signal.Signals) -> None:
    """Its next heartbeat is told that it is no member before its farewell is answered."""
    shape = ClusterShape(server_count=1, worker_count=1)

    async def main(launcher: Launcher) -> None:
        scheduler = Scheduler(SETTINGS)
        given = Decision(scheduler.cluster), SchedulerMetrics(new_registry()), SECRET.encode()
        servicer = scheduler.servicer = LateFarewells(*given)
        async with served(scheduler) as address:
            (server,) = start_servers(launcher, shape, address)
            await asyncio.to_thread(launcher.wait_ready, server)
            server.send(number)
            await asyncio.wait_for(servicer.has_decided.wait(), STARTED_S)
            ended = await asyncio.to_thread(server.wait, STARTED_S)
            servicer.answers.set()
            assert ended is not None
            assert ended.how == "exit code 0"
            assert not [line for line in server.recent_lines if " error " in line]

    with Launcher() as launcher:
        run(main(launcher))


GRACE_S = 5.0  # drain_grace_s: a server that waited for its streams would take all of it


@pytest.mark.timeout(90)
def test_sigterm_ends_a_server_with_an_open_stream_and_a_parked_read() -> None:
    """A worker of two waits for the other; the server waits for neither."""
    shape = ClusterShape(server_count=1, worker_count=2)
    with Launcher() as launcher:
        scheduler = start_scheduler(launcher, shape, READY_DEADLINE_S)
        (server,) = start_servers(launcher, shape, scheduler.address)
        launcher.wait_ready(server)
        client = ps.connect(scheduler.address, rank=0)
        table = client.create_table("waits", 100, optimizer=ps.SGD(lr=0.1))
        step = client.push(table, np.ones(100, np.float32))
        read = client.pull(table, callback=lambda _: None)
        with pytest.raises(ps.WaitExpired, match="worker 1"):
            client.wait(step, 0.5)
        told_s = now_s()
        server.send(signal.SIGTERM)
        ended = server.wait(20.0)
        took_s = now_s() - told_s
        with pytest.raises(ps.ValuesLost, match="server 1 had the only copy"):
            client.wait(read, 2.0)
        client.close(leave=False)
    assert ended is not None
    assert ended.how == "exit code 0"
    assert took_s < GRACE_S, took_s


@pytest.mark.timeout(90)
def test_sigterm_does_not_wait_for_clients_that_stay_on_the_line() -> None:
    """Our own client hangs up when it sees the server leave; another one need not watch views."""
    shape = ClusterShape(server_count=1, worker_count=2)
    with Launcher() as launcher:
        scheduler = start_scheduler(launcher, shape, READY_DEADLINE_S)
        (server,) = start_servers(launcher, shape, scheduler.address)
        launcher.wait_ready(server)
        wire = Wire(scheduler.address)
        made = wire.create("waits")
        (node_id,) = made.servers
        worker = wire.workers[0]
        pushing = wire.servers[node_id].Push(
            iter(worker.messages(made, node_id, 1.0)), timeout=STARTED_S
        )
        assert next(pushing).replies[0].kind == parameters_pb2.REPLY_KIND_RECEIVED
        request = wire.pull_request(made, [0], clock=1, deadline_ms=20_000)
        request.session.CopyFrom(worker.session)
        reading = wire.servers[node_id].Pull(request, timeout=STARTED_S)
        wire.servers[node_id].GetRangeStats(
            parameters_pb2.GetRangeStatsRequest(session=worker.session)
        )
        told_s = now_s()
        server.send(signal.SIGTERM)
        ended = server.wait(STARTED_S)
        took_s = now_s() - told_s
        refused(lambda: list(pushing), "DRAINING", "is going away")
        try:
            answered = [part.error.error.message for part in reading]
        except grpc.RpcError as cut:  # its last words may be lost with the connection
            answered = [cut.details() or ""]
        wire.close()
    assert ended is not None
    assert ended.how == "exit code 0"
    assert took_s < GRACE_S, took_s
    assert len(answered) == 1


@pytest.mark.thorough
@pytest.mark.timeout(90)
def test_sigterm_does_not_wait_for_other_servers_while_no_scheduler_tells_them() -> None:
    """They keep their streams to it until they see it leave, or it hangs up."""
    shape = ClusterShape(server_count=2, worker_count=1, replica_count=2)
    with Launcher() as launcher:
        scheduler = start_scheduler(launcher, shape, READY_DEADLINE_S)
        servers = start_servers(launcher, shape, scheduler.address)
        for server in servers:
            launcher.wait_ready(server)
        client = ps.connect(scheduler.address, rank=0)
        table = client.create_table("replicated", 4096, optimizer=ps.SGD(lr=0.1), block_elements=64)
        client.push_pull(table, np.ones(4096, np.float32))
        launcher.processes[0].send(signal.SIGKILL)
        told_s = now_s()
        servers[0].send(signal.SIGTERM)
        ended = servers[0].wait(STARTED_S)
        took_s = now_s() - told_s
        client.close(leave=False)
    assert ended is not None
    assert ended.how == "exit code 0"
    assert took_s < LEASE_S + GRACE_S, took_s
