"""A process: a worker that pushes whole numbers to random rows, whose sums are therefore known.

A worker's steps are a function of its rank, and float32 adds whole numbers of this size exactly, so
that a step that is lost, doubled, torn or at the wrong row is seen in the values.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import ps_worker as ps
from ps_cli.bench.contenders.child import Actions

LENGTH, BATCH_COUNT = 64, 1024
"""Elements of a row, and ids of a step."""

TABLE = "counted"

_LARGEST = 7
_WEIGHTS = np.arange(LENGTH) % _LARGEST + 1
"""Each element of a row takes its step's number so many times: one in the wrong place is seen."""

_IN_FLIGHT_COUNTS = (1, 4)
"""Rank 0 has one, the others four: its first commit tells when a step is possible again."""

_PULL_COUNT = 8192


class Step(NamedTuple):
    """The ids of one step, with repetitions, and the number that it adds to the row of each."""

    ids: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]

    @property
    def gradients(self) -> npt.NDArray[np.float32]:
        return (self.numbers[:, None] * _WEIGHTS).astype(np.float32)


def steps(rank: int, row_count: int) -> Iterator[Step]:
    """All steps of a worker, without an end."""
    draws = np.random.default_rng(rank)
    while True:
        ids = draws.integers(0, row_count, BATCH_COUNT)
        yield Step(ids, draws.integers(1, _LARGEST + 1, BATCH_COUNT))


def expected_rows(step_counts: Mapping[int, int], row_count: int) -> npt.NDArray[np.int64]:
    """The values of all rows after so many steps of each rank."""
    sums = np.zeros(row_count, np.int64)
    for rank, step_count in step_counts.items():
        for step in itertools.islice(steps(rank, row_count), step_count):
            np.add.at(sums, step.ids, step.numbers)
    return sums[:, None] * _WEIGHTS


def wrong_ids(
    found: npt.NDArray[np.float32], expected: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The rows that differ in any element."""
    return np.flatnonzero((found != expected).any(axis=1))


def all_rows(client: ps.Client, row_count: int) -> npt.NDArray[np.float32]:
    table = client.table(TABLE)
    ids = np.arange(row_count)
    batches = [ids[begin : begin + _PULL_COUNT] for begin in range(0, row_count, _PULL_COUNT)]
    return np.concatenate([client.pull_rows(table, batch) for batch in batches])


@contextlib.contextmanager
def member(scheduler: str, lane: str, rank: str, row_count: str) -> Iterator[Actions]:
    """A worker that pushes from `push` to `stop`, while `commits` tells how it gets on."""
    with ps.connect(scheduler, rank=int(rank), lane=lane) as client:
        load = _Load(client, int(rank), int(row_count))
        with contextlib.closing(load):
            yield {"push": load.push, "commits": load.commits, "stop": load.stop}


class _Load:
    """Steps that a thread pushes, one after the other or some at once."""

    def __init__(self, client: ps.Client, rank: int, row_count: int) -> None:
        self._client = client
        self._table = client.create_embedding(
            TABLE, LENGTH, optimizer=ps.SGD(lr=1.0, maximize=True), consistency="asp",
            reduction="sum",
        )  # fmt: skip
        self._steps = steps(rank, row_count)
        self._in_flight_count = _IN_FLIGHT_COUNTS[min(rank, 1)]
        self._commits: deque[tuple[float, float]] = deque()
        self._is_stopping = threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def push(self) -> None:
        """Begin to push."""
        self._pushing = self._thread.submit(self._push)

    def commits(self) -> list[tuple[float, float]]:
        """The steps that were committed since the last call: when each was begun, and ended."""
        if self._pushing.done():
            self._pushing.result()  # raises the error that ended it
        return [self._commits.popleft() for _ in range(len(self._commits))]

    def stop(self) -> int:
        """Begin no more steps; the number of steps, all of which are committed."""
        self._is_stopping.set()
        return self._pushing.result()

    def close(self) -> None:
        self._is_stopping.set()
        self._thread.shutdown()

    def _push(self) -> int:
        step_count = 0
        waiting: deque[tuple[ps.PushTicket, float]] = deque()
        while not self._is_stopping.is_set():
            if len(waiting) == self._in_flight_count:
                self._commit(*waiting.popleft())
            step = next(self._steps)
            began_s = time.perf_counter()
            ticket = self._client.push_rows(self._table, step.ids, step.gradients)
            waiting.append((ticket, began_s))
            step_count += 1
        for ticket, began_s in waiting:
            self._commit(ticket, began_s)
        return step_count

    def _commit(self, ticket: ps.PushTicket, began_s: float) -> None:
        self._client.wait(ticket)
        self._commits.append((began_s, time.perf_counter()))
