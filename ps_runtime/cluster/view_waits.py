"""Waits for a view of the cluster: each ends when the view comes, or at its deadline.

Thousands may wait for one view, or until one moment: every worker asks a new server for a session,
with the view that it knows. Each waiter that goes on takes a tenth of a millisecond.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ps_core.cluster_view import ClusterView

AT_ONCE = 32
"""Waiters that go on in one turn; the others go on in later turns."""

Holds = Callable[[ClusterView], bool]


class ViewWaits:
    """The waits of one node. Belongs to its event loop."""

    def __init__(self) -> None:
        self._waits: dict[asyncio.Future[ClusterView], tuple[Holds, float]] = {}
        self._view: ClusterView | None = None
        self._end: Exception | None = None
        self._news_count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def wait(self, holds: Holds, deadline_s: float) -> ClusterView:
        """Wait for a view for which `holds`; returns the newest one. Blocking: up to `deadline_s`,
        when TimeoutError is raised, or until the error that `end` is given.
        """
        if self._view is not None and holds(self._view):
            return self._view
        if self._end is not None:
            raise self._end
        loop = asyncio.get_running_loop()
        found: asyncio.Future[ClusterView] = loop.create_future()
        until_s = loop.time() + deadline_s
        self._waits[found] = holds, until_s
        self._look_at(until_s)
        try:
            view = await found
        finally:
            self._waits.pop(found, None)
        # A newer view may have come before this task goes on; it is not told of that one again.
        return self._view if self._view is not None and holds(self._view) else view

    def came(self, view: ClusterView) -> None:
        """Take a newer view."""
        self._view = view
        self._news_count += 1
        self._look()

    def end(self, error: Exception) -> None:
        """Let all waits fail with the first such error, because no view comes any more."""
        self._end = self._end or error
        self._news_count += 1
        self._look()

    def _look_at(self, time_s: float) -> None:
        if self._timer is not None and self._timer.when() <= time_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(time_s, self._look)

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waits and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._answer())

    async def _answer(self) -> None:
        """Look at all waits, and again if a view came meanwhile."""
        news_count = -1
        while news_count != self._news_count:
            news_count = self._news_count
            await self._answer_for_now()
        if self._waits:
            self._look_at(min(until_s for _, until_s in self._waits.values()))

    async def _answer_for_now(self) -> None:
        for number, (found, (holds, until_s)) in enumerate(list(self._waits.items()), 1):
            if not number % AT_ONCE:
                await asyncio.sleep(0)
            if found.done():
                continue
            if self._view is not None and holds(self._view):
                found.set_result(self._view)
            elif self._end is not None:
                found.set_exception(self._end)
            elif until_s <= asyncio.get_running_loop().time():
                found.set_exception(TimeoutError())
