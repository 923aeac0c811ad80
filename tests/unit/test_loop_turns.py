"""How long a server's loop does one thing: a large seal lets others in between."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from ps_core import limits
from ps_core.cluster_view import ClusterView, RangeAssignment, Role, Session
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.tables.elements import Codec, DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.cluster import wire
from ps_runtime.grpc.requests import RequestReader
from ps_runtime.observe.metrics import ServerMetrics
from ps_runtime.system.turns import TurnMeter, Turns
from ps_server.ranges.events import Place, PushEvent, SealEvent, SealTerms, Sender
from ps_server.service.node import ParameterNode
from ps_server.service.pull import Pull
from ps_server.service.range_read import AnswerPart, PullTerms, RangeRead
from ps_server.service.servicer import ParameterServicer
from ps_server.wire.parameter_wire import Entry, entry_reader
from pushpull.v1 import parameters_pb2, types_pb2
from tests.unit.measured_loop import most_turn_s, turns_of

pytestmark = pytest.mark.slow

KEY, TIMELINE = b"k" * 16, b"t" * 16
RANGES, BLOCKS_A_RANGE, LENGTH = 32, 6, 64
MAX_RANGES_A_TURN = 6
"""The sixth range makes the first thirty-two blocks full."""


def signed(session: Session) -> Session:
    return replace(session, token=session.signed(KEY))


SERVER = signed(Session("c", TIMELINE, NodeId(1), Incarnation(10), Role.SERVER))
WORKER = signed(Session("c", TIMELINE, NodeId(2), Incarnation(11), Role.WORKER))


def a_node(
    ranges: int = RANGES, blocks_a_range: int = BLOCKS_A_RANGE
) -> tuple[ParameterNode, Table]:
    """A server with a table in all ranges."""
    node, table, view = a_view(ranges, blocks_a_range)
    node.observe(view)
    return node, table


def a_view(ranges: int, blocks_a_range: int) -> tuple[ParameterNode, Table, ClusterView]:
    """A server, a table, and the view with it."""
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
    return node, table, ClusterView(1, "c", 1, 1, (), assigned, (table,))


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
    """Made piece by piece; a step changes the range before the second piece is made (RA-1)."""
    node, _ = a_node(ranges=1, blocks_a_range=3 * limits.SLICE_BLOCK_COUNT)
    blocks = node.machine.shards[TableId(1), RangeId(0)].state.blocks
    place = Place(TableId(1), RangeId(0), AssignmentEpoch(1))
    answers = [RangeRead(PullTerms(WORKER, 0, 9.0), place) for _ in range(2)]
    for answer in answers:
        node.begin_read(answer)
        assert answer.is_answered
    taken = [pulled(part) for part in answers[0].next()]
    assert [value.block for value in taken] == list(blocks[: limits.SLICE_BLOCK_COUNT])
    stream = node.open_stream(WORKER)
    sender = Sender(WORKER.incarnation, WORKER.rank, stream.origin)
    for sequence, block in enumerate(blocks, 1):
        payload = memoryview(np.ones(LENGTH, np.float32).tobytes())
        part = node.shards.decode(place, block, Codec.FP32, payload, b"")
        push = PushEvent(place, sender, sequence, 1, block, part.byte_count, part)
        node.entries(stream, [push])
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
    assert order[:6] == ["a", "a", "b", "c", "short", "a"], "nothing was known of the first turn"
    assert sorted(order) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3 + ["short"]


def test_who_is_cancelled_while_it_waits_keeps_nobody_waiting() -> None:
    now_s = 0.0

    async def whole() -> None:
        nonlocal now_s
        turns = Turns(lambda: now_s)
        await turns.breathe()
        now_s = limits.SLICE_S
        tasks = [asyncio.ensure_future(turns.breathe()) for _ in range(3)]
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


MANY = 20_000
"""Blocks of a table that takes half a second to make."""


@pytest.mark.thorough
def test_a_table_of_many_blocks_is_made_and_read_in_short_turns() -> None:
    """Measured: 13 ms and 6 ms of processor time, for 20,000 blocks as for 200,000."""
    node, _, view = a_view(64, MANY // 64)

    async def made() -> None:
        await node.prepare(view)
        node.observe(view)

    assert turns_of(made())[0] < most_turn_s()
    request = parameters_pb2.PullRequest(table_id=1)
    for range_id in range(64):
        request.ranges.add(range_id=range_id, assignment_epoch=1)
    count = 0

    async def read() -> None:
        nonlocal count
        async for part in Pull(node, request, WORKER).parts():
            assert part
            count += 1

    assert turns_of(read())[0] < most_turn_s()
    assert count == MANY // 64 * 64


def test_a_range_that_was_prepared_is_what_it_would_have_been() -> None:
    node, table, view = a_view(4, 3)
    twin, _, _ = a_view(4, 3)
    asyncio.run(node.prepare(view))
    node.observe(view)
    twin.observe(view)
    for range_id, blocks in table.blocks_by_range(4).items():
        for each in (node, twin):
            part = each.machine.shards[table.table_id, range_id]
            store = each.shards.stores[table.table_id, range_id]
            assert part.state.versions == dict.fromkeys(blocks, 0)
            copied = store.snapshot()
            assert [block.block for block in copied.blocks] == list(blocks)
            assert {bytes(store.read(block, None, None)[0]) for block in blocks} == {
                bytes(4 * LENGTH)
            }


@pytest.mark.thorough
@pytest.mark.parametrize(
    "raw",
    [
        b"\x1a\x00" * (limits.MAX_ENTRY_BYTES // 2),
        b"\x1a\x02\x08\x64" * (limits.MAX_ENTRY_BYTES // 4),
        parameters_pb2.PullRequest(
            table_id=1,
            ranges=[parameters_pb2.RangePull(range_id=each) for each in range(2, RANGES)],
        ).SerializeToString()
        + b"\x1a\x00",
        parameters_pb2.PullRequest(
            table_id=1,
            ranges=[parameters_pb2.RangePull(assignment_epoch=1, blocks=range(60_000))],
        ).SerializeToString(),
    ],
    ids=["empty ranges", "no such range", "a range twice", "blocks"],
)
def test_a_read_that_names_too_much_is_refused_in_a_short_turn(raw: bytes) -> None:
    """Measured: 8 ms of processor time for the worst, its parsing."""
    node, _ = a_node()
    answers: list[bytes] = []

    async def read() -> None:
        request = RequestReader(parameters_pb2.PullRequest)(raw)
        answers.extend([bytes(part) async for part in Pull(node, request, WORKER).parts()])

    assert turns_of(read())[0] < most_turn_s()
    errors = [parameters_pb2.PullResponse.FromString(each).error.error.code for each in answers]
    assert len(errors) <= RANGES
    assert errors[-1] in (types_pb2.ERROR_CODE_INVALID_KEYS, types_pb2.ERROR_CODE_STALE_ASSIGNMENT)


@pytest.mark.thorough
def test_what_is_much_beside_payloads_is_not_parsed() -> None:
    """Millions of empty entries fit a message; each would cost a hundred bytes and more."""
    push = parameters_pb2.PushRequest
    empty = parameters_pb2.BlockPush()
    hyperparameters = [types_pb2.Hyperparameter()] * 300_000
    wasteful = [
        push(seal=parameters_pb2.Seal(ranges=[parameters_pb2.RangeSeal()] * 300_000)),
        push(seal=parameters_pb2.Seal(hyperparameters=hyperparameters)),
        push(batch=parameters_pb2.BlockBatch(blocks=[empty] * 300_000)),
        push(block=parameters_pb2.BlockPush(
            eager=parameters_pb2.EagerStep(hyperparameters=hyperparameters))),
    ]  # fmt: skip
    read = entry_reader(push)
    for message in wasteful:
        raw = message.SerializeToString()
        begun_s = time.thread_time()
        with pytest.raises(DecodeError):
            read(raw)
        assert time.thread_time() - begun_s < most_turn_s()
    full = parameters_pb2.BlockPush(payload=bytes(60_000), presence=b"1" * 1000)
    batch = push(batch=parameters_pb2.BlockBatch(blocks=[full] * limits.MAX_BATCH_COUNT))
    assert read(batch.SerializeToString()) == batch
