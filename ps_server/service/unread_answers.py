"""The bound on answers of a server that their callers have not read.

Rules:
    - Answers to pulls are bounded for the whole server: one beyond the bound waits for others.
    - A call that reads nothing for a while is cut when others wait, the slowest first. One at a
      time: what it held, and what others read meanwhile, may be enough.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ps_core import limits


class UnreadAnswers:
    """Bounds the unread answers of one server; who has read nothing for `patience_s` may be cut."""

    def __init__(
        self,
        now: Callable[[], float],
        most_bytes: int = limits.MAX_UNREAD_BYTES,
        patience_s: float = limits.UNREAD_S,
    ) -> None:
        self._now = now
        self._patience_s = patience_s
        self._most_bytes = most_bytes
        self._since_s: dict[Reader, float] = {}  # of unread answers, the longest unread first
        self._waiting: dict[asyncio.Future[None], int] = {}
        self._cut_s = float("-inf")
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
        """Wait until so many bytes may be made; calls that do not read are cut meanwhile."""
        while not self.has_space(byte_count):
            self._cut()
            change = asyncio.get_running_loop().create_future()
            self._waiting[change] = byte_count
            await asyncio.wait([change], timeout=self._patience_s)
            self._waiting.pop(change, None)

    def count(self, reader: Reader, byte_count: int) -> None:
        """Add to the unread bytes of `reader`; a negative number: it has read."""
        self.byte_count += byte_count
        reader.byte_count += byte_count
        if byte_count < 0:
            self._since_s.pop(reader, None)
            for change, wanted_bytes in self._waiting.items():
                if self.has_space(wanted_bytes) and not change.done():
                    change.set_result(None)
        if reader.byte_count > 0:
            self._since_s.setdefault(reader, self._now())

    def _cut(self) -> None:
        """Cut the call that has read nothing for the longest time, if that is long, and if none was
        cut just now.
        """
        now_s = self._now()
        reader = next(iter(self._since_s), None)
        if reader is None or now_s - max(self._since_s[reader], self._cut_s) < self._patience_s:
            return
        self._cut_s = now_s
        del self._since_s[reader]
        if reader.task is not None:
            reader.task.cancel("its answers are not read, and others wait")


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

    def count(self, byte_count: int) -> None:
        """Count bytes for which `UnreadAnswers` has space; below 0: that the reader has taken."""
        self._unread.count(self, byte_count)

    def took(self, byte_count: int) -> None:
        """Count a message that the reader has taken, which is a little longer than its payload."""
        self.count(-min(byte_count, self.byte_count))

    def end(self) -> None:
        if self.byte_count:
            self._unread.count(self, -self.byte_count)
