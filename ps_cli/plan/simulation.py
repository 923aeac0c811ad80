"""Queues and latches of a simulated cluster, on simpy's clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import simpy


class Station:
    """Serves one visit at a time, in the order of arrival: a direction of a link, or a thread."""

    def __init__(self, simulation: simpy.Environment) -> None:
        self._simulation = simulation
        self._asked_s = 0.0
        self._free_s = 0.0

    @property
    def busy_s(self) -> float:
        """The seconds of work done so far."""
        return self._asked_s - max(0.0, self._free_s - self._simulation.now)

    def serve(self, seconds: float) -> simpy.Event:
        """Happens when the station has had its turn for it, and done `seconds` of its work."""
        now_s = self._simulation.now
        self._asked_s += seconds
        self._free_s = max(now_s, self._free_s) + seconds
        return self._simulation.timeout(self._free_s - now_s)


class Cores:
    """The cores of a host, which its threads share: who asks first is served first, and all of them
    before computations, which lose a core to a thread that wakes.
    """

    def __init__(self, simulation: simpy.Environment, count: int) -> None:
        self._simulation = simulation
        self._count = self._idle_count = count
        self._turns: deque[_Turn] = deque()
        self._computations: deque[_Turn] = deque()
        self._computing: list[_Turn] = []
        self._busy_s = self._counted_until_s = 0.0

    @property
    def busy_s(self) -> float:
        """The seconds of work done so far, of all cores."""
        self._count_work()
        return self._busy_s

    def serve(self, seconds: float, end: Callable[[], object]) -> None:
        """Call `end` when a core has done so many seconds of a thread's work."""
        self._turns.append(_Turn(seconds, end))
        self._begin_waiting()

    def compute(self, seconds: float) -> simpy.Event:
        """Happens when a core has done so many seconds of a computation."""
        computed: simpy.Event = self._simulation.event()
        self._computations.append(_Turn(seconds, computed.succeed))
        self._begin_waiting()
        return computed

    def _begin_waiting(self) -> None:
        """Give cores to those who wait for one."""
        self._count_work()
        while self._turns and (self._idle_count or self._computing):
            if not self._idle_count:
                self._interrupt(self._computing.pop())
            self._begin(self._turns.popleft())
        while self._computations and self._idle_count:
            self._computing.append(self._computations.popleft())
            self._begin(self._computing[-1])

    def _begin(self, turn: _Turn) -> None:
        self._idle_count -= 1
        turn.began_s = self._simulation.now
        turn.timer = simpy.Timeout(self._simulation, turn.left_s)
        turn.timer.callbacks.append(partial(self._end, turn))

    def _interrupt(self, turn: _Turn) -> None:
        self._idle_count += 1
        turn.timer = None
        turn.left_s = max(0.0, turn.left_s - (self._simulation.now - turn.began_s))
        self._computations.appendleft(turn)

    def _end(self, turn: _Turn, timer: simpy.Event) -> None:
        if turn.timer is not timer:
            return  # it was interrupted
        self._count_work()
        self._idle_count += 1
        if turn in self._computing:
            self._computing.remove(turn)
        turn.end()  # first: it may ask for the next turn of its thread
        self._begin_waiting()

    def _count_work(self) -> None:
        now_s = self._simulation.now
        self._busy_s += (self._count - self._idle_count) * (now_s - self._counted_until_s)
        self._counted_until_s = now_s


@dataclass(slots=True, eq=False)
class _Turn:
    """Work on one core; `timer` rings at its end, and is None while it waits."""

    left_s: float
    end: Callable[[], object]
    began_s: float = 0.0
    timer: simpy.Event | None = None


class Thread(Station):
    """A thread that asks for a core in each of its turns."""

    def __init__(self, simulation: simpy.Environment, cores: Cores) -> None:
        super().__init__(simulation)
        self._cores = cores
        self._visits: deque[tuple[float, simpy.Event]] = deque()
        self._done_s = 0.0

    @property
    def busy_s(self) -> float:
        """The seconds of work done in turns that are over."""
        return self._done_s

    def serve(self, seconds: float) -> simpy.Event:
        served: simpy.Event = self._simulation.event()
        self._visits.append((seconds, served))
        if len(self._visits) == 1:
            self._begin()
        return served

    def _begin(self) -> None:
        self._cores.serve(self._visits[0][0], self._end)

    def _end(self) -> None:
        seconds, served = self._visits.popleft()
        self._done_s += seconds
        if self._visits:
            self._begin()
        served.succeed()


class Latch:
    """Its event happens when so many have arrived."""

    def __init__(self, simulation: simpy.Environment, count: int) -> None:
        self.opened: simpy.Event = simulation.event()
        self._count = count

    def arrive(self) -> None:
        self._count -= 1
        if self._count == 0:
            self.opened.succeed()
