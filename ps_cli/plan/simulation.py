"""Queues and latches of a simulated cluster, on simpy's clock."""

from __future__ import annotations

import heapq
from collections import deque

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
    """The cores of a host, which its threads share: who asks first is served first."""

    def __init__(self, count: int) -> None:
        self._free_s = [0.0] * count

    def end_s(self, now_s: float, seconds: float) -> float:
        """The time at which a core that is taken now has done so many seconds of work."""
        end_s = max(now_s, self._free_s[0]) + seconds
        heapq.heapreplace(self._free_s, end_s)
        return end_s


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
        now_s = self._simulation.now
        end_s = self._cores.end_s(now_s, self._visits[0][0])
        simpy.Timeout(self._simulation, end_s - now_s).callbacks.append(self._end)

    def _end(self, _: simpy.Event) -> None:
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
