"""The server's end of a push stream: what waits there is bounded."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from ps_core import limits
from ps_core.cluster_view import ClusterView, RangeAssignment, Role, Session
from ps_core.errors import NotOwner, WaitExpired
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.ledger import Ending, Outcome, ReplyKind
from ps_runtime.observe.metrics import ServerMetrics
from ps_server.ranges.events import ReplyTo, Sender
from ps_server.ranges.read_gate import WaitCause
from ps_server.service.node import ParameterNode
from ps_server.service.pull import Pull, StreamPulls
from ps_server.service.push_stream import PushStream
from ps_server.service.unread_answers import UnreadAnswers
from pushpull.v1 import parameters_pb2, types_pb2
from tests.unit.machine_harness import make_table
from tests.unit.measured_loop import a_turn

SESSION = Session("c", bytes(16), NodeId(1), Incarnation(1), Role.WORKER)
SERVER = Session("c", bytes(16), NodeId(2), Incarnation(2), Role.SERVER)
RECEIVED = ReplyTo(Sender(Incarnation(1), 0, 1), ReplyKind.RECEIVED, TableId(1), RangeId(0), 1)


def a_node(range_count: int = 1) -> ParameterNode:
    """A server of all ranges of one table."""
    node = ParameterNode(SERVER, bytes(16), 1, ServerMetrics(CollectorRegistry()), lambda: 0.0)
    ranges = tuple(
        RangeAssignment(RangeId(number), slots, AssignmentEpoch(1), SERVER.node_id)
        for number, slots in enumerate(key_ranges(range_count))
    )
    node.observe(ClusterView(1, "c", 1, 1, (), ranges, (make_table(),)))
    node.works.finish()
    return node


def test_a_stream_whose_replies_nobody_reads_is_not_read_on() -> None:
    async def whole() -> None:
        stream = PushStream(1, SESSION, UnreadAnswers(lambda: 0.0).reader())
        for sequence in range(1, limits.MAX_QUEUED_REPLY_COUNT):
            stream.reply(RECEIVED._replace(sequence=sequence))
        await stream.has_space()
        stream.reply(RECEIVED._replace(sequence=limits.MAX_QUEUED_REPLY_COUNT))
        waiting = asyncio.create_task(stream.has_space())
        done, _ = await asyncio.wait({waiting}, timeout=0)
        assert not done
        stream.end_input()
        sent_count = 0
        async for replies, part in stream.batches():
            assert part is None
            assert replies is not None
            sent_count += len(replies.replies)
        assert sent_count == limits.MAX_QUEUED_REPLY_COUNT
        await waiting

    asyncio.run(whole())


def test_a_read_whose_turn_never_came_has_not_begun() -> None:
    """The second waits for the first, and for its task's first step; a stream that ends meanwhile
    leaves nothing that was begun and is never waited for.
    """

    async def whole() -> None:
        node = a_node()
        pulls = StreamPulls(node, node.open_stream(SESSION))
        request = parameters_pb2.PullRequest(table_id=1, clock=1)
        request.ranges.add(range_id=0, assignment_epoch=1)
        before = node.next_number()
        for _ in range(3):
            await pulls.begin(request)
        while not sum(map(node.parked_count, WaitCause)):
            await a_turn()
        await pulls.begin(request)
        await pulls.close()
        assert node.next_number() - before == 2, "one read has had a number"

    asyncio.run(asyncio.wait_for(whole(), 10.0))


def test_what_is_owed_of_a_range_that_was_given_up_is_refused() -> None:
    """Who half-closed reads to the end: it has to come to one."""

    async def whole() -> None:
        stream = PushStream(1, SESSION, UnreadAnswers(lambda: 0.0).reader())
        for range_id in (0, 1):
            stream.pending.setdefault((TableId(1), RangeId(range_id), 1), 0.0)
        stream.give_up([RangeId(0)], NotOwner("another is primary"))
        stream.reply(RECEIVED._replace(range_id=RangeId(1), kind=ReplyKind.COMMITTED))
        stream.end_input()
        sent = [
            reply async for replies, _ in stream.batches() if replies for reply in replies.replies
        ]
        assert [(reply.range_id, reply.kind) for reply in sent] == [
            (0, parameters_pb2.REPLY_KIND_ERROR),
            (1, parameters_pb2.REPLY_KIND_COMMITTED),
        ]
        assert sent[0].error.code == types_pb2.ERROR_CODE_NOT_OWNER

    asyncio.run(asyncio.wait_for(whole(), 10.0))


def test_a_half_closed_stream_ends_behind_its_last_answer() -> None:
    """STR-1: neither while an entry has no outcome, nor while a pull's answer lacks a part."""

    async def whole() -> None:
        stream = PushStream(1, SESSION, UnreadAnswers(lambda: 0.0).reader())
        sent = []

        async def read() -> None:
            sent.extend([batch async for batch in stream.batches()])

        async def goes_on() -> bool:
            for _ in range(3):
                await asyncio.wait({reading}, timeout=0)
            return not reading.done()

        stream.pending.setdefault((TableId(1), RangeId(0), 1), 0.0)
        stream.pull_begins()
        stream.end_input()
        reading = asyncio.create_task(read())
        assert await goes_on()
        await stream.put_part(b"first")
        stream.reply(RECEIVED._replace(kind=ReplyKind.COMMITTED))
        assert await goes_on()
        stream.pull_begins()
        stream.pull_ends(None)
        assert await goes_on()
        await stream.put_part(b"last")
        stream.pull_ends(None)
        await reading
        assert [part for _, part in sent if part is not None] == [b"first", b"last"]

        def reply() -> None:
            stream.reply(RECEIVED._replace(kind=ReplyKind.COMMITTED))

        def reply_elsewhere() -> None:
            stream.end((TableId(1), RangeId(0), 1))

        for last in (reply, reply_elsewhere):
            stream = PushStream(1, SESSION, UnreadAnswers(lambda: 0.0).reader())
            stream.pending.setdefault((TableId(1), RangeId(0), 1), 0.0)
            stream.end_input()
            reading = asyncio.create_task(read())
            assert await goes_on()
            last()
            await reading

    asyncio.run(asyncio.wait_for(whole(), 10.0))


