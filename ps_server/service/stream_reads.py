"""The reads that came on one PushPull stream, each a task while it waits.

Rules:
    - A read with a number is answered as soon as it may be: one that waits for other workers holds
      up nothing behind it. Where too many wait, the next is refused.
    - Reads without a number are answered one after the other, in the order in which they came.
    - Entries never wait for reads: what a read waits for may come behind it on the same stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from ps_core import limits

BeginRead = Callable[[], Coroutine[Any, Any, None]]


class StreamReads:
    """The reads of one stream.

    Args:
        on_end: called after each read, with what it raised, if anything.
    """

    def __init__(self, on_end: Callable[[BaseException | None], None]) -> None:
        self._on_end = on_end
        self._tasks: set[asyncio.Task[None]] = set()
        self._last: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        """Reads that have not been answered in full."""
        return len(self._tasks)

    @property
    def is_full(self) -> bool:
        """Whether a read with a number must be refused."""
        return len(self._tasks) >= limits.MAX_STREAM_READ_COUNT

    async def start(self, number: int, read: BeginRead) -> asyncio.Task[None]:
        """Begin a read; one without a number waits for its turn while too many are on their way.

        Args:
            number: its number; 0: it has none.
            read: begins it; it may never be called, if the stream ends before.
        """
        while self.is_full and not number:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        if number:
            task = asyncio.create_task(read())
        else:
            task = self._last = asyncio.create_task(_after(self._last, read))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """The stream has ended: nobody waits for the rest."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._on_end(None if task.cancelled() else task.exception())


async def _after(before: asyncio.Task[None] | None, read: BeginRead) -> None:
    if before is not None:
        await asyncio.wait([before])
    await read()
