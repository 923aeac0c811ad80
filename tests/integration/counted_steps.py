"""Steps that can be counted in the values: whatever is lost, doubled, misplaced or torn is seen."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

import ps_worker as ps

BLOCK = 4096


class Counted:
    """A table that `world` workers add to, each to elements of its own: float32 counts exactly.

    What a step adds differs from block to block, so that a block in the wrong place is seen.
    """

    def __init__(self, world: int, block_count: int = 24) -> None:
        self.world = world
        self.block_count = block_count
        self._weights = np.arange(block_count) % 7 + 1

    def create(
        self, client: ps.Client, name: str, consistency: str = "asp", **options: Any
    ) -> ps.TableHandle:
        """The table, or the same once more; further `options` as of `create_table`."""
        return client.create_table(
            name,
            self.block_count * BLOCK,
            optimizer=ps.SGD(lr=1.0),
            consistency=consistency,
            reduction="sum",
            block_elements=BLOCK,
            **options,
        )

    def gradient(self, rank: int) -> npt.NDArray[np.float32]:
        """One step of a worker."""
        weights = np.repeat(self._weights, BLOCK).astype(np.float32)
        own = np.arange(len(weights)) % self.world == rank
        made: npt.NDArray[np.float32] = weights * own.astype(np.float32)
        return made

    def steps(self, values: Any) -> npt.NDArray[np.int64]:
        """How many steps each block has: (blocks, world), whole ones."""
        shape = (self.block_count, BLOCK // self.world, self.world)
        found = np.asarray(values).reshape(shape)
        assert np.all(found == found[:, :1]), "a block is torn"
        counts = -found[:, 0].astype(np.float64) / self._weights[:, None]
        assert np.all(counts == np.rint(counts)), f"no whole number of steps: {counts}"
        return counts.astype(np.int64)

    def check(self, values: Any, expected: list[int]) -> None:
        """The values have exactly so many steps of each worker, in every block."""
        found = self.steps(values)
        assert np.all(found == expected), f"expected {expected} steps, found {found.tolist()}"


class Load:
    """One worker that pushes and reads until it is told to stop.

    Args:
        counted: the kind of table.
        client: the worker.
        table: its table.
        in_flight: steps that it leaves open before it waits for the oldest.

    Attributes:
        committed: its steps that have been committed.
        pushed: its steps.
        on_commit: told of each when it was begun and when that was known, by `time.monotonic`.
    """

    def __init__(
        self, counted: Counted, client: ps.Client, table: ps.TableHandle, in_flight: int = 4
    ) -> None:
        self._in_flight = in_flight
        self._counted = counted
        self._client = client
        self._table = table
        self._gradient = counted.gradient(client.rank)
        self._stop = threading.Event()
        self._news = threading.Condition()
        self._failure: BaseException | None = None
        self._last = 0
        self.committed = 0
        self.pushed = 0
        self.on_commit: Callable[[float, float], None] = _ignore

    def run(self) -> int:
        """Push; every read must have all that was committed before, and nothing twice. Returns the
        number of steps, all of which have been committed.
        """
        waiting: deque[tuple[ps.PushTicket, float]] = deque()
        seen = np.zeros((self._counted.block_count, self._counted.world), np.int64)
        try:
            while self.pushed < self._last or not self._stop.is_set():
                begun_s = time.monotonic()
                waiting.append((self._client.push(self._table, self._gradient), begun_s))
                self.pushed += 1
                if len(waiting) >= self._in_flight:
                    self._commit(*waiting.popleft())
                if self.pushed % 8 == 0:
                    seen = self._read(seen)
            for ticket, begun_s in waiting:
                self._commit(ticket, begun_s)
        except BaseException as failure:
            self._failure = failure
            raise
        finally:
            with self._news:
                self._stop.set()
                self._news.notify_all()
        return self.pushed

    def _commit(self, ticket: ps.PushTicket, begun_s: float) -> None:
        self._client.wait(ticket)
        self.on_commit(begun_s, time.monotonic())
        with self._news:
            self.committed += 1
            self._news.notify_all()

    def _read(self, seen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        least, pushed = self.committed, self.pushed
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
            if self._failure is not None:
                raise self._failure
            assert self.committed >= goal, f"{goal - self.committed} of {count} steps do not end"

    def stop(self) -> None:
        """Push no more."""
        self._stop.set()

    def stop_after(self, last: int) -> None:
        """Push no more than so many steps."""
        self._last = last
        self._stop.set()


def stop_together(loads: list[Load]) -> None:
    """All end with the same step, which none has begun: under SSP one that is ahead would wait for
    one that pushes no more.
    """
    last = max(load.pushed for load in loads) + 100
    for load in loads:
        load.stop_after(last)


@contextmanager
def under_load(
    counted: Counted, made: list[tuple[ps.Client, ps.TableHandle]], step_s: float, end_s: float
) -> Iterator[list[Load]]:
    """Every worker pushes and reads; in the end each step that it took is there, once.

    Args:
        counted: the kind of table.
        made: a worker each, and its table.
        step_s: within it every worker gets on, before and after.
        end_s: within it every worker ends.
    """
    loads = [Load(counted, client, table) for client, table in made]
    with ThreadPoolExecutor(len(loads)) as threads:
        runs: list[Future[int]] = [threads.submit(load.run) for load in loads]
        try:
            progress(loads, step_s)
            yield loads
            progress(loads, step_s)
        finally:
            for load in loads:
                load.stop()
        taken = [run.result(end_s) for run in runs]
    for client, table in made:
        counted.check(client.pull(table), taken)


def progress(loads: list[Load], step_s: float, count: int = 5) -> None:
    """Each worker commits so many more steps."""
    for load in loads:
        load.more(count, step_s)


def _ignore(begun_s: float, ended_s: float) -> None:
    del begun_s, ended_s