def test_an_outcome_takes_the_place_of_what_has_not_left() -> None:
    async def whole() -> None:
        stream = PushStream(1, SESSION, UnreadAnswers(lambda: 0.0).reader())
        other = RECEIVED._replace(sequence=RECEIVED.sequence + 1)
        ended = RECEIVED._replace(kind=ReplyKind.COMMITTED, ending=Ending(Outcome.APPLIED))
        for reply in (RECEIVED, other, ended):
            stream.reply(reply)
        stream.end_input()
        sent = [
            reply async for replies, _ in stream.batches() if replies for reply in replies.replies
        ]
        assert [(reply.sequence, reply.kind) for reply in sent] == [
            (other.sequence, parameters_pb2.REPLY_KIND_RECEIVED),
            (ended.sequence, parameters_pb2.REPLY_KIND_COMMITTED),
        ]

    asyncio.run(whole())


def test_the_range_that_refuses_a_consistent_read_answers_first() -> None:
    """The reader begins anew, and does not wait for the values of the others."""

    async def whole() -> None:
        request = parameters_pb2.PullRequest(table_id=1, consistent=True)
        for range_id, assignment_epoch in ((0, 1), (1, 2)):
            request.ranges.add(range_id=range_id, assignment_epoch=assignment_epoch)
        parts = [part async for part in Pull(a_node(2), request, SESSION).parts()]
        kinds = [
            parameters_pb2.PullResponse.FromString(bytes(part)).WhichOneof("part") for part in parts
        ]
        assert kinds[0] == "error"
        assert set(kinds[1:]) == {"block"}

    asyncio.run(asyncio.wait_for(whole(), 10.0))


@pytest.mark.parametrize("is_consistent", [False, True])
def test_an_answer_is_read_message_by_message(is_consistent: bool) -> None:
    """A call is cut if it reads nothing for a while: a piece of an answer may take longer."""

    async def whole() -> None:
        node = a_node()
        request = parameters_pb2.PullRequest(table_id=1, consistent=is_consistent)
        request.ranges.add(range_id=0, assignment_epoch=1)
        unread = [node.unread.byte_count async for _ in Pull(node, request, SESSION).parts()]
        assert len(unread) == 4
        assert min(unread) > 0
        assert unread == sorted(unread, reverse=True)
        assert unread[0] > unread[-1]
        assert node.unread.byte_count == 0

    asyncio.run(asyncio.wait_for(whole(), 10.0))


def test_ranges_that_have_refused_a_consistent_read_answer_before_the_next_wait() -> None:
    async def whole() -> None:
        node = a_node(4)
        request = parameters_pb2.PullRequest(table_id=1, consistent=True, clock=1)
        for range_id in (0, 2, 3):  # which have blocks
            request.ranges.add(range_id=range_id, assignment_epoch=1)
        pull = Pull(node, request, SESSION)
        refused: asyncio.Queue[int] = asyncio.Queue()

        async def read() -> None:
            async for part in pull.parts():
                refused.put_nowait(
                    parameters_pb2.PullResponse.FromString(bytes(part)).error.range_id
                )

        reading = asyncio.create_task(read())
        while sum(map(node.parked_count, WaitCause)) < 3:
            await a_turn()
        first, _, last = pull._reads
        for waiting in (last, first):
            node._refuse(waiting.number, WaitExpired("worker 2 is late"))
        assert [await refused.get(), await refused.get()] == [0, 3]
        reading.cancel()

    asyncio.run(asyncio.wait_for(whole(), 5.0))
