"""What a worker's push stream writes, message by message, and how its pulls end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import numpy as np
import pytest

from ps_core import limits
from ps_core.cluster_view import Role, Session
from ps_core.errors import InvalidTensor, Recovering, WaitExpired
from ps_core.keys import Incarnation, NodeId
from ps_server.lane.lane_socket import SharedLanes
from ps_server.wire.parameter_wire import entry_reader
from ps_worker.embedding.rows import MAX_PULLED_COUNT
from ps_worker.transport.lane import SharedLane, empty_shared
from ps_worker.transport.push_pull_stream import Frame, Outbox, PushPullStream
from pushpull.v1 import parameters_pb2

WORKER = Session("cluster", b"t" * 16, NodeId(3), Incarnation(11), Role.WORKER)
SMALL, LARGE = limits.LANE_MIN_PAYLOAD_BYTES - 1, limits.LANE_MIN_PAYLOAD_BYTES
QUARTER = limits.LANE_RING_BYTES // 4
HEADER = parameters_pb2.StreamHeader(receiver_node_id=1)

Part = parameters_pb2.PushPullRequest


def block(sequence: int, byte_count: int = 4) -> Frame:
    return block_of(sequence, memoryview(bytes([sequence % 256]) * byte_count))


def block_of(sequence: int, payload: memoryview) -> Frame:
    return parameters_pb2.BlockPush(table_id=1, range_id=2, sequence=sequence), payload


def seal(clock: int) -> Frame:
    return parameters_pb2.Seal(table_id=1, clock=clock), None


def pull(clock: int) -> Frame:
    return parameters_pb2.PullRequest(table_id=1, clock=clock), None


def outbox_of(*frames: Frame) -> Outbox:
    outbox = Outbox()
    for frame in frames:
        outbox.put(frame)
    return outbox


async def read(outbox: Outbox, lane: SharedLane | None = None) -> Part:
    """The next message, as the server parses it."""
    return Part.FromString(b"".join(await outbox.next_message(lane)))


def sequences(message: Part) -> list[int]:
    """Of its blocks."""
    if message.HasField("block"):
        return [message.block.sequence]
    return [each.sequence for each in message.batch.blocks]


async def turn() -> None:
    """What was to be done soon has been done."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_soon(done.set)
    await done.wait()


