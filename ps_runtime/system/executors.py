"""Work for other threads, which the caller does itself where none takes work any more; threads that
keep no process from ending.

At the end of the interpreter, before the functions of `atexit`, Python ends all executors for good.
Clients that leave there still read views, copy values and write their state. An executor also
refuses work where the system gives it no further thread, but keeps it in its queue: a thread that
it has may take it all the same. So either the thread or the caller does the work, never both.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from typing import Any, Generic, ParamSpec, TypeVar

ResultT = TypeVar("ResultT")
ArgumentsP = ParamSpec("ArgumentsP")


class _Once(Generic[ResultT]):
    """Work that one thread does; `result` is cancelled where the caller does it."""

    def __init__(self, work: Callable[[], ResultT]) -> None:
        self._work = work
        self.result: Future[ResultT] = Future()

    def __call__(self) -> ResultT:
        if not self.result.set_running_or_notify_cancel():
            raise CancelledError
        try:
            made = self._work()
        except BaseException as failure:
            self.result.set_exception(failure)
            raise
        self.result.set_result(made)
        return made


def submitted(threads: Executor, work: Callable[[], ResultT]) -> Future[ResultT] | None:
    """The work on a thread; None where the executor refuses it: the caller does it."""
    once = _Once(work)
    try:
        return threads.submit(once)
    except RuntimeError:
        return None if once.result.cancel() else once.result


async def in_thread(work: Callable[[], ResultT]) -> ResultT:
    """As `asyncio.to_thread`; where the executor refuses the work this thread does it."""
    once = _Once(work)
    try:
        working = asyncio.get_running_loop().run_in_executor(None, once)
    except RuntimeError:
        if once.result.cancel():
            return work()
        working = asyncio.wrap_future(once.result)
    return await working


async def in_daemon_thread(work: Callable[[], ResultT], name: str) -> ResultT:
    """As `asyncio.to_thread`, for work that may wait for ever: it keeps no process from ending."""
    threads = DaemonThreads(1, name, _nothing)
    working = threads.submit(work)
    threads.shutdown(wait=False)
    return await asyncio.wrap_future(working)


def _nothing() -> None:
    pass


class DaemonThreads(Executor):
    """Threads whose work may wait for ever, and keeps no process from ending. Those of
    `ThreadPoolExecutor` are waited for by the interpreter.

    Args:
        begin: called in each thread before its first work.

    Attributes:
        ended: done once the threads were shut down and have done all their work.
    """

    def __init__(self, count: int, name: str, begin: Callable[[], None]) -> None:
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # who gives up a wait for it cancels nothing
        self._begin, self._count = begin, count
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_shut = False
        for number in range(count):
            threading.Thread(target=self._run, name=f"{name}_{number}", daemon=True).start()

    def submit(
        self,
        work: Callable[ArgumentsP, ResultT],
        /,
        *args: ArgumentsP.args,
        **told: ArgumentsP.kwargs,
    ) -> Future[ResultT]:
        """Let a thread do the work, after all that came before; RuntimeError after `shutdown`."""
        future: Future[ResultT] = Future()

        def do() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                made = work(*args, **told)
            except BaseException as failure:  # noqa: BLE001 - the future raises it
                future.set_exception(failure)
            else:
                future.set_result(made)

        with self._lock:
            if self._is_shut:
                raise RuntimeError("these threads were shut down")
            self._works.put(do)
        return future

    def shutdown(self, wait: bool = True, **options: Any) -> None:
        """Take no more work. Blocking with `wait`: until all is done. Idempotent."""
        del options
        with self._lock:
            if not self._is_shut:
                self._is_shut = True
                for _ in range(self._count):
                    self._works.put(None)
        if wait:
            self.ended.result()

    def _run(self) -> None:
        self._begin()
        while (work := self._works.get()) is not None:
            work()
            del work  # and what it holds, while this thread waits for the next one
        with self._lock:
            self._count -= 1
            is_last = not self._count
        if is_last:
            self.ended.set_result(None)
