"""The server's end of a push stream: what waits there is bounded."""

from __future__ import annotations

import asyncio
from functools import partial

from ps_core import limits
from ps_core.cluster_view import Role, Session
from ps_core.errors import NotOwner
from ps_core.keys import Incarnation, NodeId, RangeId, TableId
from ps_core.ledger import Ending, Outcome, ReplyKind
from ps_server.ranges.events import ReplyTo, Sender
from ps_server.service.push_stream import EntryStream
from ps_server.service.stream_reads import StreamReads
from pushpull.v1 import parameters_pb2, types_pb2

SESSION = Session("c", bytes(16), NodeId(1), Incarnation(1), Role.WORKER)
RECEIVED = ReplyTo(Sender(Incarnation(1), 0, 1), ReplyKind.RECEIVED, TableId(1), RangeId(0), 1)


def test_a_stream_whose_replies_nobody_reads_is_not_read_on() -> None:
    async def whole() -> None:
        stream = EntryStream(1, SESSION)
        for sequence in range(1, limits.MAX_QUEUED_REPLY_COUNT):
            stream.reply(RECEIVED._replace(sequence=sequence))
        await stream.has_room()
        stream.reply(RECEIVED._replace(sequence=limits.MAX_QUEUED_REPLY_COUNT))
        waiting = asyncio.create_task(stream.has_room())
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
        begun: list[int] = []
        has_begun = asyncio.Event()

        async def read(number: int) -> None:
            begun.append(number)
            has_begun.set()
            await asyncio.Event().wait()

        reads = StreamReads(lambda _: None)
        for number in range(3):
            await reads.start(0, partial(read, number))
        await has_begun.wait()
        await reads.start(0, partial(read, 3))
        await reads.close()
        assert begun == [0]

    asyncio.run(whole())


def test_what_is_owed_of_a_range_that_was_given_up_is_refused() -> None:
    """Who half-closed reads to the end: it has to come to one."""

    async def whole() -> None:
        stream = EntryStream(1, SESSION)
        for range_id in (0, 1):
            stream.expect((TableId(1), RangeId(range_id), 1), 0.0)
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


def test_an_outcome_takes_the_place_of_what_has_not_left() -> None:
    async def whole() -> None:
        stream = EntryStream(1, SESSION)
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
