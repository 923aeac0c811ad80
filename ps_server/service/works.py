"""What a server does, one event after the other, however long each takes (SEMANTICS S15).

An event, all that is decided and all that follows for values and streams are one *work*: nothing
else happens to machines and values before it is done. A range has thousands of blocks, and a work
on all of them takes longer than the event loop may be at one thing; so it is cut in steps, and goes
on in another turn when a slice of time is used up. Until then whoever comes waits.

    added --nothing is under way--> under way --steps, over some turns--> ended
      +-- else: waits for its turn --^

Rules:
    - A work begins at once where none is under way, and most are done at once.
    - What is called between two works finds none under way, and what it begins is done before what
      waits: it is as if it were a work itself.
    - What cannot wait lets what is under way be done first (`finish`).
    - A work that failed has ended: who waits for it hears of that, and else `on_failure` does.
    - Without an event loop, every work is done at once.

Invariants:
    WK-1  Works are done in the order in which they came; none begins while another is under way.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ps_core import limits
from ps_core.errors import check
from ps_core.work import Work
from ps_runtime.system.turns import Turns

ResultT = TypeVar("ResultT")

FEW_STEPS = 2
"""So many of a work are done at once, however long they take."""


HasTime = Callable[[], bool]
"""Asked after each step: whether the next may follow at once."""
OnEnd = Callable[[Any, Exception | None], None]
"""Told what a work returned, or raised."""


class _Job(NamedTuple):
    """A work that waits, or what is called between two; and who waits for its end."""

    work: Work[Any] | Callable[[], None]
    on_end: OnEnd | None = None


class WorkQueue:
    """Which work is next, and who waits for what; `Works` says when there is time.

    Args:
        on_failure: called with what a work raised when nobody waits for it any more.
    """

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._jobs: deque[_Job] = deque()
        self._is_running = False

    @property
    def is_busy(self) -> bool:
        """Whether a work is under way, or waits."""
        return bool(self._jobs)

    @property
    def count(self) -> int:
        """Works that are under way, or wait."""
        return len(self._jobs)

    def add(self, work: Work[Any], has_time: HasTime, on_end: OnEnd | None = None) -> None:
        """Do it now, if nothing is under way, as far as there is time; the rest in its turn.

        Raises:
            Exception: what it raised, if that was now and nobody waits for its end.
        """
        is_next = not self._jobs
        self._jobs.append(_Job(work, on_end))
        if is_next:
            try:
                if self._is_done(self._jobs[0], has_time):
                    self._jobs.popleft()
            except Exception:
                self._jobs.popleft()
                raise

    def between(self, callback: Callable[[], None]) -> None:
        """Call it when nothing is under way: now, or in its turn."""
        if self.is_busy:
            self._jobs.append(_Job(callback))
        else:
            callback()

    def go_on(self, has_time: HasTime) -> None:
        """Go on with what is under way, and with what waits, as far as there is time."""
        while self._jobs and self._has_next_ended(has_time):
            pass

    def finish(self) -> None:
        """What is under way, or waits, is done now."""
        if self.is_busy:
            check(not self._is_running, "WK-1", "a work begins while another is under way")
            self.go_on(always)

    def _has_next_ended(self, has_time: HasTime) -> bool:
        job = self._jobs[0]
        if callable(job.work):
            self._jobs.popleft()
            self._call(job.work)
            return True
        try:
            is_done = self._is_done(job, has_time)
        except Exception as failure:  # noqa: BLE001 - whoever asked for it has gone on
            self._jobs.popleft()
            self._on_failure(failure)
            return True
        if is_done:
            self._jobs.popleft()
        return is_done

    def _call(self, callback: Callable[[], None]) -> None:
        """Between two works: what waits is out of sight."""
        behind, self._jobs = self._jobs, deque()
        try:
            callback()
        except Exception as failure:  # noqa: BLE001 - as above
            self._on_failure(failure)
        finally:
            self._jobs.extend(behind)

    def _is_done(self, job: _Job, has_time: HasTime) -> bool:
        """Take steps of a job, one at least, to its end or until there is no time.

        Raises:
            Exception: what it raised, if nobody waits for its end.
        """
        self._is_running = True
        work = job.work
        try:
            while True:
                next(work)  # type: ignore[arg-type]
                if not has_time():
                    return False
        except StopIteration as end:
            if job.on_end is not None:
                job.on_end(end.value, None)
            return True
        except Exception as failure:
            if job.on_end is None:
                raise
            job.on_end(None, failure)
            return True
        finally:
            self._is_running = False


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
        self._queue = WorkQueue(on_failure)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether one is under way, or waits."""
        return self._queue.is_busy

    def begin(self, work: Work[None]) -> None:
        """Do it now; the rest of a long one in further turns.

        Raises:
            Exception: what it raised, if that was now.
        """
        self._queue.add(work, self._time_to_begin())
        self._go_on()

    def between(self, callback: Callable[[], None]) -> None:
        """Call it when nothing is under way: now, or in its turn."""
        self._queue.between(callback)
        self._go_on()

    async def done(self, work: Work[ResultT]) -> ResultT:
        """Do it when its turn has come; what it returns or raises."""
        result: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()

        def ended(value: ResultT, failure: Exception | None) -> None:
            if result.done():  # nobody waits any more
                return
            if failure is None:
                result.set_result(value)
            else:
                result.set_exception(failure)

        self._queue.add(work, self._time_to_begin(), ended)
        self._go_on()
        return await result

    async def in_turn(self, call: Callable[[], ResultT]) -> ResultT:
        """Call it when nothing is under way: now, or in its turn; what it returns or raises."""
        if not self._queue.is_busy:
            return call()
        result: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()

        def called() -> None:
            if result.done():  # nobody waits any more
                return
            try:
                result.set_result(call())
            except Exception as failure:  # noqa: BLE001 - it is for who waits
                result.set_exception(failure)

        self.between(called)
        return await result

    def finish(self) -> None:
        """What is under way, or waits, is done now."""
        self._queue.finish()

    def _time_to_begin(self) -> HasTime:
        if not _has_loop():
            return always
        until_s = self._now() + 2 * limits.SLICE_S  # its first step is what decides
        left = FEW_STEPS

        def has_time() -> bool:
            nonlocal left
            left -= 1
            return left > 0 or self._now() < until_s

        return has_time

    def _go_on(self) -> None:
        if self._task is None and self._queue.is_busy:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._queue.is_busy:
                await self._turns.next_turn()
                until_s = self._now() + limits.SLICE_S

                def has_time(until_s: float = until_s) -> bool:
                    return self._now() < until_s

                self._queue.go_on(has_time)
        finally:
            self._task = None


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def always() -> bool:
    """There is time for all of it."""
    return True
