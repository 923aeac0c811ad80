"""A process: several workers of pushpull, of which one at a time moves."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator

import ps_worker as ps
from ps_cli.bench.contenders.child import obey, open_answers
from ps_cli.bench.contenders.moves import OPTIMIZERS, Buffers, Moves

TABLE = OPTIMIZER = "sgd"


def _in_turn(members: Iterator[Moves], move: str, operation_count: int) -> Callable[[], None]:
    """An action of `operation_count` moves, each by the next member."""

    def act() -> None:
        for _ in range(operation_count):
            next(members).by_name()[move]()

    return act


def main() -> None:
    """`SCHEDULER LANE BYTES OPERATIONS RANK...`: a session for each rank, on one ASP table."""
    scheduler, lane, size, operations, *ranks = sys.argv[1:]
    answers = open_answers()
    buffers = Buffers(int(size))
    with contextlib.ExitStack() as stack:
        members = []
        for rank in ranks:
            client = stack.enter_context(ps.connect(scheduler, rank=int(rank), lane=lane))
            table = client.create_table(
                TABLE,
                buffers.element_count,
                optimizer=OPTIMIZERS[OPTIMIZER],
                consistency=ps.ASP(),
            )
            members.append(Moves(client, table, buffers))
        turns = itertools.cycle(members)
        moves = members[0].by_name()
        obey(answers, {move: _in_turn(turns, move, int(operations)) for move in moves})


if __name__ == "__main__":
    main()