def ran(scene: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await scene()

    asyncio.run(main())


def on_a_lane(scene: Callable[[SharedLane], Awaitable[None]]) -> None:
    """With a lane to a server's socket, in this process."""

    async def main() -> None:
        lanes = SharedLanes()
        lanes.open()
        offer = lanes.offer(WORKER)
        assert offer is not None
        lane = await SharedLane.open(offer, lambda: None, pushes=True)
        try:
            await scene(lane)
        finally:
            lane.close()
            lanes.close()

    ran(main)


# --- messages


def test_small_blocks_share_a_message_up_to_a_number() -> None:
    async def scene() -> None:
        count = limits.MAX_BATCH_COUNT
        outbox = outbox_of(*(block(number) for number in range(1, count + 3)))
        first = await read(outbox)
        assert sequences(first) == list(range(1, count + 1))
        assert first.batch.blocks[2].payload == bytes([3]) * 4
        assert sequences(await read(outbox)) == [count + 1, count + 2]

    ran(scene)


@pytest.mark.parametrize("make", [pull, seal, block, partial(block, byte_count=SMALL)])
@pytest.mark.parametrize("count", [1, MAX_PULLED_COUNT, 2 * MAX_PULLED_COUNT - 8])
def test_a_pull_travels_with_what_is_before_it_where_both_may_be_parsed(
    make: Callable[[int], Frame], count: int
) -> None:
    """A lookup of many ids comes as several pulls, one behind the other."""
    ids = np.arange(count, dtype="<u8").tobytes()
    first = make(1)
    if isinstance(first[0], parameters_pb2.PullRequest):
        first[0].ranges.add(range_id=2, ids=[ids])

    reader = entry_reader(Part)

    async def scene() -> None:
        asked = parameters_pb2.PullRequest(table_id=1)
        asked.ranges.add(range_id=2, ids=[ids])
        outbox = outbox_of(first, (asked, None))
        raw = b"".join(await outbox.next_message(None))
        message = reader(raw)
        if message.HasField("then_pull"):
            found = message.then_pull
        else:
            assert len(raw) + 2 * len(ids) > limits.MAX_ENTRY_BYTES
            found = reader(b"".join(await outbox.next_message(None))).pull
        assert found.ranges[0].ids == [ids]

    ran(scene)


def test_one_small_block_is_no_batch() -> None:
    async def scene() -> None:
        message = await read(outbox_of(block(7, SMALL)))
        assert message.WhichOneof("entry") == "block"
        assert message.block.payload == bytes([7]) * SMALL
        assert not message.block.more_follow

    ran(scene)


def test_a_large_payload_has_a_message_of_its_own_and_is_not_copied() -> None:
    async def scene() -> None:
        large = np.full(LARGE, 3, np.uint8)
        outbox = outbox_of(block(1), block_of(2, large.data), block(3))
        assert sequences(await read(outbox)) == [1]
        pieces = await outbox.next_message(None)
        assert any(np.shares_memory(np.frombuffer(piece, np.uint8), large) for piece in pieces)
        message = Part.FromString(b"".join(pieces))
        assert (message.block.sequence, message.block.payload) == (2, large.tobytes())
        assert sequences(await read(outbox)) == [3]

    ran(scene)


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        ([], False),
        ([pull(1)], False),
        ([seal(1)], True),
        ([block(2)], True),
        ([pull(1), seal(1)], True),
    ],
    ids=["nothing", "a pull", "a seal", "a block", "a pull and more"],
)
def test_a_large_block_says_whether_more_entries_follow(
    behind: list[Frame], expected: bool
) -> None:
    async def scene() -> None:
        message = await read(outbox_of(block(1, LARGE), *behind))
        assert message.block.more_follow is expected

    ran(scene)


def test_a_pull_travels_with_the_entry_before_it() -> None:
    async def scene() -> None:
        outbox = outbox_of(
            block(1),
            block(2),
            pull(1),
            seal(1),
            pull(2),
            pull(3),
            pull(4),
            block(3, LARGE),
            pull(5),
        )
        message = await read(outbox)
        assert (sequences(message), message.then_pull.clock) == ([1, 2], 1)
        message = await read(outbox)
        assert (message.seal.clock, message.then_pull.clock) == (1, 2)
        message = await read(outbox)
        assert (message.pull.clock, message.then_pull.clock) == (3, 4)
        message = await read(outbox)
        assert (sequences(message), message.HasField("then_pull")) == ([3], False)
        message = await read(outbox)
        assert (message.pull.clock, message.HasField("then_pull")) == (5, False)

    ran(scene)


def test_entries_that_are_no_blocks_leave_one_by_one_in_their_order() -> None:
    async def scene() -> None:
        outbox = outbox_of(
            block(1),
            seal(1),
            (parameters_pb2.UpdateScale(clock=1), None),
            (parameters_pb2.Withdrawal(sequence=9), None),
            block(2),
        )
        kinds = [(await read(outbox)).WhichOneof("entry") for _ in range(5)]
        assert kinds == ["block", "seal", "update_scale", "withdrawal", "block"]

    ran(scene)


def test_an_empty_outbox_waits_for_an_entry() -> None:
    async def scene() -> None:
        outbox = Outbox()
        waiting = asyncio.create_task(read(outbox))
        await turn()
        assert not waiting.done()
        outbox.put(seal(4))
        assert (await waiting).seal.clock == 4

    ran(scene)


# --- on a lane


