"""The server's end of a push stream: what waits there is bounded."""

from __future__ import annotations

import asyncio

import pytest

from ps_core import limits
from ps_core.cluster_view import Role, Session
from ps_core.keys import Incarnation, NodeId, RangeId, TableId
from ps_server.events import ReplyKind, ReplyTo, Sender
from ps_server.streams import EntryStream

SESSION = Session("c", bytes(16), NodeId(1), Incarnation(1), Role.WORKER)
RECEIVED = ReplyTo(Sender(Incarnation(1), 0, 1), ReplyKind.RECEIVED, TableId(1), RangeId(0), 1)


def test_a_stream_whose_replies_nobody_reads_is_not_read_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_QUEUED_REPLY_COUNT", 10)

    async def whole() -> None:
        stream = EntryStream(1, SESSION)
        for _ in range(9):
            stream.reply(RECEIVED, 0.0)
        await stream.has_room()
        stream.reply(RECEIVED, 0.0)
        waiting = asyncio.create_task(stream.has_room())
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.end_input()
        sent = [reply async for batch in stream.batches() for reply in batch.replies]  # type: ignore[union-attr]
        assert len(sent) == 10
        await waiting

    asyncio.run(whole())
