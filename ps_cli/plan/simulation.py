"""A discrete-event simulation of processes that queue for stations, on a clock of its own.

A process is a generator that yields waits. A wait is a function that is given what to call when it
is over. So a station, a delay and a gate are waits alike, and a visit costs one event.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

Resume = Callable[[], None]
Wait = Callable[[Resume], None]
Process = Iterator[Wait]


class Simulation:
    """The clock and the events that are due; those of one moment happen in the order of asking."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Resume]] = []
        self._number = 0

    def start(self, process: Process) -> None:
        """Run a process up to its first wait."""
        wait = next(process, None)
        if wait is not None:
            wait(partial(self.start, process))

    def call_after(self, delay_s: float, call: Resume) -> None:
        self._number += 1
        heapq.heappush(self._due, (self.now_s + delay_s, self._number, call))

    def delay(self, seconds: float) -> Wait:
        return partial(self.call_after, seconds)

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Let events happen until `is_over`, or until none is due."""
        while self._due and not is_over():
            self.now_s, _, call = heapq.heappop(self._due)
            call()


class Cores:
    """The cores of a host, which its stations share: who asks first is served first."""

    def __init__(self, count: int) -> None:
        self._free_s = [0.0] * count

    def end_s(self, now_s: float, seconds: float) -> float:
        """The time at which a core that is taken now has done so many seconds of work."""
        end_s = max(now_s, self._free_s[0]) + seconds
        heapq.heapreplace(self._free_s, end_s)
        return end_s


class Station:
    """Serves one visit at a time, in the order of arrival: a direction of a link, or a thread.

    Attributes:
        busy_s: the seconds of all visits that have begun.
    """

    def __init__(self, simulation: Simulation, cores: Cores | None = None) -> None:
        self._simulation = simulation
        self._cores = cores
        self._visits: deque[tuple[float, Resume]] = deque()
        self.busy_s = 0.0

    def serve(self, seconds: float) -> Wait:
        """Wait for the station's turn and for `seconds` of its work."""

        def wait(resume: Resume) -> None:
            self._visits.append((seconds, resume))
            if len(self._visits) == 1:
                self._begin()

        return wait

    def _begin(self) -> None:
        seconds = self._visits[0][0]
        self.busy_s += seconds
        if self._cores is not None:
            now_s = self._simulation.now_s
            seconds = self._cores.end_s(now_s, seconds) - now_s
        self._simulation.call_after(seconds, self._end)

    def _end(self) -> None:
        _, resume = self._visits.popleft()
        if self._visits:
            self._begin()
        resume()


class Latch:
    """Opens when so many have arrived; one process may wait."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._resume: Resume | None = None

    def arrive(self) -> None:
        self._count -= 1
        if self._count == 0 and self._resume is not None:
            self._resume()

    def __call__(self, resume: Resume) -> None:
        self._resume = resume
        if self._count == 0:
            resume()
