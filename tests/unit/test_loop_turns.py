"""How long a server's loop does one thing: a large seal lets others in between."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
from prometheus_client import CollectorRegistry

from ps_core import limits
from ps_core.cluster_view import ClusterView, RangeAssignment, Role, Session
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.tables import Codec, DType, OptimizerKind, OptimizerSpec, Table, TableSpec
from ps_runtime import wire
from ps_runtime.metrics import ServerMetrics
from ps_runtime.turns import TurnMeter, Turns
from ps_server.events import Place, PushEvent, SealEvent, SealTerms, Sender
from ps_server.frames import Entry
from ps_server.node import ParameterNode
from ps_server.reads import AnswerPart, RangeAnswer, Read
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


def a_node(
    ranges: int = RANGES, blocks_a_range: int = BLOCKS_A_RANGE
) -> tuple[ParameterNode, Table]:
    """A server with a table in all ranges."""
    spec = TableSpec(
        "model",
        DType.FLOAT32,
        ranges * blocks_a_range * LENGTH,
        OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0),)),
        block_elements=LENGTH,
    )
    table = Table(TableId(1), 0, spec.validated())
    node = ParameterNode(SERVER, KEY, 1, ServerMetrics(CollectorRegistry()), lambda: 0.0)
    assigned = tuple(
        RangeAssignment(RangeId(index), slots, AssignmentEpoch(1), SERVER.node_id)
        for index, slots in enumerate(key_ranges(ranges))
    )
    node.observe(ClusterView(1, "c", 1, 1, (), assigned, (table,)))
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


def test_a_long_answer_is_as_the_range_was_when_it_was_decided_on() -> None:
    """Made piece by piece, while a step changes the range before the second piece is made."""
    node, _ = a_node(ranges=1, blocks_a_range=3 * limits.SLICE_BLOCK_COUNT)
    blocks = node.machine.parts[TableId(1), RangeId(0)].state.blocks
    answers: list[RangeAnswer] = []
    place = Place(TableId(1), RangeId(0), AssignmentEpoch(1))
    for _ in range(2):
        read = Read(place, (), None, WORKER, False, answers.append)
        node.begin_read(read, 0, consistent=False, deadline_s=9.0)
    taken = [pulled(part) for part in answers[0].next()]
    assert [value.block for value in taken] == list(blocks[: limits.SLICE_BLOCK_COUNT])
    stream = node.open_stream(WORKER)
    sender = Sender(WORKER.incarnation, WORKER.rank, stream.origin)
    for sequence, block in enumerate(blocks, 1):
        payload = memoryview(np.ones(LENGTH, np.float32).tobytes())
        part = node.shards.decode(place, block, Codec.FP32, payload, b"")
        push = PushEvent(place, sender, sequence, 1, block, part.byte_count, part)
        node.entries(stream, [push])
    assert not answers[0].is_made
    seal = SealEvent(place, sender, len(blocks) + 1, SealTerms(1))
    node.entries(stream, [seal])
    assert node.applied_count == 1
    for answer in answers:
        assert answer.is_done is False
        while not answer.is_done:
            taken += [pulled(part) for part in answer.next()]
    assert [value.block for value in taken] == [*blocks, *blocks]
    assert {(value.version, value.clock, value.payload) for value in taken} == {
        (0, 0, bytes(4 * LENGTH))
    }
    assert node.shards.sent_bytes == 2 * len(blocks) * 4 * LENGTH


def pulled(part: AnswerPart) -> parameters_pb2.BlockValue:
    assert isinstance(part, bytes)
    return parameters_pb2.PullResponse.FromString(part).block


def test_who_waits_for_a_turn_gets_the_next_in_order() -> None:
    """Three that work for long, one that is done at once: it waits for one slice, not for all."""
    now_s = 0.0
    order: list[str] = []

    async def long(turns: Turns, name: str) -> None:
        nonlocal now_s
        for _ in range(3):
            await turns.breathe()
            now_s += 2 * limits.SLICE_S
            order.append(name)

    async def short(turns: Turns) -> None:
        await turns.breathe()
        order.append("short")

    async def whole() -> None:
        turns = Turns(lambda: now_s)
        await asyncio.gather(*(long(turns, name) for name in "abc"), short(turns))

    asyncio.run(whole())
    assert order[:6] == ["a", "a", "b", "c", "short", "a"]
    assert sorted(order) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3 + ["short"]


def test_who_is_cancelled_while_it_waits_keeps_nobody_waiting() -> None:
    now_s = 0.0

    async def whole() -> None:
        nonlocal now_s
        turns = Turns(lambda: now_s)
        await turns.breathe()
        now_s = limits.SLICE_S
        tasks = [asyncio.create_task(turns.breathe()) for _ in range(3)]
        await asyncio.wait(tasks, timeout=0)
        tasks[0].cancel()
        await asyncio.wait_for(asyncio.gather(*tasks[1:]), 10.0)

    asyncio.run(whole())


def test_the_longest_turn_is_that_of_the_last_minutes() -> None:
    now_s = 0.0
    meter = TurnMeter(lambda: now_s)
    meter.late(0.5)
    meter.late(0.01)
    assert (meter.longest_s, meter.long_count) == (0.5, 1)
    for later_s, longest_s in ((61.0, 0.5), (122.0, 0.01)):
        now_s = later_s
        meter.late(0.01)
        assert meter.longest_s == longest_s
