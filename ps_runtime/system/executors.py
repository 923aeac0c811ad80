"""Work for other threads, which the caller does itself where none takes work any more.

At the end of the interpreter, before the functions of `atexit`, Python ends all executors for good.
Clients that leave there still read views, copy values and write their state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

ResultT = TypeVar("ResultT")


def submitted(threads: Executor, work: Callable[[], ResultT]) -> Future[ResultT] | None:
    """The work on a thread; None at the end of the interpreter: the caller does it."""
    try:
        return threads.submit(work)
    except RuntimeError:
        return None


async def in_thread(work: Callable[[], ResultT]) -> ResultT:
    """As `asyncio.to_thread`; at the end of the interpreter this thread does the work."""
    try:
        working = asyncio.get_running_loop().run_in_executor(None, work)
    except RuntimeError:
        return work()
    return await working