def test_payloads_in_the_ring_share_a_message_up_to_a_size() -> None:
    async def scene(lane: SharedLane) -> None:
        size = limits.LANE_BATCH_BYTES // 2
        outbox = outbox_of(*(block(number, size) for number in (1, 2, 3)), block(4, SMALL))
        message = await read(outbox, lane)
        assert sequences(message) == [1, 2]
        assert [each.shared_payload.offset_bytes for each in message.batch.blocks] == [0, size]
        message = await read(outbox, lane)
        assert sequences(message) == [3, 4]
        last = message.batch.blocks[1]
        assert (last.HasField("shared_payload"), len(last.payload)) == (False, SMALL)

    on_a_lane(scene)


def test_a_block_above_that_size_is_alone_in_its_message_and_in_the_ring() -> None:
    async def scene(lane: SharedLane) -> None:
        outbox = outbox_of(block(1, limits.LANE_BATCH_BYTES + 1), block(2))
        message = await read(outbox, lane)
        assert sequences(message) == [1]
        assert message.block.HasField("shared_payload")
        assert sequences(await read(outbox, lane)) == [2]

    on_a_lane(scene)


def test_a_full_ring_holds_all_entries_back_until_one_is_answered() -> None:
    async def scene(lane: SharedLane) -> None:
        outbox = outbox_of(*(block(number, QUARTER) for number in range(1, 6)), seal(1))
        for number in range(1, 5):
            assert sequences(await read(outbox, lane)) == [number]
        waiting = asyncio.create_task(read(outbox, lane))
        await turn()
        assert not waiting.done()
        assert not lane.has_space.is_set()
        lane.answered([parameters_pb2.EntryReply(table_id=1, range_id=2, sequence=1)])
        assert sequences(await waiting) == [5]
        assert (await read(outbox, lane)).seal.clock == 1

    on_a_lane(scene)


def test_an_outbox_counts_what_its_stream_has_not_taken() -> None:
    async def scene(lane: SharedLane) -> None:
        outbox = outbox_of(block(1), block(2), seal(1), pull(1))
        assert outbox.unwritten_count == 4
        assert sequences(await read(outbox)) == [1, 2]
        assert outbox.unwritten_count == 4, "a stream may be inside of the message"
        assert (await read(outbox)).HasField("then_pull")
        assert outbox.unwritten_count == 2
        waiting = asyncio.create_task(read(outbox, lane))
        await turn()
        assert outbox.unwritten_count == 0
        for number in range(3, 8):
            outbox.put(block(number, QUARTER))
        await waiting
        for _ in range(3):
            await read(outbox, lane)
        waiting = asyncio.create_task(read(outbox, lane))
        await turn()
        assert outbox.unwritten_count == 1, "the ring is full"
        lane.answered([parameters_pb2.EntryReply(table_id=1, range_id=2, sequence=3)])
        await waiting

    on_a_lane(scene)


def test_what_comes_before_the_block_that_finds_no_space_leaves_at_once() -> None:
    async def scene(lane: SharedLane) -> None:
        outbox = outbox_of(*(block(number, QUARTER) for number in range(1, 5)))
        for number in range(1, 5):
            assert sequences(await read(outbox, lane)) == [number]
        for frame in (block(5), block(6, LARGE), pull(1)):
            outbox.put(frame)
        message = await read(outbox, lane)
        assert (sequences(message), message.HasField("then_pull")) == ([5], False)

    on_a_lane(scene)


def test_a_large_payload_that_stays_out_of_the_ring_never_says_that_more_follow() -> None:
    """The next may wait for the ring, and so for the answer to this one."""

    async def scene(lane: SharedLane) -> None:
        outbox = outbox_of(block(1, limits.LANE_RING_BYTES + 1), block(2))
        message = await read(outbox, lane)
        assert message.block.sequence == 1
        assert len(message.block.payload) == limits.LANE_RING_BYTES + 1
        assert not message.block.more_follow

    on_a_lane(scene)


