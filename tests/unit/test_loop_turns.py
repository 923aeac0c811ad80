"""How long a server's loop does one thing: a large seal lets others in between."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
from prometheus_client import CollectorRegistry

from ps_core.cluster_view import ClusterView, RangeAssignment, Role, Session
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.tables import DType, OptimizerKind, OptimizerSpec, Table, TableSpec
from ps_runtime import wire
from ps_runtime.metrics import ServerMetrics
from ps_server.frames import Entry
from ps_server.node import ParameterNode
from ps_server.servicer import ParameterServicer
from pushpull.v1 import parameters_pb2, types_pb2

KEY, TIMELINE = b"k" * 16, b"t" * 16
RANGES, BLOCKS_A_RANGE, LENGTH = 32, 6, 64
MAX_RANGES_A_TURN = 3
"""The third range makes the first sixteen blocks full."""


def signed(session: Session) -> Session:
    return replace(session, token=session.signed(KEY))


SERVER = signed(Session("c", TIMELINE, NodeId(1), Incarnation(10), Role.SERVER))
WORKER = signed(Session("c", TIMELINE, NodeId(2), Incarnation(11), Role.WORKER))


def a_node() -> tuple[ParameterNode, Table]:
    """A server with a table in all ranges."""
    spec = TableSpec(
        "model",
        DType.FLOAT32,
        RANGES * BLOCKS_A_RANGE * LENGTH,
        OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0),)),
        block_elements=LENGTH,
    )
    table = Table(TableId(1), 0, spec.validated())
    node = ParameterNode(SERVER, KEY, 1, ServerMetrics(CollectorRegistry()), lambda: 0.0)
    ranges = tuple(
        RangeAssignment(RangeId(index), slots, AssignmentEpoch(1), SERVER.node_id)
        for index, slots in enumerate(key_ranges(RANGES))
    )
    node.observe(ClusterView(1, "c", 1, 1, (), ranges, (table,)))
    return node, table


def step_of(table: Table) -> list[parameters_pb2.PushRequest]:
    """The messages of a whole step; the last seals all ranges."""
    header = parameters_pb2.StreamHeader(session=wire.session_to_proto(WORKER))
    messages = [parameters_pb2.PushRequest(header=header)]
    seal = parameters_pb2.Seal(table_id=1, clock=1)
    payload = np.ones(LENGTH, np.float32).tobytes()
    for range_id, blocks in table.blocks_by_range(RANGES).items():
        for sequence, block in enumerate(blocks, 1):
            push = parameters_pb2.BlockPush(
                table_id=1, range_id=range_id, assignment_epoch=1, sequence=sequence, clock=1,
                block=block, kind=parameters_pb2.PUSH_KIND_GRADIENT,
                codec=types_pb2.CODEC_FP32, payload=payload,
            )  # fmt: skip
            messages.append(parameters_pb2.PushRequest(block=push))
        seal.ranges.add(range_id=range_id, assignment_epoch=1, sequence=len(blocks) + 1)
    return [*messages, parameters_pb2.PushRequest(seal=seal)]


def test_a_seal_of_a_large_table_lets_others_in() -> None:
    async def whole() -> list[int]:
        node, table = a_node()
        servicer = ParameterServicer()

        async def view_at_least(number: int, deadline_s: float) -> None:
            """The view is there."""

        servicer.attach(node, view_at_least)
        loop = asyncio.get_running_loop()
        seen = [0]

        def look() -> None:
            seen.append(node.applied_count)
            if seen[-1] < RANGES:
                loop.call_soon(look)

        async def messages() -> AsyncIterator[Entry]:
            for message in step_of(table):
                yield message

        look()
        outcomes = [
            reply.outcome
            async for response in servicer.Push(messages(), None)
            for reply in response.replies
            if reply.kind == parameters_pb2.REPLY_KIND_COMMITTED
        ]
        assert set(outcomes) == {parameters_pb2.OUTCOME_APPLIED}
        assert node.applied_count == RANGES
        return seen

    seen = asyncio.run(asyncio.wait_for(whole(), 30.0))
    steps = [after - before for before, after in itertools.pairwise(seen)]
    assert 1 < max(steps) <= MAX_RANGES_A_TURN
