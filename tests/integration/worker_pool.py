"""Worker processes that tests hand functions to, connected to one cluster after another.

Importing torch costs seconds, so a pool serves many tests. Each process runs one job at a time:
`Workers.run` gives the same function to every worker, with its own client, and collects what they
return.
"""

from __future__ import annotations

import importlib
import itertools
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import ps_worker as ps
from ps_core.errors import PushpullError
from ps_runtime.system.collector import spared
from tests.integration.warm_processes import warm_context

ResultT = TypeVar("ResultT")

JOB_DEADLINE_S = 45.0

ALONE = -1
"""In the place of a cluster's number: the job is given None for a client."""


def serve(orders: Connection) -> None:
    """The life of a worker process: connect, run, close, until the other end is gone."""
    import torch

    torch.set_num_threads(1)
    clients: dict[int, Any] = {ALONE: None}
    while True:
        try:
            verb, number, payload = orders.recv()
        except EOFError:
            os._exit(0)  # every client is closed; collecting torch's modules would take seconds
        try:
            result = None
            if verb == "connect":
                address, rank, deadline_s = payload
                clients[number] = ps.connect(address, rank=rank, request_deadline_s=deadline_s)
            elif verb == "run":
                function, arguments = payload
                result = function(clients[number], **arguments)
            else:
                clients.pop(number).close(leave=payload)
            orders.send((True, result))
        except PushpullError as error:
            orders.send((False, f"{type(error).__name__}: {error}"))
        except Exception:  # noqa: BLE001 - whatever it is, the test must see it
            orders.send((False, traceback.format_exc()))


def serve_all(orders: Sequence[Connection], also: Sequence[str]) -> None:
    """The life of a process that has imported modules, and is all worker processes' parent."""
    with spared():
        for module in also:
            importlib.import_module(module)
    children = []
    for mine in orders:
        pid = os.fork()
        if pid == 0:
            try:
                for other in orders:
                    if other is not mine:
                        other.close()
                serve(mine)
            finally:
                os._exit(1)
        children.append(pid)
        mine.close()
    for pid in children:
        os.waitpid(pid, 0)


class WorkerFailed(Exception):
    """A worker's job raised; the message is what."""


class Workers:
    """The processes of a pool as workers of one cluster, ranks in order."""

    def __init__(self, pool: Pool, number: int, count: int) -> None:
        self._pool = pool
        self._number = number
        self._count = count

    def run(self, function: Callable[..., ResultT], **arguments: Any) -> list[ResultT]:
        """What `function(client, **arguments)` returns at each worker, by rank."""
        answers = self.outcomes(function, **arguments)
        _check(answers)
        return answers

    def outcomes(self, function: Callable[..., ResultT], **arguments: Any) -> list[Any]:
        """As `run`, with `WorkerFailed` in the place of what raised."""
        return self._pool.ask([("run", self._number, (function, arguments))] * self._count)


class Pool:
    """Worker processes, which may be workers of several clusters.

    Args:
        size: how many.
        also: modules that they have imported: once, and they are forks of who has.
    """

    def __init__(self, size: int, also: Sequence[str] = ()) -> None:
        context = warm_context()
        ends = [context.Pipe() for _ in range(size)]
        self._pipes: list[Connection] = [ours for ours, _ in ends]
        given = [theirs for _, theirs in ends]
        if also:
            self._processes = [context.Process(target=serve_all, args=(given, also), daemon=True)]
        else:
            self._processes = [
                context.Process(target=serve, args=(theirs,), daemon=True) for theirs in given
            ]
        for process in self._processes:
            process.start()
        for theirs in given:
            theirs.close()
        self._threads = ThreadPoolExecutor(size)
        self._numbers = itertools.count()

    @contextmanager
    def connected(
        self, address: str, count: int, *, leave: bool = True, deadline_s: float = 30.0
    ) -> Iterator[Workers]:
        """The first `count` of the processes join the cluster at `address`."""
        number = next(self._numbers)
        _check(self.ask([("connect", number, (address, r, deadline_s)) for r in range(count)]))
        try:
            yield Workers(self, number, count)
        finally:
            _check(self.ask([("close", number, leave)] * count))

    def begin_alone(self, function: Callable[..., ResultT], **arguments: Any) -> Future[ResultT]:
        """Begins `function(None, **arguments)` at the last process, which is no worker meanwhile;
        what it returns.
        """
        return self._threads.submit(self._alone, function, arguments)

    def _alone(self, function: Callable[..., ResultT], arguments: dict[str, Any]) -> ResultT:
        self._pipes[-1].send(("run", ALONE, (function, arguments)))
        answer: ResultT = _answer(self._pipes[-1])
        _check([answer])
        return answer

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

    def ask(self, orders: list[tuple[str, int, Any]]) -> list[Any]:
        """Give each process an order; their answers, `WorkerFailed` where one raised."""
        pipes = self._pipes[: len(orders)]
        for pipe, order in zip(pipes, orders, strict=True):
            pipe.send(order)
        return list(self._threads.map(_answer, pipes))


def _check(answers: list[Any]) -> None:
    for answer in answers:
        if isinstance(answer, WorkerFailed):
            raise answer


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(JOB_DEADLINE_S):
        raise TimeoutError(f"a worker did not answer within {JOB_DEADLINE_S} s")
    is_fine, result = pipe.recv()
    return result if is_fine else WorkerFailed(result)