def test_payloads_in_a_shared_array_need_no_ring_and_share_larger_messages() -> None:
    async def scene(lane: SharedLane) -> None:
        size = limits.LANE_BUFFER_BATCH_BYTES // 2
        made = empty_shared(3 * size, np.uint8)
        assert lane.where(made[:size].data) is None, "the server has not mapped it yet"
        while lane.where(made[:size].data) is None:
            await turn()
            lane._receive_all()
        parts = [made[n * size : (n + 1) * size].data for n in range(3)]
        outbox = outbox_of(*(block_of(n + 1, part) for n, part in enumerate(parts)))
        message = await read(outbox, lane)
        assert sequences(message) == [1, 2]
        assert [each.shared_payload.offset_bytes for each in message.batch.blocks] == [0, size]
        assert sequences(await read(outbox, lane)) == [3]
        odd = made[8 : 8 + LARGE].data
        assert lane.where(odd) is None, "no element may be wider than its alignment"

    on_a_lane(scene)


def test_no_more_arrays_are_shared_than_a_server_maps() -> None:
    """It would close the connection over one more; the ring counts."""

    async def scene(lane: SharedLane) -> None:
        most = limits.MAX_LANE_SEGMENT_COUNT - 1
        arrays = [empty_shared(LARGE, np.uint8) for _ in range(most + 2)]
        shared_count = 0
        while shared_count < most:
            shared_count = sum(lane.where(each.data) is not None for each in arrays)
            await turn()
            lane._receive_all()
        for _ in range(20):
            shared_count = sum(lane.where(each.data) is not None for each in arrays)
            await turn()
            lane._receive_all()
        assert shared_count == most
        assert lane.is_open

    on_a_lane(scene)


# --- pulls


class Call:
    """A server's end: what was written to it, and answers that it gives."""

    def __init__(self) -> None:
        self.written: list[Part] = []
        self.answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.has_written = asyncio.Event()
        self.is_cancelled = False

    async def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        self.written.append(Part.FromString(b"".join(pieces)))
        self.has_written.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (answer := await self.answers.get()) is not None:
            yield answer

    def cancel(self) -> None:
        self.is_cancelled = True

    def answer(self, number: int = 0, **parts: object) -> None:
        response = parameters_pb2.PushPullResponse(read_number=number, **parts)  # type: ignore[arg-type]
        self.answers.put_nowait(response.SerializeToString())

    async def read(self, count: int) -> Part:
        """The message of that number, once it was written; the header is number 0."""
        while len(self.written) <= count:
            self.has_written.clear()
            await self.has_written.wait()
        return self.written[count]


def values(block: int) -> parameters_pb2.PullResponse:
    return parameters_pb2.PullResponse(block=parameters_pb2.BlockValue(block=block))


class Scene:
    """An open stream, and what its callers were told."""

    def __init__(self, lane: SharedLane | None = None) -> None:
        self.call = Call()
        self.stream = PushPullStream(self.call, lane)
        self.replies: list[int] = []
        self.running = asyncio.create_task(
            self.stream.run(
                HEADER, lambda: None, lambda said: self.replies.append(len(said.replies))
            )
        )

    def pull(
        self, take: Callable[[parameters_pb2.PullResponse], None], timeout_s: float = 10.0
    ) -> asyncio.Task[None]:
        request = parameters_pb2.PullRequest(table_id=1)
        return asyncio.create_task(self.stream.pull(request, timeout_s, take))

    async def end(self) -> None:
        self.call.answers.put_nowait(None)
        await self.running


