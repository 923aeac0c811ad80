"""A worker of pushpull that does as it is told: what a user's script would do, and nothing else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import ps_worker as ps
from benchmarks.child import obey, open_answers
from benchmarks.sampling import percentile

ELEMENT_BYTES = 4
OPTIMIZERS: dict[str, ps.SGD | ps.Adam] = {"sgd": ps.SGD(lr=0.1), "adam": ps.Adam(lr=1e-3)}


class _Moves:
    """Push, pull and both, on one table."""

    def __init__(self, client: ps.Client, optimizer: str, byte_count: int) -> None:
        element_count = byte_count // ELEMENT_BYTES
        self._client = client
        self._gradient = np.full(element_count, 1e-3, dtype=np.float32)
        self._values = np.zeros(element_count, dtype=np.float32)
        self._table = client.create_table(optimizer, element_count, optimizer=OPTIMIZERS[optimizer])

    def push(self) -> None:
        """A step, until it is committed."""
        self._client.wait(self._client.push(self._table, self._gradient, copy=False))

    def pull(self) -> None:
        """The parameters, until they are in the caller's buffer."""
        self._client.pull(self._table, out=self._values)

    def round(self) -> None:
        """A push, then a pull that has it in it."""
        ticket = self._client.push(self._table, self._gradient, copy=False)
        self._client.pull(self._table, out=self._values)
        self._client.wait(ticket)

    def push_pull(self) -> None:
        """Both with one verb."""
        self._client.push_pull(self._table, self._gradient, out=self._values)


def _latency(action: Callable[[], None], call_count: int) -> dict[str, float]:
    waits_s = []
    for _ in range(call_count):
        began_s = time.perf_counter()
        action()
        waits_s.append(time.perf_counter() - began_s)
    return {"p50_s": percentile(waits_s, 50), "p99_s": percentile(waits_s, 99)}


def main() -> None:
    """`SCHEDULER RANK BYTES CALLS OPTIMIZER...`: a table for each optimizer."""
    scheduler, rank, size, calls, *optimizers = sys.argv[1:]
    answers = open_answers()
    with ps.connect(scheduler, rank=int(rank)) as client:
        actions: dict[str, Callable[[], object]] = {}
        for optimizer in optimizers:
            moves = _Moves(client, optimizer, int(size))
            actions[f"{optimizer} push"] = moves.push
            actions[f"{optimizer} pull"] = moves.pull
            actions[f"{optimizer} round"] = moves.round
            for verb in (moves.push_pull, moves.push, moves.pull):
                name = f"{optimizer} {verb.__name__} latency"
                actions[name] = partial(_latency, verb, int(calls))
        obey(answers, actions)


if __name__ == "__main__":
    main()
