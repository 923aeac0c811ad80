"""A process: a worker that asks for checkpoints, and may train meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import ps_worker as ps
from ps_cli.bench.contenders.child import Actions
from ps_cli.bench.contenders.worker import OPTIMIZERS, Buffers
from ps_cli.bench.lanes import SHARED_MEMORY
from ps_worker.client.checkpoints import CheckpointTicket

OPTIMIZER = "adam"
CHECKPOINT_DEADLINE_S = 240.0
_REST_S = 1.0
"""A server counts as busy for half of that after an update."""

_FIRST_STEP_COUNT = 4
"""Steps of a turn without a checkpoint before the first one."""


class _Script:
    """The steps of a training script on one table, and the seconds of its pushes."""

    def __init__(self, client: ps.Client, name: str, buffers: Buffers) -> None:
        self._client = client
        self._buffers = buffers
        self._table = client.create_table(
            name, buffers.element_count, optimizer=OPTIMIZERS[OPTIMIZER]
        )
        self._step_count = _FIRST_STEP_COUNT

    def step(self) -> float:
        """Push and then pull; the seconds until the push was committed."""
        began_s = time.perf_counter()
        self._client.wait(self._client.push(self._table, self._buffers.gradient, copy=False))
        took_s = time.perf_counter() - began_s
        self._client.pull(self._table, out=self._buffers.values)
        return took_s

    def train_during(self) -> dict[str, object]:
        """Steps from the request for a checkpoint until it is complete."""
        ticket, found = _ask(self._client)
        waits_s: list[float] = []
        while not ticket.done() or not waits_s:
            waits_s.append(self.step())
        self._step_count = len(waits_s)
        return {"waits_s": waits_s, **found()}

    def train_between(self) -> dict[str, object]:
        """As many steps as the last checkpoint took, without one."""
        return {"waits_s": [self.step() for _ in range(self._step_count)]}


def _ask(client: ps.Client) -> tuple[CheckpointTicket, Callable[[], dict[str, object]]]:
    """Ask for a checkpoint; a function waits until it is complete, and returns its figures."""
    ended_s: Future[float] = Future()
    began_s = time.perf_counter()
    ticket = client.checkpoint(timeout_s=CHECKPOINT_DEADLINE_S)
    held_s = time.perf_counter() - began_s
    ticket.future.add_done_callback(lambda _: ended_s.set_result(time.perf_counter()))

    def found() -> dict[str, object]:
        made, wall_s = ticket.wait(), ended_s.result() - began_s
        return {"wall_s": wall_s, "held_s": held_s, "byte_count": made.byte_count, "url": made.url}

    return ticket, found


def _write(client: ps.Client) -> dict[str, object]:
    """Make a checkpoint without training."""
    time.sleep(_REST_S)
    return _ask(client)[1]()


@contextlib.contextmanager
def checkpoint_worker(scheduler: str, lane: str, *given: str) -> Iterator[Actions]:
    """A table for each NAME=BYTES that is given, with one update."""
    with ps.connect(scheduler, rank=0, lane=lane) as client:
        actions: dict[str, Callable[[], object]] = {"write": partial(_write, client)}
        for name, _, size in (each.partition("=") for each in given):
            script = _Script(client, name, Buffers(int(size), is_shared=lane == SHARED_MEMORY))
            script.step()  # makes the optimizer's state
            actions[f"{name} during"] = script.train_during
            actions[f"{name} between"] = script.train_between
        yield actions
