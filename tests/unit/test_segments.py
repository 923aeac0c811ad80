"""Memory for values, reserved before it is needed."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from ps_core import sequence_locks
from ps_core.cluster_view import ClusterView, RangeAssignment, Role, Session
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.sliced_work import at_once
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.system.turns import Turns
from ps_server.lane.lane_socket import SharedLanes
from ps_server.lane.value_segments import SharedValues, ValueSegments
from ps_server.ranges.server_machine import ShardAdded
from ps_worker.transport.lane import SharedLane
from pushpull.v1 import parameters_pb2

HERE, ELSEWHERE = NodeId(1), NodeId(2)
TABLE = TableId(1)
WORKER = Session("cluster", b"t" * 16, NodeId(3), Incarnation(11), Role.WORKER)
RANGE_COUNT = 4


def table(element_count: int = 4096) -> Table:
    spec = TableSpec(
        "t", DType.FLOAT32, element_count, OptimizerSpec(OptimizerKind.SGD), block_elements=64
    )
    return Table(TABLE, 0, spec.validated())


MODEL = table()
PARTS = [
    ShardAdded(MODEL, range_id, blocks)
    for range_id, blocks in MODEL.blocks_by_range(RANGE_COUNT).items()
]


def view(*primaries: NodeId, model: Table = MODEL, backup: NodeId | None = None) -> ClusterView:
    """A cluster in which these are the ranges' primaries."""
    backups = () if backup is None else (backup,)
    ranges = tuple(
        RangeAssignment(RangeId(number), slots, AssignmentEpoch(1), primary, backups)
        for number, (primary, slots) in enumerate(
            zip(primaries, key_ranges(RANGE_COUNT), strict=True)
        )
    )
    return ClusterView(1, "c", 1, 1, (), ranges, (model,))


def segment_count() -> int:
    """How many shared segments of tables this process has open."""
    links = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum("pushpull-table" in str(link) for link in links)


