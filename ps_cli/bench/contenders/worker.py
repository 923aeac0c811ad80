"""Processes: workers of pushpull that do actions on their tables, as a user's script does."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

import ps_worker as ps
from ps_cli.bench.contenders.child import Actions
from ps_cli.bench.instruments.sampling import call_latencies
from ps_cli.bench.lanes import SHARED_MEMORY
from ps_core.codecs.choices import PULL_CHOICES
from ps_core.tables.elements import Codec

ELEMENT_BYTES = 4
PRIVATE = "/private"
"""After the name of an optimizer: its gradient is an array in numpy's own memory."""
CODEC = ":"
"""After the name of an optimizer, before that of the codec that its pushes and pulls have."""

OPTIMIZERS: dict[str, ps.SGD | ps.Adam] = {"sgd": ps.SGD(lr=0.1), "adam": ps.Adam(lr=1e-3)}
CROWD_TABLE = "sgd"


class Buffers:
    """A gradient and an array for pulled values; every page of both is resident. A shared gradient
    is in memory that servers on this host read, as that of `DistributedOptimizer`.
    """

    def __init__(self, byte_count: int, *, is_shared: bool = False) -> None:
        self.element_count = byte_count // ELEMENT_BYTES
        make = ps.empty_shared if is_shared else np.empty
        self.gradient = make(self.element_count, dtype=np.float32)
        np.random.default_rng(0).standard_normal(dtype=np.float32, out=self.gradient)
        self.gradient *= 1e-3
        self.values = np.full(self.element_count, 0, dtype=np.float32)


class Moves:
    """Push, pull and both, on a table as large as the buffers, which several may share in turn."""

    def __init__(self, client: ps.Client, table: ps.TableHandle, buffers: Buffers) -> None:
        self._client = client
        self._table = table
        self._buffers = buffers

    def push(self) -> None:
        """Push, and wait for the commit."""
        self._client.wait(self._client.push(self._table, self._buffers.gradient, copy=False))

    def pull(self) -> None:
        self._client.pull(self._table, out=self._buffers.values)

    def round(self) -> None:
        """Push, and pull values that include it."""
        ticket = self._client.push(self._table, self._buffers.gradient, copy=False)
        self._client.pull(self._table, out=self._buffers.values)
        self._client.wait(ticket)

    def push_pull(self) -> None:
        self._client.push_pull(self._table, self._buffers.gradient, out=self._buffers.values)

    def by_name(self) -> dict[str, Callable[[], None]]:
        """The moves that are measured in bytes per second."""
        return {"push": self.push, "pull": self.pull, "round": self.round}


def pull_codec_of(codec: str) -> str:
    """The codec of pulls beside that one of pushes: the same, or bf16 if pulls cannot have it."""
    return codec if codec in ("", *PULL_CHOICES) else Codec.BF16.value


@contextlib.contextmanager
def member(
    scheduler: str, lane: str, rank: str, size: str, calls: str, *names: str
) -> Iterator[Actions]:
    """A worker with a table for each name, which is that of an optimizer, perhaps with PRIVATE or
    with CODEC and a codec.
    """
    shared = {name: lane == SHARED_MEMORY and not name.endswith(PRIVATE) for name in names}
    buffers = {each: Buffers(int(size), is_shared=each) for each in set(shared.values())}
    with ps.connect(scheduler, rank=int(rank), lane=lane) as client:
        actions: dict[str, Callable[[], object]] = {}
        for name in names:
            own = buffers[shared[name]]
            optimizer, _, codec = name.removesuffix(PRIVATE).partition(CODEC)
            table = client.create_table(
                name,
                own.element_count,
                optimizer=OPTIMIZERS[optimizer],
                push_codec=codec or None,
                pull_codec=pull_codec_of(codec) or None,
            )
            moves = Moves(client, table, own)
            for move, act in moves.by_name().items():
                actions[f"{name} {move}"] = act
            for verb in (moves.push_pull, moves.push, moves.pull):
                action = f"{name} {verb.__name__} latency"
                actions[action] = partial(call_latencies, verb, int(calls))
        yield actions


@contextlib.contextmanager
def crowd(scheduler: str, lane: str, size: str, operations: str, *ranks: str) -> Iterator[Actions]:
    """A worker for each rank, on one ASP table; an action is so many moves, each by the next."""
    buffers = Buffers(int(size))
    with contextlib.ExitStack() as stack:
        workers = []
        for rank in ranks:
            client = stack.enter_context(ps.connect(scheduler, rank=int(rank), lane=lane))
            table = client.create_table(
                CROWD_TABLE,
                buffers.element_count,
                optimizer=OPTIMIZERS[CROWD_TABLE],
                consistency=ps.ASP(),
            )
            workers.append(Moves(client, table, buffers))
        turns = itertools.cycle(workers)

        def act(move: str) -> None:
            for _ in range(int(operations)):
                next(turns).by_name()[move]()

        yield {move: partial(act, move) for move in workers[0].by_name()}
