"""Turns of the event loop: long work yields between its pieces, and the longest turn is measured.

A turn is all that the loop does until it looks at its sockets again. A healthy server with long
turns misses its lease, so nothing from outside may make a turn longer than `limits.MAX_TURN_S`.

Rules:
    - Long work is cut in pieces of about a millisecond, with `breathe` between them. When a turn
      has lasted for `limits.SLICE_S`, `breathe` waits for another turn.
    - Waiting work goes on in order of arrival, one piece a turn: short work comes in between.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from ps_core import limits

Now = Callable[[], float]

_PERIOD_S = 60.0
"""The longest turn is that of the last one to two periods."""


class Turns:
    """The turns of one loop, for the long work on it.

    Asking when each turn ends would cost a turn of the loop for every message. So `breathe` asks
    nothing for half of a slice; the next call has the end of that turn looked for; a call half a
    slice later in the same turn waits for the next turn.
    """

    def __init__(self, now: Now = time.perf_counter) -> None:
        self._now = now
        self._due_s = 0.0
        self._is_end_looked_for = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    def breathe(self) -> Awaitable[None]:
        """Let other work run, if this turn has lasted long enough."""
        now_s = self._now()
        if now_s < self._due_s:
            return _AT_ONCE
        if self._is_end_looked_for:
            return self.next_turn()
        self._is_end_looked_for = True
        self._due_s = now_s + limits.SLICE_S / 2
        asyncio.get_running_loop().call_soon(self._another)
        return _AT_ONCE

    def _another(self) -> None:
        """Another turn has begun."""
        self._is_end_looked_for = False
        self._due_s = self._now() + limits.SLICE_S / 2

    async def next_turn(self) -> None:
        """Let other work run; go on in a turn of the caller's own, after those that wait."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._begin)
        self._waiting.append(waiter)
        await waiter

    def _begin(self) -> None:
        """Another turn has begun: the first that waits gets the rest of it."""
        while self._waiting and self._waiting[0].done():  # its task was cancelled
            self._waiting.popleft()
        if not self._waiting:
            self._another()
            return
        loop, waiter = asyncio.get_running_loop(), self._waiting.popleft()
        self._is_end_looked_for = True
        self._due_s = self._now() + limits.SLICE_S
        if self._waiting:  # called before the waiter runs, because this begins the next turn
            loop.call_soon(self._begin)
        waiter.set_result(None)
        if not self._waiting:
            loop.call_soon(self._another)  # after all that the waiter does


class _AtOnce:
    """An awaitable that is done; a coroutine would cost three times as much."""

    def __await__(self) -> Generator[Any, Any, None]:
        return iter(())  # type: ignore[return-value]


_AT_ONCE = _AtOnce()


class TurnMeter:
    """Measures turns by the delay of a timer that is due every `limits.MAX_TURN_S`; the part of a
    long turn before that is not measured. `long_count` are those that delayed it by more than that.
    """

    def __init__(self, now: Now = time.perf_counter) -> None:
        self._now = now
        self._began_s = now()
        self._longest_s = self._longest_before_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.long_count = 0

    @property
    def longest_s(self) -> float:
        """The longest turn of the last minute or two."""
        return max(self._longest_s, self._longest_before_s)

    def late(self, late_s: float) -> None:
        """Record that the timer came `late_s` after it was due."""
        now_s = self._now()
        if now_s - self._began_s > _PERIOD_S:
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
        """Stop measuring. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
