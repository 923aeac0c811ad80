"""A process: a worker of pushpull that does actions on its tables."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import ps_worker as ps
from ps_cli.bench.contenders.child import obey, open_answers
from ps_cli.bench.contenders.moves import OPTIMIZERS, PRIVATE, Buffers, Moves
from ps_cli.bench.instruments.sampling import call_latencies
from ps_cli.bench.lanes import SHARED_MEMORY


def main() -> None:
    """`SCHEDULER LANE RANK BYTES CALLS NAME...`: a table for each name, which is that of an
    optimizer, or that and PRIVATE.
    """
    scheduler, lane, rank, size, calls, *names = sys.argv[1:]
    answers = open_answers()
    shared = {name: lane == SHARED_MEMORY and not name.endswith(PRIVATE) for name in names}
    buffers = {
        is_shared: Buffers(int(size), is_shared=is_shared) for is_shared in set(shared.values())
    }
    with ps.connect(scheduler, rank=int(rank), lane=lane) as client:
        actions: dict[str, Callable[[], object]] = {}
        for name in names:
            own = buffers[shared[name]]
            optimizer = OPTIMIZERS[name.removesuffix(PRIVATE)]
            moves = Moves(
                client, client.create_table(name, own.element_count, optimizer=optimizer), own
            )
            for move, act in moves.by_name().items():
                actions[f"{name} {move}"] = act
            for verb in (moves.push_pull, moves.push, moves.pull):
                action = f"{name} {verb.__name__} latency"
                actions[action] = partial(call_latencies, verb, int(calls))
        obey(answers, actions)


if __name__ == "__main__":
    main()
