"""Work for other threads, which the caller does itself where none takes work any more.

At the end of the interpreter, before the functions of `atexit`, Python ends all executors for good.
Clients that leave there still read views, copy values and write their state. An executor also
refuses work where the system gives it no further thread, but keeps it in its queue: a thread that
it has may take it all the same. So either the thread or the caller does the work, never both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


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
