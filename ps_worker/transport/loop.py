"""The background thread: one per process, with the event loop of all gRPC calls.

All clients of the process share it, because gRPC's asyncio layer wants one loop per process. It is
a daemon thread, stopped when the interpreter exits, after the clients have closed.
"""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from ps_core.errors import InvalidConfig
from ps_runtime.grpc.channels import new_event_loop, tune_allocator
from ps_runtime.observe import logs
from ps_runtime.system.future_waits import wait_until_ended
from ps_runtime.system.interrupts import uninterrupted

ResultT = TypeVar("ResultT")
ItemT = TypeVar("ItemT")

Ends = list[ResultT | BaseException]
"""The result of each work, or its error."""

_STOP_DEADLINE_S = 5.0


class _Collected(threading.local):
    """A thread's calls under `BackgroundLoop.together`; None outside."""

    calls: list[Callable[[], object]] | None = None


class Together:
    """See `BackgroundLoop.together`; one within another does nothing."""

    def __init__(self, collected: _Collected, loop: asyncio.AbstractEventLoop) -> None:
        self._collected = collected
        self._loop = loop
        self._calls: list[Callable[[], object]] | None = None

    def __enter__(self) -> None:
        if self._collected.calls is None:
            self._collected.calls = self._calls = []

    def __exit__(self, *_: object) -> None:
        if self._calls is not None:
            self._collected.calls = None
            self._loop.call_soon_threadsafe(_call_all, self._calls)


class _Work(Future[ResultT]):
    """The end of a coroutine on the loop."""

    task: asyncio.Task[None] | None = None


class BackgroundLoop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = new_event_loop()
        self._collected = _Collected()
        self._thread = threading.Thread(target=self._run, name="pushpull-client", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """True if the caller is on the background thread, which may not wait."""
        return threading.current_thread() is self._thread

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call `function` on the loop, soon; calls keep their order."""
        call = partial(function, *arguments)
        if self._collected.calls is None:
            self._loop.call_soon_threadsafe(call)
        else:
            self._collected.calls.append(call)

    def start(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Run a coroutine on the loop; cancelling the future cancels it."""
        future: _Work[ResultT] = _Work()
        self.post(self._begin, work, future)
        return future

    def end(self, future: Future[Any], timeout_s: float) -> None:
        """Cancel the work of a future that `start` has given, and wait until it has ended, at most
        `timeout_s`.
        """
        ended: Future[None] = Future()
        with uninterrupted():
            future.cancel()
            self.post(_tell_end, future, ended)
            self.hand_over()
        wait_until_ended([ended], timeout_s)

    def together(self) -> Together:
        """Collect this thread's `post` and `start` calls, and run them in one turn of the loop,
        which wakes the loop's thread once, and whose entries can share a message.
        """
        return Together(self._collected, self._loop)

    def hand_over(self) -> None:
        """Run this thread's calls that `together` has collected so far, before it waits."""
        if self._collected.calls:
            calls, self._collected.calls[:] = self._collected.calls.copy(), ()
            self._loop.call_soon_threadsafe(_call_all, calls)

    def _begin(self, work: Coroutine[Any, Any, ResultT], future: _Work[ResultT]) -> None:
        future.task = task = self._loop.create_task(_carry(work, future))

        def given_up(future: Future[ResultT]) -> None:
            if future.cancelled():
                self._loop.call_soon_threadsafe(task.cancel)

        future.add_done_callback(given_up)

    def stop(self) -> None:
        """End the thread; blocks a few seconds at most. Idempotent."""
        if self.pid == os.getpid() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_STOP_DEADLINE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


async def _carry(work: Coroutine[Any, Any, ResultT], future: Future[ResultT]) -> None:
    """Do the work, and complete the future in the same turn of the loop."""
    try:
        result = await work
    except asyncio.CancelledError:
        future.cancel()
        future.set_running_or_notify_cancel()
        raise
    except BaseException as failure:
        if future.set_running_or_notify_cancel():
            future.set_exception(failure)
        if not isinstance(failure, Exception):
            raise
    else:
        if future.set_running_or_notify_cancel():
            future.set_result(result)


async def ended_together(
    work: Callable[[ItemT], Coroutine[Any, Any, ResultT]], items: Sequence[ItemT]
) -> Ends[ResultT]:
    """Do the work of each item at once, until all are done or one has failed; then the others are
    cancelled. Returns once none goes on any more.
    """
    tasks = [asyncio.create_task(work(item)) for item in items]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    return ends


def _tell_end(work: Future[Any], ended: Future[None]) -> None:
    """Complete `ended` when the task of `work` has ended."""
    if isinstance(work, _Work) and work.task is not None:
        work.task.add_done_callback(lambda _: ended.set_result(None))
    else:
        ended.set_result(None)


def _call_all(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()


_lock = threading.Lock()
_background: BackgroundLoop | None = None


def background() -> BackgroundLoop:
    """The process's background loop; started on first use. InvalidConfig in a child that a process
    with a client forked, which therefore cannot use gRPC.
    """
    global _background
    with _lock:
        if _background is None:
            tune_allocator()
            # Garbage of this process is never collected in a forked child: gRPC's destructors would
            # wait there for threads that only this process has.
            os.register_at_fork(after_in_child=gc.freeze)
            _background = BackgroundLoop()
        elif _background.pid != os.getpid():
            raise InvalidConfig(
                f"process {os.getpid()} was forked from process {_background.pid}, which has a "
                "pushpull client, and cannot connect; start it by 'spawn' instead of 'fork'"
            )
        return _background


def stop_background() -> None:
    if _background is not None:
        _background.stop()


class CallbackThread:
    """Runs the callbacks of pulls, one after the other, so that none can block the loop."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # The loop starts `_thread`, the caller's thread ends it.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], None]) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="pushpull-callbacks", daemon=True)
                thread.start()
                self._thread = thread
        self._queue.put(function)

    def stop(self) -> None:
        """Wait for the callbacks, and end the thread; returns at once if one of them calls it."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join(_STOP_DEADLINE_S)

    def _run(self) -> None:
        while (function := self._queue.get()) is not None:
            try:
                function()
            except BaseException as failure:  # noqa: BLE001 - SystemExit, too: others come behind it
                logs.exception("pull_callback_failed", failure)
