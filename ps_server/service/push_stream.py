"""Replies of a server: they gather on their push stream and leave in batches, and unread answers
are bounded.

Rules:
    - The server does not read on from a stream whose replies are not read.
    - Answers to pulls are bounded for the whole server: an answer beyond the bound waits until
      others have been read.
    - A call that reads nothing for a while is cut when others wait, the slowest first.

Invariants:
    STR-1  A half-closed stream ends once every entry that it carried has its last reply, and every
           pull its last part.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable

from ps_core import limits
from ps_core.cluster_view import Session
from ps_core.errors import PushpullError
from ps_core.keys import RangeId, TableId
from ps_core.ledger import ReplyKind
from ps_server.ranges.events import ReplyTo, Sender
from ps_server.wire.parameter_wire import push_response
from pushpull.v1 import parameters_pb2

_MAX_BATCH_COUNT = 1024
_MAX_PART_COUNT = 8
_RECEIVED = 0
"""Part of a waiting reply's key: there is one RECEIVED for each entry; other replies are numbered.
"""

_HELD_COUNT = 4
"""Most replies that wait for more of them: their sender's window is many times as large."""

_HELD_S = 0.005
"""The longest time that replies wait for more."""


_Entry = tuple[TableId, RangeId, int]
"""A (table, range, sequence)."""


class PushStream:
    """The server's end of a Push or PushPull stream."""

    def __init__(self, origin: int, session: Session, reader: Reader | None = None) -> None:
        self.origin = origin
        self.session = session
        self._reader = reader  # None: unread answers are not counted
        self.call = None if reader is None else reader.task
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

    def expect(self, entry: _Entry, now_s: float) -> None:
        """Note an entry: its stream owes it a last reply."""
        self.pending.setdefault(entry, now_s)

    def hold(self, more_follow: bool) -> None:
        """Hold the replies to a message for those to the next, which its sender is about to write,
        unless some wait already. Briefly: the next message may wait for these replies, or never
        come.
        """
        self._is_held = more_follow and len(self._replies) < _HELD_COUNT
        if self._replies and not self._is_held:
            self._ready.set()
        elif self._is_held:
            asyncio.get_running_loop().call_later(_HELD_S, self._let_go)

    def _let_go(self) -> None:
        self._is_held = False
        if self._replies:
            self._ready.set()

    def reply(self, effect: ReplyTo) -> float | None:
        """Queue an answer; it leaves with the next batch, in place of a RECEIVED to the same entry
        that has not left: what is received and committed at once is said to be committed.

        Returns:
            When the entry arrived, if this is its last reply.
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
        """Refuse the entries owed replies in ranges that another server has now; they are asked
        there again.
        """
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
        """Note that all parts of such an answer have come; a failure ends the stream."""
        self._pull_count -= 1
        if failure is not None:
            self._failure = failure
        self._ready.set()

    async def put_part(self, part: bytes) -> None:
        """Queue a serialized part of a pull's answer, waiting while too many wait already."""
        while not self.has_part_space:
            self._drained.clear()
            await self._drained.wait()
        if self._reader is not None:
            await self._reader.put(len(part))
        self._parts.append(part)
        self._ready.set()

    @property
    def has_part_space(self) -> bool:
        """True if a part of a pull's answer can be queued at once."""
        return len(self._parts) < _MAX_PART_COUNT

    def put_parts(self, parts: Iterable[bytes]) -> None:
        """Queue serialized parts of an answer to a pull that is there at once."""
        for part in parts:
            if self._reader is not None:
                self._reader.put_now(len(part))
            self._parts.append(part)
        self._ready.set()

    def close(self) -> None:
        """Forget all unread replies: the call has ended."""
        self._parts.clear()
        if self._reader is not None:
            self._reader.end()

    def end_input(self, failure: BaseException | None = None) -> None:
        """End the input; a failure ends the stream at once."""
        self._input_has_ended = True
        self._failure = failure
        self._ready.set()

    async def batches(
        self,
    ) -> AsyncIterator[tuple[parameters_pb2.PushResponse | None, bytes | None]]:
        """Messages to send, until the stream ends (STR-1): replies to entries, a part of a pull's
        answer, or both.
        """
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
                if part is not None and self._reader is not None:
                    self._reader.took(len(part))
            if self._failure is not None:
                raise self._failure
            if self._input_has_ended and not (self.pending or self._pull_count):
                return


class UnreadAnswers:
    """Bounds the unread answers of one server.

    Args:
        now: the clock, in seconds.
        most_bytes: of all of them.
        patience_s: after which one that has read nothing may be cut.
    """

    def __init__(
        self,
        now: Callable[[], float],
        most_bytes: int = limits.MAX_UNREAD_BYTES,
        patience_s: float = limits.UNREAD_S,
    ) -> None:
        self._now = now
        self._patience_s = patience_s
        self._most_bytes = most_bytes
        self._since_s: dict[
            Reader, float
        ] = {}  # readers with unread answers, the longest unread first
        self._waiting: set[asyncio.Future[None]] = set()
        self.byte_count = 0

    def reader(self, call: asyncio.Task[object] | None = None) -> Reader:
        """A reader of a call's answers; None: the running call, if any."""
        if call is None:
            with contextlib.suppress(RuntimeError):  # outside of a loop there is none
                call = asyncio.current_task()
        return Reader(self, call)

    def has_space(self, byte_count: int) -> bool:
        """True if an answer of so many bytes may be made now."""
        return not self.byte_count or self.byte_count + byte_count <= self._most_bytes

    async def wait_for_space(self, byte_count: int) -> None:
        """Wait until an answer of so many bytes may be made; calls that do not read are cut
        meanwhile.
        """
        while not self.has_space(byte_count):
            self._cut()
            change = asyncio.get_running_loop().create_future()
            self._waiting.add(change)
            await asyncio.wait([change], timeout=self._patience_s)
            self._waiting.discard(change)

    def count(self, reader: Reader, byte_count: int) -> None:
        """Add to the unread bytes of `reader`; a negative number: it has read."""
        self.byte_count += byte_count
        reader.byte_count += byte_count
        if byte_count < 0:
            self._since_s.pop(reader, None)
            waiting, self._waiting = self._waiting, set()
            for change in waiting:
                if not change.done():
                    change.set_result(None)
        if reader.byte_count > 0:
            self._since_s.setdefault(reader, self._now())

    def _cut(self) -> None:
        """Cut the call that has read nothing for the longest time, if that is long."""
        for reader, since_s in self._since_s.items():
            if self._now() - since_s >= self._patience_s:
                del self._since_s[reader]
                if reader.task is not None:
                    reader.task.cancel("its answers are not read, and others wait")
            return


class Reader:
    """The reader of one call's answers. Made by `UnreadAnswers.reader`."""

    def __init__(self, unread: UnreadAnswers, task: asyncio.Task[object] | None) -> None:
        self._unread = unread
        self.task = task
        self.byte_count = 0

    async def put(self, byte_count: int) -> None:
        """Count bytes about to be made; waits while the server has too many."""
        await self._unread.wait_for_space(byte_count)
        self._unread.count(self, byte_count)

    def put_now(self, byte_count: int) -> None:
        """As `put`, without waiting; asked of `UnreadAnswers.has_space` first."""
        self._unread.count(self, byte_count)

    def took(self, byte_count: int) -> None:
        """Count bytes that the reader has taken."""
        self._unread.count(self, -byte_count)

    def end(self) -> None:
        if self.byte_count:
            self._unread.count(self, -self.byte_count)
