"""Worker processes that tests hand functions to, connected to one cluster after another.

Importing torch costs seconds, so a pool serves many tests. Each process runs one job at a time:
`Pool.run` gives the same function to every worker, with its own client, and collects what they
return.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import ps_worker as ps
from ps_core.errors import PushpullError

ResultT = TypeVar("ResultT")

JOB_DEADLINE_S = 45.0


def serve(orders: Connection) -> None:
    """The life of a worker process: connect, run, close, until the other end is gone."""
    import torch

    torch.set_num_threads(1)
    client: ps.Client | None = None
    while True:
        try:
            verb, payload = orders.recv()
        except EOFError:
            os._exit(0)  # every client is closed; collecting torch's modules would take seconds
        try:
            result = None
            if verb == "connect":
                address, rank, deadline_s = payload
                client = ps.connect(address, rank=rank, request_deadline_s=deadline_s)
            elif verb == "run":
                function, arguments = payload
                result = function(client, **arguments)
            elif client is not None:
                client.close(leave=payload)
                client = None
            orders.send((True, result))
        except PushpullError as error:
            orders.send((False, f"{type(error).__name__}: {error}"))
        except Exception:  # noqa: BLE001 - whatever it is, the test must see it
            orders.send((False, traceback.format_exc()))


class WorkerFailed(Exception):
    """A worker's job raised; the message is what."""


class Pool:
    """Worker processes, at most one cluster at a time."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._threads = ThreadPoolExecutor(size)
        self._count = 0

    @contextmanager
    def connected(
        self, address: str, count: int, *, leave: bool = True, deadline_s: float = 30.0
    ) -> Iterator[Pool]:
        """`count` of the processes are workers of the cluster at `address`, ranks in order."""
        self._count = count
        self._ask([("connect", (address, rank, deadline_s)) for rank in range(count)])
        try:
            yield self
        finally:
            self._ask([("close", leave)] * count)
            self._count = 0

    def run(self, function: Callable[..., ResultT], **arguments: Any) -> list[ResultT]:
        """What `function(client, **arguments)` returns at each worker, by rank."""
        answers = self.outcomes(function, **arguments)
        for answer in answers:
            if isinstance(answer, WorkerFailed):
                raise answer
        return answers

    def outcomes(self, function: Callable[..., ResultT], **arguments: Any) -> list[Any]:
        """As `run`, with `WorkerFailed` in the place of what raised."""
        return self._ask([("run", (function, arguments))] * self._count, is_tolerant=True)

    def stop(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._threads.shutdown()

    def _ask(self, orders: list[tuple[str, Any]], *, is_tolerant: bool = False) -> list[Any]:
        pipes = self._pipes[: len(orders)]
        for pipe, order in zip(pipes, orders, strict=True):
            pipe.send(order)
        answers = list(self._threads.map(_answer, pipes))
        if not is_tolerant:
            for answer in answers:
                if isinstance(answer, WorkerFailed):
                    raise answer
        return answers


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(JOB_DEADLINE_S):
        raise TimeoutError(f"a worker did not answer within {JOB_DEADLINE_S} s")
    is_fine, result = pipe.recv()
    return result if is_fine else WorkerFailed(result)
