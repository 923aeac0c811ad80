"""What a server does, one event after the other, however long each takes (SEMANTICS S15).

An event, all that is decided and all that follows for values and streams are one *work*: nothing
else happens to machines and values before it is done. A range has thousands of blocks, and a work
on all of them takes longer than the event loop may be at one thing; so it is cut in steps, and goes
on in another turn when a slice of time is used up. Until then whoever comes waits.

Rules:
    - A work begins at once where none is under way, and most are done at once.
    - What cannot wait lets what is under way be done first, at once (`finish`).
    - Without an event loop, every work is done at once.

Invariants:
    WK-1  Works are done in the order in which they came; none begins while another is under way.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ps_core import limits
from ps_core.errors import check
from ps_core.work import Work
from ps_runtime.turns import Turns

ResultT = TypeVar("ResultT")

FEW_STEPS = 2
"""So many of a work are done at once, however long they take."""


class _Job(Generic[ResultT]):
    """A work that waits, and who waits for it."""

    __slots__ = ("result", "work")

    def __init__(
        self, work: Work[ResultT] | Callable[[], None], result: asyncio.Future[ResultT] | None
    ) -> None:
        self.work = work
        self.result = result


class Works:
    """The works of one server. Belongs to its event loop.

    Args:
        turns: of that loop.
        on_failure: called with what a work raised when nobody waited for it any more.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        turns: Turns,
        on_failure: Callable[[Exception], None],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._now = now
        self._turns = turns
        self._on_failure = on_failure
        self._jobs: deque[_Job[Any]] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._is_running = False

    @property
    def is_busy(self) -> bool:
        """Whether one is under way, or waits."""
        return bool(self._jobs)

    def begin(self, work: Work[None]) -> None:
        """Do it now; the rest of a long one in further turns.

        Raises:
            Exception: what it raised, if that was now.
        """
        self._put(_Job(work, None))

    def between(self, callback: Callable[[], None]) -> None:
        """Call it when nothing is under way: now, or in its turn."""
        if self._jobs:
            self._jobs.append(_Job(callback, None))
            self._go_on()
        else:
            callback()

    async def done(self, work: Work[ResultT]) -> ResultT:
        """Do it when its turn has come; what it returns or raises."""
        result: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._put(_Job(work, result))
        return await result

    async def idle(self) -> None:
        """Wait until nothing is under way: what the caller does then, without waiting for anything
        else before, comes between two works.
        """
        while self._jobs:
            waiter = asyncio.get_running_loop().create_future()
            self._idle.append(waiter)
            await waiter

    def finish(self) -> None:
        """What is under way, or waits, is done now."""
        if self._jobs:
            check(not self._is_running, "WK-1", "a work begins while another is under way")
            while self._jobs:
                self._next(None)

    def _put(self, job: _Job[Any]) -> None:
        self._jobs.append(job)
        if len(self._jobs) == 1:
            try:
                if self._has_begun_and_ended(job):
                    self._ended()
            except Exception:
                self._ended()
                raise
        if self._jobs:
            self._go_on()

    def _has_begun_and_ended(self, job: _Job[Any]) -> bool:
        if not _has_loop():
            return self._is_done(job, 1, None)
        until_s = self._now() + 2 * limits.SLICE_S  # its first step is what decides
        return self._is_done(job, FEW_STEPS, until_s)

    def _go_on(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._jobs:
                await self._turns.next_turn()
                until_s = self._now() + limits.SLICE_S
                while self._jobs and self._next(until_s):
                    pass
        finally:
            self._task = None

    def _next(self, until_s: float | None) -> bool:
        """Go on with the first job; whether it is done."""
        job = self._jobs[0]
        if callable(job.work):
            self._ended()
            try:
                job.work()
            except Exception as failure:  # noqa: BLE001 - whoever asked for it has gone on
                self._on_failure(failure)
            return True
        is_done = True
        try:
            is_done = self._is_done(job, 1, until_s)
        except Exception as failure:  # noqa: BLE001 - as above
            self._on_failure(failure)
        if is_done:
            self._ended()
        return is_done

    def _ended(self) -> None:
        """The first job has."""
        self._jobs.popleft()
        if not self._jobs:
            idle, self._idle = self._idle, []
            for waiter in idle:
                if not waiter.done():
                    waiter.set_result(None)

    def _is_done(self, job: _Job[Any], steps: int, until_s: float | None) -> bool:
        """Go on with a job, for so many steps at least, until then or the end; whether it is done.

        Raises:
            Exception: what it raised, if nobody waits for it.
        """
        self._is_running = True
        try:
            while True:
                next(job.work)  # type: ignore[arg-type]
                steps -= 1
                if steps <= 0 and until_s is not None and self._now() >= until_s:
                    return False
        except StopIteration as end:
            if job.result is not None and not job.result.done():
                job.result.set_result(end.value)
            return True
        except Exception as failure:
            if job.result is None:
                raise
            if not job.result.done():
                job.result.set_exception(failure)
            return True
        finally:
            self._is_running = False


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
