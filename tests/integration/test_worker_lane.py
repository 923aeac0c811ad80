"""The worker's end of a lane, against a real server: which payloads go into the ring, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ps_core import limits
from ps_worker.transport.lane import EntryName, SharedLane
from pushpull.v1 import parameters_pb2
from tests.integration.raw_lane import offer_of
from tests.integration.raw_wire import Wire

LARGE = memoryview(bytes(limits.LANE_RING_BYTES // 4))
SMALL_BYTES = limits.LANE_MIN_PAYLOAD_BYTES - 1

Use = Callable[[SharedLane], Awaitable[None]]


def _name(sequence: int) -> EntryName:
    return EntryName(1, 1, sequence)


def _answer(*sequences: int) -> list[parameters_pb2.EntryReply]:
    return [
        parameters_pb2.EntryReply(table_id=1, range_id=1, sequence=sequence)
        for sequence in sequences
    ]


def _on_a_lane(wire: Wire, use: Use) -> None:
    """As the second worker: segments of the first's session are numbered by other tests."""

    async def run() -> None:
        offer = offer_of(wire, wire.workers[1], min(wire.servers))
        lane = await SharedLane.open(offer, lambda: None, pushes=True)
        try:
            await use(lane)
        finally:
            lane.close()
            assert lane.place(_name(99), LARGE) is None
            assert not lane.can_place(_name(99), LARGE.nbytes)

    asyncio.run(run())


def test_a_piece_is_free_at_its_first_answer(wire: Wire) -> None:
    async def use(lane: SharedLane) -> None:
        places = [lane.place(_name(number), LARGE) for number in range(4)]
        assert [p.offset_bytes for p in places if p] == [n * LARGE.nbytes for n in range(4)]
        assert lane.place(_name(4), LARGE) is None
        assert lane.can_place(_name(4), LARGE.nbytes), "it waits for a piece to come back"
        assert not lane.has_space.is_set()
        lane.answered(_answer(7, 0, 0))  # of another entry, and twice: frees one piece, once
        assert lane.has_space.is_set()
        again = lane.place(_name(4), LARGE)
        assert again is not None
        assert again.offset_bytes == 0
        assert lane.place(_name(5), LARGE) is None

    _on_a_lane(wire, use)


def test_what_is_sent_twice_without_an_answer_goes_as_bytes_from_then_on(
    wire: Wire,
) -> None:
    """Two answers will come, and the first would free a piece that was taken between them."""

    async def use(lane: SharedLane) -> None:
        assert lane.place(_name(1), LARGE) is not None
        assert lane.can_place(_name(2), LARGE.nbytes)
        assert not lane.can_place(_name(1), LARGE.nbytes)
        lane.answered(_answer(1))
        assert not lane.can_place(_name(1), LARGE.nbytes)
        # One that was refused has had its answer: the next is to what is sent now.
        assert lane.place(_name(2), LARGE) is not None
        lane.answered(_answer(2))
        assert lane.can_place(_name(2), LARGE.nbytes)

    _on_a_lane(wire, use)


def test_small_and_endless_payloads_stay_in_their_messages(wire: Wire) -> None:
    async def use(lane: SharedLane) -> None:
        assert not lane.can_place(_name(1), SMALL_BYTES)
        assert lane.can_place(_name(1), SMALL_BYTES + 1)
        assert lane.can_place(_name(1), limits.LANE_RING_BYTES)
        assert not lane.can_place(_name(1), limits.LANE_RING_BYTES + 1)

    _on_a_lane(wire, use)
