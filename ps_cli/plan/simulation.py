"""What processes of a simulated cluster queue for and wait for, on simpy's clock."""

from __future__ import annotations

import simpy
from simpy.events import ProcessGenerator


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


class Thread(Station):
    """A thread that needs one of the cores that it shares with others: first come, first served."""

    def __init__(self, simulation: simpy.Environment, cores: simpy.Resource) -> None:
        super().__init__(simulation)
        self._cores = cores
        self._turn = simpy.Resource(simulation)
        self._done_s = 0.0

    @property
    def busy_s(self) -> float:
        """The seconds of work that is done."""
        return self._done_s

    def serve(self, seconds: float) -> simpy.Event:
        return self._simulation.process(self._served(seconds))

    def _served(self, seconds: float) -> ProcessGenerator:
        with self._turn.request() as turn:
            yield turn
            with self._cores.request() as core:
                yield core
                yield self._simulation.timeout(seconds)
        self._done_s += seconds


class Latch:
    """Its event happens when so many have arrived."""

    def __init__(self, simulation: simpy.Environment, count: int) -> None:
        self.opened: simpy.Event = simulation.event()
        self._count = count

    def arrive(self) -> None:
        self._count -= 1
        if self._count == 0:
            self.opened.succeed()
