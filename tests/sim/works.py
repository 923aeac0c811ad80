"""The works of a simulated server, which leaves them for a while where a real one may (S15).

The queue is the real one; when there is no time to go on is drawn, from draws of their own: most
seeds have no pause, or few. What comes in a pause is let in, waits or lets the work be done first,
as in `ps_server.service.node` and who calls it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ps_core.sliced_work import Work
from ps_server.service.work_queue import HasTime, OnEnd, WorkQueue, always
from tests.sim.world import World

FEW_STEPS = 2
"""See `Works`: so many of a work are done at once where none is under way."""
MOST_S = 0.6
"""In pauses at a stretch; what comes in them must not grow and grow."""
SHARE = 0.2
"""Of all time, in pauses."""


class SimWorks:
    """The works of one server.

    Args:
        world: where it is.
        in_turn: calls something when the server's loop gets to it.
        on_failure: called with what a work raised in a later turn.
    """

    def __init__(
        self,
        world: World,
        in_turn: Callable[[Callable[[], None]], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._world, self._in_turn, self._on_failure = world, in_turn, on_failure
        self._queue = WorkQueue(on_failure)
        self._is_due = False
        self._pauses_s, self._at_s = MOST_S, 0.0  # how long it may pause yet, as it was then
        self._stuck_until_s = 0.0

    @property
    def is_stuck(self) -> bool:
        """Whether the work that is under way waits for a disk that does not answer."""
        return self._world.now_s < self._stuck_until_s

    def stick(self, for_s: float) -> None:
        """The next work gets no further than its first step for so long; 0: no longer."""
        self._stuck_until_s = self._world.now_s + for_s
        if not for_s:
            self._in_turn(self._turn)

    @property
    def is_busy(self) -> bool:
        """See `Works`, as all of these."""
        return bool(self._queue.jobs)

    def begin(self, work: Work[None]) -> None:
        self._queue.add(work, self._has_time_to_begin())
        if self._queue.jobs:
            self._go_on()

    def done(self, work: Work[object], on_end: Callable[[object], None]) -> None:
        self._queue.add(work, self._has_time_to_begin(), self._told(on_end))
        self._go_on()

    def between(self, callback: Callable[[], None]) -> None:
        self._world.counts["waits for a work"] += bool(self._queue.jobs)
        self._queue.between(callback)

    def finish(self) -> None:
        if self._queue.jobs:
            self._world.counts["works that were finished for others"] += 1
            self._queue.finish()

    def _told(self, on_end: Callable[[object], None]) -> OnEnd:
        def ended(value: object, failure: Exception | None) -> None:
            if failure is None:
                on_end(value)
            else:
                self._on_failure(failure)

        return ended

    def _has_time_to_begin(self) -> HasTime:
        if self.is_stuck:
            return lambda: False
        if self._world.pauses.are_none:
            return always
        left = itertools.count(FEW_STEPS - 1, -1)
        return lambda: next(left) > 0 or self._has_time()

    def _has_time(self) -> bool:
        pauses = self._world.pauses
        if self.is_stuck:
            return False
        if pauses.are_none or not pauses.begins():
            return True
        now_s = self._world.now_s
        self._pauses_s = min(MOST_S, self._pauses_s + (now_s - self._at_s) * SHARE)
        self._at_s = now_s
        return self._pauses_s <= 0.0

    def _go_on(self) -> None:
        if self._queue.jobs and not self._is_due:
            self._is_due = True
            if self.is_stuck:
                for_s = self._stuck_until_s - self._world.now_s
                self._world.after(for_s, lambda: self._in_turn(self._turn))
                return
            self._world.counts["pauses in works"] += 1
            lasts_s = self._world.pauses.lasts_s()
            self._pauses_s -= lasts_s
            self._world.after(lasts_s, lambda: self._in_turn(self._turn))

    def _turn(self) -> None:
        self._is_due = False
        self._queue.go_on(self._has_time)
        self._go_on()
