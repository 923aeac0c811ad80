"""Thousands of sessions, and ranges that hundreds of workers push to, in short turns."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stderr
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from ps_core import limits
from ps_core.cluster_view import ClusterView, Node, NodeState, Role, Session
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId
from ps_core.ledger import Ending, Outcome
from ps_core.sliced_work import at_once
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.cluster import wire
from ps_runtime.observe.metrics import ServerMetrics
from ps_server.ranges.range_copy import copying
from ps_server.ranges.range_state import RangeState, RangeWorker
from ps_server.ranges.staging_memory import TableStaging
from ps_server.replication.messages import RangeCopy, Snapshot
from ps_server.service.node import ParameterNode
from ps_server.wire.snapshot_wire import SnapshotReader, snapshot_messages
from pushpull.v1.replication_pb2 import ReplicateRequest
from tests.unit.measured_loop import (
    a_turn,
    collecting_as_a_server,
    most_turn_s,
    shortest,
    turns_of_server,
)

pytestmark = pytest.mark.slow

SERVER = Session("c", b"t" * 16, NodeId(1), Incarnation(10), Role.SERVER)
GONE = 3000
"""Workers that are declared gone by one view; a line of the log each."""
PUSHING = 160
"""Workers of a range, each of which has pushed all of its blocks and confirmed nothing."""
MODEL = TableId(1)


@pytest.mark.thorough
def test_thousands_of_sessions_end_in_short_turns() -> None:
    """Measured: 10 ms; 60 ms where all of them ended in one."""
    workers = tuple(
        Node(NodeId(number), Incarnation(number), Role.WORKER, number, "", NodeState.ALIVE)
        for number in range(2, GONE + 2)
    )

    async def scene() -> None:
        node = ParameterNode(SERVER, b"k" * 16, 1, ServerMetrics(CollectorRegistry()), lambda: 0.0)
        for worker in workers:
            await a_turn()
            session = replace(
                SERVER, node_id=worker.node_id, incarnation=worker.incarnation, role=Role.WORKER
            )
            signed = replace(session, token=session.signed(b"k" * 16))
            node.sessions.admit(wire.session_to_proto(signed), "OpenSession")
        assert node.sessions.count == GONE
        gone = tuple(replace(worker, state=NodeState.GONE) for worker in workers)
        view = ClusterView(1, "c", 1, 1, gone, (), ())
        await node.prepare(view)
        node.observe(view)
        await node.works.in_turn(lambda: None)
        assert node.sessions.count == 0

    with redirect_stderr(io.StringIO()):
        assert shortest(scene, turns_of_server) < most_turn_s()


def copied(state: RangeState) -> tuple[RangeCopy | None, list[float]]:
    """What a backup has of it, and how long each step took, here and there."""
    steps = list[float]()
    begun_s = time.thread_time()
    for _ in copying(state):
        steps.append(time.thread_time() - begun_s)
        begun_s = time.thread_time()
    epoch, copies = AssignmentEpoch(1), {MODEL: at_once(copying(state))}
    whole = RangeCopy(Snapshot(RangeId(0), epoch, epoch, 0, copies, ()), {})
    start, *messages = snapshot_messages(whole)
    reader, read = SnapshotReader(ReplicateRequest.FromString(start).snapshot), None
    for message in messages:
        begun_s = time.thread_time()
        request = ReplicateRequest.FromString(message)
        kind = request.WhichOneof("message")
        assert kind is not None
        read = reader.read(kind, getattr(request, kind), ())
        steps.append(time.thread_time() - begun_s)
    return read, steps


@pytest.mark.thorough
def test_what_many_workers_have_of_a_range_is_copied_in_short_steps() -> None:
    """Measured: 3 ms; 35 ms to copy and 60 ms to read where it was done for all at once."""
    blocks = tuple(range(limits.MAX_RANGE_BLOCK_COUNT))
    spec = TableSpec(
        "model", DType.FLOAT32, 64 * len(blocks), OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0),)),
        block_elements=64,
    )  # fmt: skip
    table = Table(MODEL, 0, spec.validated())
    state = RangeState(table, RangeId(0), blocks, PUSHING, TableStaging(table))
    for rank in range(PUSHING):
        worker = RangeWorker(rank, Incarnation(100 + rank), 1, 1, 0.0)
        worker.ledger.end_all(range(1, len(blocks) + 2), Ending(Outcome.APPLIED))
        worker.own_updates = dict.fromkeys(blocks, 1)
        state.workers[worker.incarnation] = state.by_rank[rank] = worker
    with collecting_as_a_server():
        read, steps = copied(state)
    assert read is not None
    copy = read.snapshot.copies[MODEL]
    assert {who: each.ledger.low_water for who, each in copy.workers.items()} == {
        who: len(blocks) + 1 for who in state.workers
    }
    assert max(steps) < most_turn_s()
