"""A process: a worker that asks for checkpoints, and may train meanwhile."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import ps_worker as ps
from ps_cli.bench.contenders.child import obey, open_answers
from ps_cli.bench.contenders.moves import OPTIMIZERS, Buffers
from ps_cli.bench.lanes import SHARED_MEMORY
from ps_worker.client.checkpoints import CheckpointTicket

OPTIMIZER = "adam"
CHECKPOINT_DEADLINE_S = 240.0
_REST_S = 1.0
"""A server counts as busy for half of that after an update."""

_FIRST_STEP_COUNT = 4
"""Steps of a turn without a checkpoint before the first one."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """A checkpoint that is being made; `ended_s` is when it was complete."""

    ticket: CheckpointTicket
    began_s: float
    held_s: float
    ended_s: Future[float]

    def found(self) -> dict[str, object]:
        """Wait until it is complete; its figures."""
        made = self.ticket.wait()
        return {
            "wall_s": self.ended_s.result() - self.began_s,
            "held_s": self.held_s,
            "byte_count": made.byte_count,
            "url": made.url,
        }


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
        watched = _ask(self._client)
        waits_s: list[float] = []
        while not watched.ticket.done() or not waits_s:
            waits_s.append(self.step())
        self._step_count = len(waits_s)
        return {"waits_s": waits_s, **watched.found()}

    def train_between(self) -> dict[str, object]:
        """As many steps as the last checkpoint took, without one."""
        return {"waits_s": [self.step() for _ in range(self._step_count)]}


def _ask(client: ps.Client) -> _Watched:
    ended_s: Future[float] = Future()
    began_s = time.perf_counter()
    ticket = client.checkpoint(timeout_s=CHECKPOINT_DEADLINE_S)
    held_s = time.perf_counter() - began_s
    ticket.future.add_done_callback(lambda _: ended_s.set_result(time.perf_counter()))
    return _Watched(ticket, began_s, held_s, ended_s)


def _write(client: ps.Client) -> dict[str, object]:
    """Make a checkpoint without training."""
    time.sleep(_REST_S)
    return _ask(client).found()


def main() -> None:
    """`SCHEDULER LANE NAME=BYTES...`: a table for each name, with one update."""
    scheduler, lane, *given = sys.argv[1:]
    answers = open_answers()
    with ps.connect(scheduler, rank=0, lane=lane) as client:
        actions: dict[str, Callable[[], object]] = {"write": partial(_write, client)}
        for name, _, size in (each.partition("=") for each in given):
            script = _Script(client, name, Buffers(int(size), is_shared=lane == SHARED_MEMORY))
            script.step()  # makes the optimizer's state
            actions[f"{name} during"] = script.train_during
            actions[f"{name} between"] = script.train_between
        obey(answers, actions)


if __name__ == "__main__":
    main()
