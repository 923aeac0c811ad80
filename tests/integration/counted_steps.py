"""Steps that can be counted in the values: whatever is lost, doubled, misplaced or torn is seen."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

import ps_worker as ps

BLOCK = 4096
BLOCK_COUNT = 48
SIZE = BLOCK * BLOCK_COUNT

_WEIGHTS = np.arange(BLOCK_COUNT) % 7 + 1
"""What a step adds to its worker's elements of a block: which block it is shows."""

_IN_FLIGHT = 4


class Counted:
    """A table that `world` workers add to, each to elements of its own: float32 counts exactly."""

    def __init__(self, world: int) -> None:
        self.world = world

    def create(self, client: ps.Client, name: str, consistency: str = "asp") -> ps.TableHandle:
        """The table, or the same once more."""
        return client.create_table(
            name,
            SIZE,
            optimizer=ps.SGD(lr=1.0),
            consistency=consistency,
            reduction="sum",
            block_elements=BLOCK,
        )

    def gradient(self, rank: int) -> npt.NDArray[np.float32]:
        """One step of a worker."""
        own = (np.arange(SIZE) % self.world == rank).astype(np.float32)
        made: npt.NDArray[np.float32] = own * np.repeat(_WEIGHTS, BLOCK).astype(np.float32)
        return made

    def steps(self, values: Any) -> npt.NDArray[np.int64]:
        """How many steps each block has: (BLOCK_COUNT, world), whole ones."""
        found = np.asarray(values).reshape(BLOCK_COUNT, BLOCK // self.world, self.world)
        assert np.all(found == found[:, :1]), "a block is torn"
        counts = -found[:, 0].astype(np.float64) / _WEIGHTS[:, None]
        assert np.all(counts == np.rint(counts)), f"no whole number of steps: {counts}"
        return counts.astype(np.int64)

    def check(self, values: Any, expected: list[int]) -> None:
        """The values have exactly so many steps of each worker, in every block."""
        found = self.steps(values)
        assert np.all(found == expected), f"expected {expected} steps, found {found.tolist()}"


class Load:
    """One worker that pushes and reads until it is told to stop."""

    def __init__(self, counted: Counted, client: ps.Client, table: ps.TableHandle) -> None:
        self._counted = counted
        self._client = client
        self._table = table
        self._gradient = counted.gradient(client.rank)
        self._stop = threading.Event()
        self._news = threading.Condition()
        self.committed = 0

    def run(self) -> int:
        """Push; every read must have all that was committed before, and nothing twice. Returns the
        number of steps, all of which have been committed.
        """
        waiting: deque[ps.PushTicket] = deque()
        seen = np.zeros((BLOCK_COUNT, self._counted.world), np.int64)
        pushed = 0
        try:
            while not self._stop.is_set():
                waiting.append(self._client.push(self._table, self._gradient))
                pushed += 1
                if len(waiting) > _IN_FLIGHT:
                    self._commit(waiting.popleft())
                if pushed % 8 == 0:
                    seen = self._read(seen, pushed)
            for ticket in waiting:
                self._commit(ticket)
        finally:
            with self._news:
                self._stop.set()
                self._news.notify_all()
        return pushed

    def _commit(self, ticket: ps.PushTicket) -> None:
        self._client.wait(ticket)
        with self._news:
            self.committed += 1
            self._news.notify_all()

    def _read(self, seen: npt.NDArray[np.int64], pushed: int) -> npt.NDArray[np.int64]:
        least = self.committed
        found = self._counted.steps(self._client.pull(self._table))
        assert np.all(found >= seen), "a read takes back what another one showed"
        own = found[:, self._client.rank]
        assert np.all(own >= least), f"{least} steps were committed, and a read has {own}"
        assert np.all(own <= pushed), f"{pushed} steps were pushed, and a read has {own}"
        return found

    def more(self, count: int, deadline_s: float) -> None:
        """Wait until `count` more steps are committed."""
        with self._news:
            goal = self.committed + count
            self._news.wait_for(lambda: self.committed >= goal or self._stop.is_set(), deadline_s)
            assert self.committed >= goal, f"{goal - self.committed} of {count} steps do not end"

    def stop(self) -> None:
        """Push no more."""
        self._stop.set()