def test_each_pull_gets_the_answers_of_its_number() -> None:
    async def scene() -> None:
        on = Scene()
        found: dict[str, list[int]] = {"one": [], "other": []}
        pulls = [
            on.pull(lambda answer, own=own: own.append(answer.block.block))  # type: ignore[misc]
            for own in found.values()
        ]
        message = await on.call.read(1)
        numbers = message.pull.read_number, message.then_pull.read_number
        assert on.call.written[0].header == HEADER
        assert numbers == (1, 2)
        on.call.answer(2, pull=values(20))
        on.call.answer(1, pull=values(10))
        on.call.answer(9, pull=values(90))  # it has expired
        on.call.answer(2, pull=values(21), is_last=True)
        await pulls[1]
        assert not pulls[0].done()
        replies = parameters_pb2.PushResponse(replies=[parameters_pb2.EntryReply(sequence=1)] * 3)
        on.call.answer(1, end=parameters_pb2.PullEnd(), with_replies=replies)
        await pulls[0]
        on.call.answer(replies=parameters_pb2.PushResponse(replies=replies.replies[:2]))
        await on.end()
        assert found == {"one": [10], "other": [20, 21]}
        assert on.stream._pulls == {}
        assert on.replies == [3, 2]
        assert on.call.is_cancelled

    ran(scene)


def test_an_answer_that_cannot_be_taken_fails_its_pull_and_no_other() -> None:
    async def scene() -> None:
        def refuse(answer: parameters_pb2.PullResponse) -> None:
            taken.append(answer.block.block)
            raise InvalidTensor("it is of another length")

        on, taken = Scene(), list[int]()
        failing, other = on.pull(refuse), on.pull(lambda _: None)
        await on.call.read(1)
        on.call.answer(1, pull=values(1))
        on.call.answer(1, pull=values(2), is_last=True)
        on.call.answer(2, pull=values(3), is_last=True)
        await other
        with pytest.raises(InvalidTensor):
            await failing
        assert taken == [1]
        await on.end()

    ran(scene)


def test_a_stream_that_ends_fails_its_pulls_and_later_ones() -> None:
    async def scene() -> None:
        on = Scene()
        open_pull = on.pull(lambda _: None)
        await on.call.read(1)
        await on.end()
        for failed in (open_pull, on.pull(lambda _: None)):
            with pytest.raises(Recovering, match="stream to the server ended"):
                await failed

    ran(scene)


def test_a_pull_that_is_not_answered_in_time_expires_and_its_answer_is_dropped() -> None:
    async def scene() -> None:
        on, taken = Scene(), list[int]()
        late = on.pull(lambda answer: taken.append(answer.block.block), timeout_s=0.01)
        with pytest.raises(WaitExpired, match=r"within 0\.0 s"):
            await late
        on.call.answer(1, pull=values(1), is_last=True)
        await on.end()
        assert taken == []

    ran(scene)


def test_answers_to_entries_free_the_ring_that_their_stream_waits_for() -> None:
    async def scene(lane: SharedLane) -> None:
        on = Scene(lane)
        for number in range(1, 7):
            on.stream.put(block(number, QUARTER))
        assert sequences(await on.call.read(4)) == [4]
        await turn()
        assert len(on.call.written) == 5, "the ring is full"
        for number, beside in ((1, {}), (2, {"end": parameters_pb2.PullEnd()})):
            reply = parameters_pb2.EntryReply(table_id=1, range_id=2, sequence=number)
            replies = parameters_pb2.PushResponse(replies=[reply])
            on.call.answer(
                **({"with_replies": replies, **beside} if beside else {"replies": replies})
            )
            assert sequences(await on.call.read(4 + number)) == [4 + number]
        assert on.replies == [1, 1]
        await on.end()

    on_a_lane(scene)


class Broken(Call):
    """A call that takes the header alone, and whose end cancels who reads it, as grpcio's does."""

    running: asyncio.Task[None]

    async def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        if self.written:
            raise RuntimeError("a bug")
        await super().write(pieces)

    def cancel(self) -> None:
        super().cancel()
        self.running.cancel()


def test_a_writer_that_fails_ends_the_stream_with_its_error() -> None:
    async def scene() -> None:
        call = Broken()
        stream = PushPullStream(call, None)
        stream.put(seal(1))
        call.running = asyncio.create_task(stream.run(HEADER, lambda: None, lambda _: None))
        ended, _ = await asyncio.wait({call.running}, timeout=5.0)
        assert ended, "the reading side waits for ever"
        with pytest.raises(RuntimeError, match="a bug"):
            await call.running

    ran(scene)
