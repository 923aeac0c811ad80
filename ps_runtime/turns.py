"""How long the event loop is at one thing: long work gives others their turn, and the longest turn
is measured.

A turn is all that the loop does until it looks at its sockets again. A server whose turns are long
misses its lease though it is well, so nothing that comes from outside may make one longer than
`limits.MAX_TURN_S`.

Rules:
    - Long work is cut in pieces of about a millisecond, with `breathe` between them. When a turn
      has lasted for `limits.SLICE_S`, whoever breathes waits for another turn.
    - Those who wait go on in the order in which they came, one in each turn: work that is short
      comes in between, however much of the long kind there is.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from ps_core import limits

Now = Callable[[], float]

_KEPT_S = 60.0
"""The longest turn is that of the last one to two of these."""


class Turns:
    """The turns of one loop, as those see them who do long work on it.

    Args:
        now: the clock, in seconds.
    """

    def __init__(self, now: Now = time.perf_counter) -> None:
        self._now = now
        self._began_s: float | None = None
        self._end_is_due = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def breathe(self) -> None:
        """Let others in, if this turn has lasted long enough since its first breath."""
        now_s = self._now()
        if self._began_s is None:
            self._begin(now_s)
        elif now_s - self._began_s >= limits.SLICE_S:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter
            self._begin(self._now())

    def _begin(self, now_s: float) -> None:
        if self._began_s is None:
            self._began_s = now_s
            self._expect_end()

    def _expect_end(self) -> None:
        if not self._end_is_due:
            self._end_is_due = True
            asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        """Another turn has begun: the next that waits has it."""
        self._end_is_due = False
        self._began_s = None
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():  # its task may have been cancelled
                waiter.set_result(None)
                break
        if self._waiting:
            self._expect_end()


class TurnMeter:
    """Measures turns by how late a timer comes that is due every `limits.MAX_TURN_S`: of a longer
    turn it misses as much as passed before it was due.

    Attributes:
        long_count: turns that made it late by more than that.
    """

    def __init__(self, now: Now = time.perf_counter) -> None:
        self._now = now
        self._began_s = now()
        self._longest_s = self._longest_before_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.long_count = 0

    @property
    def longest_s(self) -> float:
        """The longest of the last minute or two."""
        return max(self._longest_s, self._longest_before_s)

    def late(self, late_s: float) -> None:
        """The timer came so late."""
        now_s = self._now()
        if now_s - self._began_s > _KEPT_S:
            self._began_s = now_s
            self._longest_before_s, self._longest_s = self._longest_s, 0.0
        self._longest_s = max(self._longest_s, late_s)
        self.long_count += late_s > limits.MAX_TURN_S

    def start(self) -> None:
        """Measure the turns of the running loop."""
        due_s = self._now() + limits.MAX_TURN_S
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(limits.MAX_TURN_S, self._look, due_s)

    def _look(self, due_s: float) -> None:
        self.late(max(self._now() - due_s, 0.0))
        self.start()

    def stop(self) -> None:
        """Measure no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
