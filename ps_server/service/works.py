"""What a server does, one event after the other, however long each takes (SEMANTICS S15).

An event, all that is decided and all that follows for values and streams are one *work*: nothing
else happens to machines and values before it is done. A range has thousands of blocks, and a work
on all of them takes longer than the event loop may be at one thing; so it is cut in steps, and goes
on in another turn when a slice of time is used up. Until then whoever comes waits.

Which work is next, and who waits for what, is the `WorkQueue`'s; here is when there is time.

Rules:
    - Most works are done at once.
    - Without an event loop, every work is done at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from ps_core import limits
from ps_core.work import Work
from ps_runtime.system.turns import Turns
from ps_server.service.work_queue import HasTime, WorkQueue

ResultT = TypeVar("ResultT")

FEW_STEPS = 2
"""So many of a work are done at once, however long they take."""


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
            return _always
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


def _always() -> bool:
    return True
