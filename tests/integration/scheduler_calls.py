"""A scheduler that serves on free ports, and calls to it, for the tests beside this file."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

from ps_core import errors
from ps_core.cluster_view import ClusterView, Role
from ps_core.keys import Incarnation
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import TableSpec
from ps_runtime.cluster import join_secret, registration, wire
from ps_runtime.grpc import channels
from ps_runtime.grpc.errors import from_rpc_error
from ps_runtime.grpc.node_server import NodeServer
from ps_runtime.observe.metrics import SchedulerMetrics, new_registry
from ps_runtime.system import clock
from pushpull.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from scheduler.edge.publication import JournalWriter
from scheduler.edge.servicer import SERVICE_NAME, SchedulerServicer
from scheduler.machine.checkpoint_schedule import CheckpointPolicy
from scheduler.machine.cluster import Cluster, Decision
from scheduler.machine.state import ClusterSettings
from tests.joining import SECRET

DEADLINE_S = 10.0
SPEC = TableSpec(
    name="model",
    dtype=DType.FLOAT32,
    element_count=1_000,
    optimizer=OptimizerSpec(OptimizerKind.SGD),
    block_elements=64,
)

AnyT = TypeVar("AnyT")
Test = Callable[["Running"], Coroutine[Any, Any, None]]


class Caller:
    """Calls to a scheduler."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)

    async def registration(self, role: Role, /, **fields: Any) -> scheduler_pb2.RegisterNodeRequest:
        """A valid registration, but for `fields`."""
        request: dict[str, Any] = {
            "registration_id": secrets.token_bytes(16),
            "role": wire.role_to_proto(role),
            "protocol_version": 1,
        }
        if role is Role.SERVER:
            request |= {"address": f"h{secrets.token_hex(4)}:7000", "kernel_fingerprint": "t"}
        made = scheduler_pb2.RegisterNodeRequest(**(request | fields))
        asked = scheduler_pb2.GetJoinChallengeRequest()
        came = await self.stub.GetJoinChallenge(asked, timeout=DEADLINE_S)
        with contextlib.suppress(errors.InvalidConfig):  # there are tests of roles that are none
            join_secret.set_proof(made, SECRET.encode(), came.challenge)
        return made

    async def register(self, role: Role, /, **fields: Any) -> scheduler_pb2.RegisterNodeResponse:
        made = await self.registration(role, **fields)
        answer: scheduler_pb2.RegisterNodeResponse = await self.stub.RegisterNode(
            made, timeout=DEADLINE_S
        )
        return answer

    async def join(self, role: Role, /, **fields: Any) -> types_pb2.SessionIdentity:
        return (await self.register(role, **fields)).session

    async def leave(self, session: types_pb2.SessionIdentity) -> None:
        request = scheduler_pb2.DeregisterNodeRequest(session=session, reason="test")
        await self.stub.DeregisterNode(request, timeout=DEADLINE_S)

    async def beat(self, session: types_pb2.SessionIdentity, **fields: Any) -> int:
        request = scheduler_pb2.HeartbeatRequest(session=session, **fields)
        answer = await self.stub.Heartbeat(request, timeout=DEADLINE_S)
        return int(answer.view_number)

    async def create(
        self,
        session: types_pb2.SessionIdentity,
        spec: TableSpec = SPEC,
        timeout_s: float = DEADLINE_S,
    ) -> scheduler_pb2.CreateTableResponse:
        request = scheduler_pb2.CreateTableRequest(session=session, spec=wire.spec_to_proto(spec))
        answer: scheduler_pb2.CreateTableResponse = await self.stub.CreateTable(
            request, timeout=timeout_s
        )
        return answer

    async def views(self, session: types_pb2.SessionIdentity) -> AsyncIterator[ClusterView]:
        request = scheduler_pb2.WatchClusterRequest(session=session)
        async for response in self.stub.WatchCluster(request, timeout=DEADLINE_S):
            yield wire.view_from_proto(response.view)

    async def view_where(
        self, session: types_pb2.SessionIdentity, holds: Callable[[ClusterView], bool]
    ) -> ClusterView:
        async for view in self.views(session):
            if holds(view):
                return view
        raise AssertionError("the stream of views ended first")

    async def status(self) -> scheduler_pb2.GetClusterStatusResponse:
        session = await registration.operator_session(self.stub, DEADLINE_S)
        answer: scheduler_pb2.GetClusterStatusResponse = await self.stub.GetClusterStatus(
            scheduler_pb2.GetClusterStatusRequest(session=session), timeout=DEADLINE_S
        )
        return answer


class Running(Caller):
    """A scheduler that serves in this process."""

    def __init__(self, servicer: SchedulerServicer, node: NodeServer) -> None:
        super().__init__(channels.aio_channel(node.address))
        self.servicer = servicer
        self.node = node

    async def page(self, path: str) -> str:
        def fetch() -> str:
            with urllib.request.urlopen(f"http://{self.node.http_address}{path}") as answer:
                return str(answer.read().decode())

        return await asyncio.to_thread(fetch)


def cluster_of(**settings: Any) -> Cluster:
    """A new cluster."""
    defaults: dict[str, Any] = {
        "cluster_id": "c-1",
        "timeline": bytes(16),
        "token_key": b"k" * 32,
        "first_incarnation": Incarnation(10),
        "worker_count": 2,
        "server_count": 2,
    }
    return Cluster(ClusterSettings(**(defaults | settings)), clock.now_s())


@contextlib.asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Running]:
    """One of a new cluster, without a journal."""
    async with serving(Decision(cluster_of(**settings))) as scheduler:
        yield scheduler


@contextlib.asynccontextmanager
async def serving(
    begun: Decision[Cluster],
    journal: JournalWriter | None = None,
    policy: CheckpointPolicy = CheckpointPolicy(),  # noqa: B008 - it cannot be changed
) -> AsyncIterator[Running]:
    """One of a cluster that was begun, or is gone on with."""
    registry = new_registry()
    roots = (begun.reply.settings.checkpoint_url,)
    servicer = SchedulerServicer(
        begun, SchedulerMetrics(registry), SECRET.encode(), policy, roots, journal
    )
    await servicer.flushed()
    node = await NodeServer.start(
        services=[
            (
                SERVICE_NAME,
                lambda s: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, s),
            )
        ],
        registry=registry,
    )
    node.set_serving(True)
    ticking = asyncio.create_task(servicer.watch_for_silence())
    scheduler = Running(servicer, node)
    try:
        yield scheduler
    finally:
        await scheduler.channel.close()
        servicer.close()
        await node.stop(0.2)
        ticking.cancel()
        await servicer.close_journal(has_ended=False)


def with_scheduler(test: Test, **settings: Any) -> None:
    """Run `test` on a loop of its own, against a scheduler of its own."""

    async def whole() -> None:
        async with running(**settings) as scheduler:
            await test(scheduler)

    channels.run(whole())


async def refused(
    call: Coroutine[Any, Any, object],
    kind: type[errors.PushpullError],
    status: grpc.StatusCode,
    words: Iterable[str],
) -> None:
    """`call` must fail with the error, its status and these words."""
    with pytest.raises(grpc.RpcError) as failure:
        await call
    assert isinstance(failure.value, grpc.aio.AioRpcError)
    assert failure.value.code() is status
    error = from_rpc_error(failure.value)
    assert type(error) is kind
    for word in words:
        assert word in error.message
