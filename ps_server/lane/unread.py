"""Answers that are made and not read yet: bounded for a server as a whole, whoever does not read.

Rules:
    - What would be too much waits until others have been read.
    - Whoever has read nothing for a while keeps nobody waiting: its call is cut, the one that has
      read nothing for the longest time first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ps_core import limits


class UnreadAnswers:
    """The unread answers of one server.

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
        self._since_s: dict[Reader, float] = {}  # those that have something, longest unread first
        self._waiting: set[asyncio.Future[None]] = set()
        self.byte_count = 0

    def reader(self, call: asyncio.Task[object] | None = None) -> Reader:
        """Who reads what a call answers with; None: the one that is running, if any."""
        if call is None:
            with contextlib.suppress(RuntimeError):  # outside of a loop there is none
                call = asyncio.current_task()
        return Reader(self, call)

    def has_room(self, byte_count: int) -> bool:
        """Whether so much more may be made now."""
        return not self.byte_count or self.byte_count + byte_count <= self._most_bytes

    async def wait_for_room(self, byte_count: int) -> None:
        """Wait until so much more may be made; those who do not read are cut meanwhile."""
        while not self.has_room(byte_count):
            self._cut()
            change = asyncio.get_running_loop().create_future()
            self._waiting.add(change)
            await asyncio.wait([change], timeout=self._patience_s)
            self._waiting.discard(change)

    def count(self, reader: Reader, byte_count: int) -> None:
        """So much more is unread by `reader`, or less, if it is negative: then it has read."""
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
        """Cut whoever has read nothing for the longest time, if that is long."""
        for reader, since_s in self._since_s.items():
            if self._now() - since_s >= self._patience_s:
                del self._since_s[reader]
                if reader.task is not None:
                    reader.task.cancel("its answers are not read, and others wait")
            return


class Reader:
    """Who reads the answers of one call. Made by `UnreadAnswers.reader`."""

    def __init__(self, unread: UnreadAnswers, task: asyncio.Task[object] | None) -> None:
        self._unread = unread
        self.task = task
        self.byte_count = 0

    async def put(self, byte_count: int) -> None:
        """So much is about to be made for it; waits while the server has too much."""
        await self._unread.wait_for_room(byte_count)
        self._unread.count(self, byte_count)

    def put_now(self, byte_count: int) -> None:
        """The same, without waiting; `UnreadAnswers.has_room` for it."""
        self._unread.count(self, byte_count)

    def took(self, byte_count: int) -> None:
        """It has read so much, as far as anybody here knows."""
        self._unread.count(self, -byte_count)

    def end(self) -> None:
        """Its call has ended."""
        if self.byte_count:
            self._unread.count(self, -self.byte_count)