async def a_turn() -> None:
    """Everything else that the loop has to do is done once."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_soon(done.set)
    await done.wait()


def ran(
    scene: Callable[[ValueSegments], Awaitable[None]], lanes: SharedLanes | None = None
) -> None:
    async def main() -> None:
        before = segment_count()
        lanes_ = lanes or SharedLanes()
        lanes_.open()
        segments = ValueSegments(lanes_)
        try:
            await scene(segments)
        finally:
            segments.close()
            lanes_.close()
        assert segment_count() == before

    asyncio.run(main())


def reserved(segments: ValueSegments) -> SharedValues:
    ((segment,),) = segments._segments.values()
    assert segment.values is not None
    return segment.values


def test_what_was_reserved_is_what_a_range_gets() -> None:
    async def scene(segments: ValueSegments) -> None:
        await segments.reserve(view(HERE, HERE, ELSEWHERE, HERE), HERE, Turns())
        shared = reserved(segments)
        assert not segments.shares(WORKER, TABLE, None), "nothing of it is here yet"
        found = segments.add(PARTS[:2]) | segments.add(PARTS[3:])
        assert list(found) == [0, 1, 3]
        assert all(each is shared for each in found.values())
        await segments.reserve(view(HERE, HERE, ELSEWHERE, HERE), HERE, Turns())
        assert reserved(segments) is shared

    ran(scene)


def test_backups_have_memory_too() -> None:
    async def scene(segments: ValueSegments) -> None:
        await segments.reserve(view(*[ELSEWHERE] * RANGE_COUNT, backup=HERE), HERE, Turns())
        shared = reserved(segments)
        assert set(segments.add(PARTS).values()) == {shared}

    ran(scene)


def test_what_nobody_reserved_is_there_as_well() -> None:
    async def scene(segments: ValueSegments) -> None:
        await segments.reserve(view(HERE, ELSEWHERE, ELSEWHERE, ELSEWHERE), HERE, Turns())
        first = reserved(segments)
        found = segments.add(PARTS)
        assert found[RangeId(0)] is first
        (other,) = {found[part.range_id] for part in PARTS[1:]}
        assert other is not None
        assert other is not first

    ran(scene)


def test_memory_of_a_range_that_does_not_come_is_given_back() -> None:
    async def scene(segments: ValueSegments) -> None:
        await segments.reserve(view(*[HERE] * RANGE_COUNT), HERE, Turns())
        shared = reserved(segments)
        await segments.reserve(view(ELSEWHERE, HERE, HERE, HERE), HERE, Turns())
        assert shared.segment.fd >= 0
        await segments.reserve(view(*[ELSEWHERE] * RANGE_COUNT), HERE, Turns())
        assert shared.segment.fd < 0
        assert segments._segments == {}

    ran(scene)


def test_what_one_range_had_is_never_anothers() -> None:
    """Nor its own, when it comes again."""

    async def scene(segments: ValueSegments) -> None:
        here = view(*[HERE] * RANGE_COUNT)
        await segments.reserve(here, HERE, Turns())
        first = reserved(segments)
        segments.add(PARTS)
        first.values(PARTS[0].blocks[0]).fill_(7.0)
        at_once(segments.removing((RangeId(0),)))
        assert segments.find((TABLE, RangeId(0))) is None
        await segments.reserve(here, HERE, Turns())
        second = segments.add(PARTS[:1])[RangeId(0)]
        assert second is not None
        assert second is not first
        assert not second.values(PARTS[0].blocks[0]).any()

    ran(scene)


def test_a_range_that_came_meanwhile_needs_none() -> None:
    async def scene(segments: ValueSegments) -> None:
        reserving = asyncio.create_task(
            segments.reserve(view(*[HERE] * RANGE_COUNT), HERE, Turns())
        )
        await a_turn()  # it has begun
        found = segments.add(PARTS)
        await reserving
        assert set(found.values()) == {reserved(segments)}

    ran(scene)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_loop_that_reserves_goes_on() -> None:
    async def scene(segments: ValueSegments) -> None:
        large = table(64 * 1024 * 1024)
        reserving = asyncio.create_task(
            segments.reserve(view(HERE, HERE, HERE, HERE, model=large), HERE, Turns())
        )
        turns = 0
        while not reserving.done():
            await a_turn()
            turns += 1
        assert turns > 100
        assert reserved(segments).segment.byte_count >= 256 * 1024 * 1024

    ran(scene)


def test_a_server_that_ends_while_it_reserves_leaves_nothing() -> None:
    async def scene(segments: ValueSegments) -> None:
        loop = asyncio.get_running_loop()
        reserving = asyncio.create_task(
            segments.reserve(view(*[HERE] * RANGE_COUNT), HERE, Turns())
        )
        await a_turn()
        reserving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reserving
        await loop.shutdown_default_executor()
        await a_turn()  # what the thread has said is heard
        assert segments._segments == {}

    ran(scene)


def test_a_server_that_lends_nothing_reserves_nothing() -> None:
    async def scene() -> None:
        segments = ValueSegments(SharedLanes())
        await segments.reserve(view(*[HERE] * RANGE_COUNT), HERE, Turns())
        assert segments._segments == {}
        assert set(segments.add(PARTS).values()) == {None}

    asyncio.run(scene())


def test_a_session_lets_go_what_no_range_is_in_any_more() -> None:
    """It would keep the memory of every range that ever left: a server that pauses and comes back
    has its ranges in new memory.
    """
    lanes = SharedLanes()

    async def scene(segments: ValueSegments) -> None:
        offer = lanes.offer(WORKER)
        assert offer is not None
        lane = await SharedLane.open(offer, lambda: None, pushes=False)
        first = segments.add(PARTS)[RangeId(0)]
        assert first is not None
        assert segments.shares(WORKER, TABLE, None)
        block = PARTS[0].blocks[0]
        place, stamp = first.place(block)
        shared = parameters_pb2.SharedValue(
            segment_id=first.segment_id,
            offset_bytes=place.offset_bytes,
            byte_count=place.byte_count,
            stamp_offset_bytes=sequence_locks.offset_bytes(place.lock_number),
            stamp=stamp,
        )
        target = np.ones(place.byte_count, np.uint8)

        def counts(value: parameters_pb2.SharedValue) -> bool:
            found = lane.shared(value, target, 0)
            return found is not None and sequence_locks.copied([found]) == [True]

        assert counts(shared)
        assert not target.any()
        mapped = weakref.ref(lane._segments[first.segment_id])
        for part in PARTS:
            at_once(segments.removing((part.range_id,)))
        lane._receive_all()
        assert mapped() is None
        assert not counts(shared), "an answer that was on its way is asked for again"
        again = segments.add(PARTS)[RangeId(0)]
        assert again is not None
        assert segments.shares(WORKER, TABLE, None)
        assert counts(replaced(shared, again))
        lane.close()
        assert lane._segments == {}

    ran(scene, lanes)


def replaced(value: parameters_pb2.SharedValue, shared: SharedValues) -> parameters_pb2.SharedValue:
    """The same block, where it lies now."""
    found = parameters_pb2.SharedValue()
    found.CopyFrom(value)
    found.segment_id = shared.segment_id
    return found
