"""The queue of works: what follows from each event, one at a time, however long it takes (S15).

An event, its decisions, and all that follows for values and streams are one *work*. One on the
thousands of blocks of a range takes longer than the event loop may spend at once, so it is cut into
steps, and goes on in another turn when its slice of time is used up. Later works wait for it.

Rules:
    - A call between two works finds none open, and the works that it begins are done before waiting
      ones, as if it were a work itself.
    - A caller that cannot wait finishes the open works first (`finish`).
    - A failed work has ended: its listener gets the error, or else `on_failure`.
    - A work that waits for another thread goes on in a turn after that; who has time for all waits.
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
from ps_core.sliced_work import Waiting, Work
from ps_runtime.system.turns import Turns
from ps_runtime.system.waiting import arrival

ResultT = TypeVar("ResultT")

FEW_STEPS = 2
"""Steps of a work that are done at once, however long they take."""

HasTime = Callable[[], bool]
"""Called after each step: true if the next may follow at once."""
OnEnd = Callable[[Any, Exception | None], None]
"""Called with a work's result, or its error."""


class _Job(NamedTuple):
    work: Work[Any] | Callable[[], None]
    on_end: OnEnd | None = None


class WorkQueue:
    """The queue of works; `Works` says when there is time. `on_failure` is called with what a work
    raised when nobody waits for it any more.

    Attributes:
        jobs: open and waiting works; not empty while the queue is busy, which each message asks.
    """

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self.jobs: deque[_Job] = deque()
        self._is_running = False
        self._waiting: Waiting | None = None

    @property
    def waits_for(self) -> Waiting | None:
        """The next step waits until this is done."""
        waiting = self._waiting
        return None if waiting is None or waiting.done() else waiting

    def add(self, work: Work[Any], has_time: HasTime, on_end: OnEnd | None = None) -> None:
        """Begin the work now if none is under way, as far as there is time; the rest in its turn.
        Raises what it raised, if that was now and nobody waits for its end.
        """
        is_next = not self.jobs
        self.jobs.append(_Job(work, on_end))
        if is_next:
            try:
                if self._is_done(self.jobs[0], has_time):
                    self.jobs.popleft()
            except Exception:
                self.jobs.popleft()
                raise

    def between(self, callback: Callable[[], None]) -> None:
        """Call a function between two works: now, or in its turn."""
        if self.jobs:
            self.jobs.append(_Job(callback))
        else:
            callback()

    def go_on(self, has_time: HasTime) -> None:
        """Go on with the open and waiting works, as far as there is time."""
        while self.jobs and self._has_next_ended(has_time):
            pass

    def finish(self) -> None:
        """Do all open and waiting works now."""
        if self.jobs:
            check(not self._is_running, "WK-1", "a work begins while another is under way")
            self.go_on(always)

    def _has_next_ended(self, has_time: HasTime) -> bool:
        job = self.jobs[0]
        if callable(job.work):
            self.jobs.popleft()
            self._call(job.work)
            return True
        try:
            is_done = self._is_done(job, has_time)
        except Exception as failure:  # noqa: BLE001 - whoever asked for it has gone on
            self.jobs.popleft()
            self._on_failure(failure)
            return True
        if is_done:
            self.jobs.popleft()
        return is_done

    def _call(self, callback: Callable[[], None]) -> None:
        """Call a function between two works; waiting works are hidden from it."""
        behind, self.jobs = self.jobs, deque()
        try:
            callback()
        except Exception as failure:  # noqa: BLE001 - as above
            self._on_failure(failure)
        finally:
            self.jobs.extend(behind)

    def _is_done(self, job: _Job, has_time: HasTime) -> bool:
        """Take at least one step of a job, to its end or until there is no time."""
        if not self._has_come(has_time):
            return False
        self._is_running = True
        work = job.work
        try:
            while True:
                waiting = self._waiting = next(work)  # type: ignore[arg-type]
                if waiting is not None and not self._has_come(has_time):
                    return False
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

    def _has_come(self, has_time: HasTime) -> bool:
        """True if the next step waits for nothing, any more."""
        waiting = self.waits_for
        if waiting is not None and has_time is always:
            waiting.result()
            return True
        return waiting is None


class Works(WorkQueue):
    """The works of one server. Belongs to its event loop."""

    def __init__(
        self,
        turns: Turns,
        on_failure: Callable[[Exception], None],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(on_failure)
        self._now = now
        self._turns = turns
        self._task: asyncio.Task[None] | None = None

    def begin(self, work: Work[None]) -> None:
        """Begin a work now; the rest of a long one goes on in further turns."""
        self.add(work, self._time_to_begin())
        self._begin_task()

    def between(self, callback: Callable[[], None]) -> None:
        super().between(callback)
        self._begin_task()

    async def done(self, work: Work[ResultT]) -> ResultT:
        """Do a work in its turn; returns its result."""
        result: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()

        def ended(value: ResultT, failure: Exception | None) -> None:
            if result.done():  # nobody waits any more
                return
            if failure is None:
                result.set_result(value)
            else:
                result.set_exception(failure)

        self.add(work, self._time_to_begin(), ended)
        self._begin_task()
        return await result

    async def in_turn(self, call: Callable[[], ResultT]) -> ResultT:
        """Call a function between two works; returns its result."""
        if not self.jobs:
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

    def _time_to_begin(self) -> HasTime:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return always
        until_s = self._now() + 2 * limits.SLICE_S  # its first step decides
        left = FEW_STEPS

        def has_time() -> bool:
            nonlocal left
            left -= 1
            return left > 0 or self._now() < until_s

        return has_time

    def _begin_task(self) -> None:
        if self._task is None and self.jobs:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while self.jobs:
                waiting = self.waits_for
                if waiting is not None:
                    await arrival(waiting)
                await self._turns.next_turn()
                until_s = self._now() + limits.SLICE_S

                def has_time(until_s: float = until_s) -> bool:
                    return self._now() < until_s

                self.go_on(has_time)
        finally:
            self._task = None


def always() -> bool:
    return True
