"""A connect that ends between its registration and its first view gives its rank back."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from ps_core.cluster_view import NodeState, Role
from ps_runtime.grpc import channels
from ps_runtime.grpc.node_server import NodeServer
from ps_runtime.observe.metrics import SchedulerMetrics, new_registry
from pushpull.v1 import scheduler_pb2
from scheduler.edge.servicer import SERVICE_NAME, SchedulerServicer, add_to_server
from scheduler.machine.cluster import Decision
from tests.integration.command_line import ROOT, environment
from tests.integration.scheduler_calls import cluster_of
from tests.joining import SECRET

pytestmark = pytest.mark.slow

DEADLINE_S = 30.0
CONNECTS = "import sys; import pushpull as ps; ps.connect(sys.argv[1], connect_deadline_s=%d)"


class Silent(SchedulerServicer):
    """A scheduler that sends nobody a view: its stream of views does not get through."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.watched = asyncio.Event()

    async def WatchCluster(  # noqa: N802 - the method of the contract
        self, _request: Any, _context: Any
    ) -> AsyncIterator[scheduler_pb2.WatchClusterResponse]:
        self.watched.set()
        await asyncio.Event().wait()
        yield scheduler_pb2.WatchClusterResponse()


@pytest.mark.parametrize("by", ["Ctrl-C", "deadline"])
def test_who_ends_before_its_first_view_is_gone_at_once(by: str) -> None:
    async def live() -> None:
        cluster = cluster_of(worker_count=1)
        metrics = SchedulerMetrics(new_registry())
        scheduler = Silent(Decision(cluster), metrics, SECRET.encode())
        services = [(SERVICE_NAME, partial(add_to_server, scheduler))]
        node = await NodeServer.start("127.0.0.1:0", services=services, registry=new_registry())
        within_s = 1 if by == "deadline" else DEADLINE_S
        connecting = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CONNECTS % within_s, node.address,
            cwd=ROOT, env=environment(), stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scheduler.watched.wait()
                (worker,) = (n for n in cluster.view.nodes if n.role is Role.WORKER)
                assert worker.state is NodeState.ALIVE
                if by == "Ctrl-C":
                    connecting.send_signal(signal.SIGINT)
                _, said = await connecting.communicate()
        finally:
            if connecting.returncode is None:
                connecting.kill()
            await node.stop(0.0)
        error = b"KeyboardInterrupt" if by == "Ctrl-C" else b"WaitExpired"
        assert error in said
        assert cluster.view.nodes_by_id[worker.node_id].state is NodeState.GONE

    channels.run(live())
