"""Waiting in a loop for what other threads do."""

from __future__ import annotations

import asyncio
import contextlib

from ps_core.sliced_work import ResultT, Waiting, Work


async def arrival(waiting: Waiting) -> None:
    """Wait until another thread has done it."""
    loop, come = asyncio.get_running_loop(), asyncio.Event()

    def done(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(come.set)

    waiting.add_done_callback(done)
    await come.wait()


async def driven(work: Work[ResultT]) -> ResultT:
    """Do a work that lets others in only while it waits for another thread."""
    while True:
        try:
            waiting: Waiting | None = next(work)
        except StopIteration as end:
            result: ResultT = end.value
            return result
        if waiting is not None and not waiting.done():
            await arrival(waiting)
