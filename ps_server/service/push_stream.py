"""The server's end of a push stream: replies to entries gather on it and leave in batches, with the
parts of answers to its pulls.

Rules:
    - The server does not read on from a stream whose replies are not read.

Invariants:
    STR-1  A half-closed stream ends once every entry that it carried has its last reply, and every
           pull its last part.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable

from ps_core import limits
from ps_core.cluster_view import Session
from ps_core.errors import PushpullError
from ps_core.keys import RangeId, TableId
from ps_core.ledger import ReplyKind
from ps_server.ranges.events import ReplyTo, Sender
from ps_server.service.unread_answers import Reader
from ps_server.wire.parameter_wire import push_response
from pushpull.v1 import parameters_pb2

_MAX_BATCH_COUNT = 1024
_MAX_PART_COUNT = 8
_RECEIVED = 0
"""Part of a waiting reply's key: one RECEIVED for each entry; other replies are numbered."""

_HELD_COUNT = 4
"""Most replies that wait for more of them: their sender's window is many times as large."""

_HELD_S = 0.005
"""The longest time that replies wait for more."""

_Entry = tuple[TableId, RangeId, int]
"""A (table, range, sequence)."""


class PushStream:
    """The server's end of a Push or PushPull stream.

    Attributes:
        pending: entries to which it owes a last reply, and when they came.
    """

    def __init__(self, origin: int, session: Session, reader: Reader) -> None:
        self.origin = origin
        self.session = session
        self._reader = reader
        self.call = reader.task
        self.pending: dict[_Entry, float] = {}
        self._pull_count = 0  # pulls not answered in full
        self._replies: dict[tuple[int, int, int, int], ReplyTo] = {}
        self._numbers = itertools.count(1)
        self._parts: deque[bytes] = deque()
        self._ready = asyncio.Event()
        self._drained = asyncio.Event()
        self._input_has_ended = False
        self._is_held = False
        self._failure: BaseException | None = None

    def hold(self, more_follow: bool) -> None:
        """Hold the replies to a message for those to the next, unless some wait already. Briefly:
        the next message may wait for these replies, or never come.
        """
        self._is_held = more_follow and len(self._replies) < _HELD_COUNT
        if self._replies and not self._is_held:
            self._ready.set()
        elif self._is_held:
            asyncio.get_running_loop().call_later(_HELD_S, self.hold, False)

    def reply(self, effect: ReplyTo) -> float | None:
        """Queue an answer; it leaves with the next batch, in place of a RECEIVED to the same entry
        that has not left. Returns when the entry arrived, if this is its last reply.
        """
        entry = (effect.table_id, effect.range_id, effect.sequence)
        is_received = effect.kind is ReplyKind.RECEIVED
        if not is_received:
            self._replies.pop((*entry, _RECEIVED), None)
        self._replies[(*entry, _RECEIVED if is_received else next(self._numbers))] = effect
        if not self._is_held:
            self._ready.set()
        return None if is_received else self.pending.pop(entry, None)

    def end(self, entry: _Entry) -> None:
        """The entry's last reply went out on another stream."""
        if self.pending.pop(entry, None) is not None:
            self._ready.set()

    def give_up(self, range_ids: Collection[RangeId], error: PushpullError) -> None:
        """Refuse the entries owed replies in ranges that another server has now."""
        sender = Sender(self.session.incarnation, 0, self.origin, self.session.run)
        for entry in [entry for entry in self.pending if entry[1] in range_ids]:
            self.reply(ReplyTo(sender, ReplyKind.ERROR, *entry, error=error))

    async def has_space(self) -> None:
        """Wait while its sender leaves too many replies unread."""
        while len(self._replies) >= limits.MAX_QUEUED_REPLY_COUNT:
            self._drained.clear()
            await self._drained.wait()

    def pull_begins(self) -> None:
        """Note a pull whose answer comes in parts: the stream does not end before its last."""
        self._pull_count += 1

    def pull_ends(self, failure: BaseException | None) -> None:
        """Note that all parts have come; a failure ends the stream."""
        self._pull_count -= 1
        if failure is not None:
            self._failure = failure
        self._ready.set()

    async def put_part(self, part: bytes) -> None:
        """Queue a serialized part of a pull's answer, waiting while too many wait already."""
        while not self.has_part_space:
            self._drained.clear()
            await self._drained.wait()
        await self._reader.put(len(part))
        self._parts.append(part)
        self._ready.set()

    @property
    def has_part_space(self) -> bool:
        return len(self._parts) < _MAX_PART_COUNT

    def put_parts(self, parts: Iterable[bytes]) -> None:
        """Queue serialized parts of an answer to a pull that is there at once."""
        for part in parts:
            self._reader.count(len(part))
            self._parts.append(part)
        self._ready.set()

    def close(self) -> None:
        self._parts.clear()
        self._reader.end()

    def end_input(self, failure: BaseException | None = None) -> None:
        """End the input; a failure ends the stream at once."""
        self._input_has_ended = True
        self._failure = failure
        self._ready.set()

    async def batches(
        self,
    ) -> AsyncIterator[tuple[parameters_pb2.PushResponse | None, bytes | None]]:
        """Messages to send, until the stream ends (STR-1): replies, a pull's part, or both."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            while self._replies or self._parts:
                replies = None
                if self._replies:
                    leaving = list(itertools.islice(self._replies, _MAX_BATCH_COUNT))
                    replies = push_response([self._replies.pop(entry) for entry in leaving])
                part = self._parts.popleft() if self._parts else None
                self._drained.set()
                yield replies, part
                if part is not None:
                    self._reader.count(-len(part))
            if self._failure is not None:
                raise self._failure
            if self._input_has_ended and not (self.pending or self._pull_count):
                return
