"""In a process of its own: a worker of pushpull that does as it is told."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import ps_worker as ps
from benchmarks.child import obey, open_answers
from benchmarks.moves import OPTIMIZERS, Buffers, Moves
from benchmarks.sampling import percentile


def _latency(action: Callable[[], None], call_count: int) -> dict[str, float]:
    waits_s = []
    for _ in range(call_count):
        began_s = time.perf_counter()
        action()
        waits_s.append(time.perf_counter() - began_s)
    return {"p50_s": percentile(waits_s, 50), "p99_s": percentile(waits_s, 99)}


def main() -> None:
    """`SCHEDULER LANE RANK BYTES CALLS OPTIMIZER...`: a table for each optimizer."""
    scheduler, lane, rank, size, calls, *optimizers = sys.argv[1:]
    answers = open_answers()
    buffers = Buffers(int(size))
    with ps.connect(scheduler, rank=int(rank), lane=lane) as client:
        actions: dict[str, Callable[[], object]] = {}
        for optimizer in optimizers:
            table = client.create_table(
                optimizer, buffers.element_count, optimizer=OPTIMIZERS[optimizer]
            )
            moves = Moves(client, table, buffers)
            for move, act in moves.by_name().items():
                actions[f"{optimizer} {move}"] = act
            for verb in (moves.push_pull, moves.push, moves.pull):
                name = f"{optimizer} {verb.__name__} latency"
                actions[name] = partial(_latency, verb, int(calls))
        obey(answers, actions)


if __name__ == "__main__":
    main()
