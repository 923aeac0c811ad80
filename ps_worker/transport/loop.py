"""The background thread: one per process, with the event loop that everything gRPC runs on.

It is shared by all clients of the process, since gRPC's asyncio layer wants one loop per process.
It is a daemon thread, stopped when the interpreter exits, after the clients have closed.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from ps_core.errors import InvalidConfig
from ps_runtime.grpc.channels import new_event_loop, tune_allocator
from ps_runtime.observe import logs

ResultT = TypeVar("ResultT")

_STOP_DEADLINE_S = 5.0


class _Held(threading.local):
    """What a thread collects under `BackgroundLoop.together`; None outside."""

    calls: list[Callable[[], object]] | None = None


class Together:
    """See `BackgroundLoop.together`; one within another does nothing."""

    def __init__(self, held: _Held, loop: asyncio.AbstractEventLoop) -> None:
        self._held = held
        self._loop = loop
        self._calls: list[Callable[[], object]] | None = None

    def __enter__(self) -> None:
        if self._held.calls is None:
            self._held.calls = self._calls = []

    def __exit__(self, *_: object) -> None:
        if self._calls is not None:
            self._held.calls = None
            self._loop.call_soon_threadsafe(_call_all, self._calls)


class BackgroundLoop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = new_event_loop()
        self._held = _Held()
        self._thread = threading.Thread(target=self._run, name="pushpull-client", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is on the background thread, where nothing may wait."""
        return threading.current_thread() is self._thread

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call `function` on the loop, soon; in the order of the calls of `post`."""
        call = partial(function, *arguments)
        if self._held.calls is None:
            self._loop.call_soon_threadsafe(call)
        else:
            self._held.calls.append(call)

    def start(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Run a coroutine on the loop; the future has its result, and cancels it if cancelled."""
        future: Future[ResultT] = Future()
        self.post(self._begin, work, future)
        return future

    def together(self) -> Together:
        """What this thread posts and starts meanwhile happens in one turn of the loop, afterwards.

        One turn is one wake-up of the loop's thread, and what it sends can share a message.
        """
        return Together(self._held, self._loop)

    def _begin(self, work: Coroutine[Any, Any, ResultT], future: Future[ResultT]) -> None:
        task = self._loop.create_task(_carry(work, future))

        def given_up(future: Future[ResultT]) -> None:
            if future.cancelled():
                self._loop.call_soon_threadsafe(task.cancel)

        future.add_done_callback(given_up)

    def stop(self) -> None:
        """End the thread. Idempotent.

        Blocking: until it ended, a few seconds at most.
        """
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
    """Do the work, and say how it ended, without another turn of the loop."""
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


def _call_all(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()


_lock = threading.Lock()
_background: BackgroundLoop | None = None


def background() -> BackgroundLoop:
    """The process's background loop; started on first use.

    Raises:
        InvalidConfig: this process was forked from one that has a client: gRPC cannot be used here.
    """
    global _background
    with _lock:
        if _background is None:
            tune_allocator()
            _background = BackgroundLoop()
        elif _background.pid != os.getpid():
            raise InvalidConfig(
                f"process {os.getpid()} was forked from process {_background.pid}, which has a "
                "pushpull client, and cannot connect; start it by 'spawn' instead of 'fork'"
            )
        return _background


def stop_background() -> None:
    """End the background thread, as the process ends. Its clients must have been closed.

    Blocking: as `BackgroundLoop.stop`.
    """
    if _background is not None:
        _background.stop()


class CallbackThread:
    """Runs the callbacks of pulls, one after the other, so that none can hold up the loop."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = (
            threading.Lock()
        )  # of `_thread`: the loop starts it, the caller's thread ends it
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` soon; what it raises is logged."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="pushpull-callbacks", daemon=True)
                thread.start()
                self._thread = thread
        self._queue.put(function)

    def stop(self) -> None:
        """End the thread after the callbacks that were handed over.

        Blocking: until they have run; not when called by one of them.
        """
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
            except Exception as failure:  # noqa: BLE001 - the thread must outlive a bad callback
                logs.exception("pull_callback_failed", failure)
