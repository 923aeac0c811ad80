"""Who a server takes for whom."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from ps_core.cluster_view import ClusterView, Node, NodeState, RangeAssignment, Role, Session
from ps_core.errors import Draining, Fenced, Recovering, Unauthenticated
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import RowsSpec, TableSpec
from ps_runtime.cluster import wire
from ps_runtime.observe.metrics import ServerMetrics
from ps_server.service.node import ParameterNode
from ps_server.service.servicer import ParameterServicer
from pushpull.v1 import parameters_pb2

KEY = b"k" * 16
SERVER = Session("cluster", b"t" * 16, NodeId(1), Incarnation(10), Role.SERVER)
WORKER = Session("cluster", b"t" * 16, NodeId(2), Incarnation(11), Role.WORKER)


def _signed(session: Session) -> Session:
    return replace(session, token=session.signed(KEY))


def _view(number: int, state: NodeState) -> ClusterView:
    worker = Node(NodeId(2), Incarnation(11), Role.WORKER, 0, "", state)
    return ClusterView(number, "cluster", 1, 1, (worker,), (), ())


async def _view_at_least(number: int, within_s: float) -> None:
    del number, within_s


def _node() -> ParameterNode:
    metrics = ServerMetrics(CollectorRegistry())
    return ParameterNode(_signed(SERVER), KEY, 1, metrics, lambda: 0.0)


@pytest.fixture
def node() -> ParameterNode:
    return _node()


def test_a_genuine_session_is_admitted(node: ParameterNode) -> None:
    assert node.sessions.admit(wire.session_to_proto(_signed(WORKER)), "Push") == _signed(WORKER)


@pytest.mark.parametrize("token", [b"", b"x" * 32])
def test_a_token_that_was_not_issued_is_not(node: ParameterNode, token: bytes) -> None:
    with pytest.raises(Unauthenticated, match="token"):
        node.sessions.admit(wire.session_to_proto(replace(WORKER, token=token)), "Push")


def test_a_node_that_left_is_fenced_even_if_it_was_known(node: ParameterNode) -> None:
    session = wire.session_to_proto(_signed(WORKER))
    node.observe(_view(1, NodeState.ALIVE))
    node.sessions.admit(session, "Push")
    node.observe(_view(2, NodeState.LEFT))
    with pytest.raises(Fenced, match="node 2 has left"):
        node.sessions.admit(session, "Push")


def test_a_worker_that_is_gone_is_fenced_and_so_are_its_streams(node: ParameterNode) -> None:
    async def next_answer() -> None:
        stream = node.open_stream(_signed(WORKER))
        node.observe(_view(2, NodeState.GONE))
        async for _ in stream.batches():
            raise AssertionError("it is owed no answer")

    session = wire.session_to_proto(_signed(WORKER))
    node.observe(_view(1, NodeState.SILENT))
    node.sessions.admit(session, "Push")
    with pytest.raises(Fenced, match="worker 0 was declared gone"):
        asyncio.run(next_answer())
    with pytest.raises(Fenced, match="register again as a new worker"):
        node.sessions.admit(session, "Push")


def test_a_silent_node_may_still_speak(node: ParameterNode) -> None:
    """The scheduler may have missed its heartbeats; the server has it on the line."""
    node.observe(_view(1, NodeState.SILENT))
    node.sessions.admit(wire.session_to_proto(_signed(WORKER)), "Push")


def test_a_node_whose_timeline_has_ended_holds_no_values(node: ParameterNode) -> None:
    """Metrics and calls under way still hold the node while the next one recovers its update log,
    which may have as many values.
    """

    sgd = OptimizerSpec(OptimizerKind.SGD, (("lr", 0.1),))
    specs = (
        TableSpec("model", DType.FLOAT32, 64, sgd),
        TableSpec("rows", DType.FLOAT32, 4, sgd, rows=RowsSpec(2)),
    )
    tables = tuple(Table(TableId(1 + n), n, each.validated()) for n, each in enumerate(specs))
    ranges = tuple(
        RangeAssignment(RangeId(n), slots, AssignmentEpoch(1), NodeId(1))
        for n, slots in enumerate(key_ranges(2))
    )
    servicer = ParameterServicer()
    servicer.attach(node, _view_at_least)
    node.observe(ClusterView(1, "cluster", 1, 1, (), ranges, tables))
    held = [weakref.ref(store) for store in node.shards.stores.values()]
    assert len(held) >= len(tables)
    failures: list[Exception] = []
    node.health.on_failure = failures.append
    servicer.detach()
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    assert not failures, "it has not failed"
    with pytest.raises(Draining, match="server 1 is going away"):
        node.begin_cut(_signed(WORKER), TableId(1), 1, 1.0)
    with pytest.raises(Recovering, match="has not registered yet"):
        servicer._node  # noqa: B018 - as a call does


@pytest.mark.parametrize("has_another", [False, True])
def test_a_stream_that_ends_after_its_timeline_closes_no_stream_of_the_next(
    node: ParameterNode, has_another: bool
) -> None:
    """Each node counts its streams from 1."""

    async def whole() -> None:
        servicer, is_open = ParameterServicer(), asyncio.Event()
        servicer.attach(node, _view_at_least)

        async def messages() -> AsyncIterator[parameters_pb2.PushPullRequest]:
            header = parameters_pb2.StreamHeader(session=wire.session_to_proto(_signed(WORKER)))
            yield parameters_pb2.PushPullRequest(header=header)
            is_open.set()
            await asyncio.Event().wait()

        answering = asyncio.ensure_future(anext(servicer.PushPull(messages(), Call())))
        await is_open.wait()
        answering.cancel()
        servicer.detach()
        another = _node()
        stream = another.open_stream(_signed(replace(WORKER, incarnation=Incarnation(12))))
        if has_another:
            servicer.attach(another, _view_at_least)
        with pytest.raises(asyncio.CancelledError):
            await answering
        another.drain()
        with pytest.raises(Draining):
            await asyncio.wait_for(anext(stream.batches()), 5.0)

    class Call:
        """A call that its client has ended."""

        def done(self) -> bool:
            return True

    asyncio.run(whole())
