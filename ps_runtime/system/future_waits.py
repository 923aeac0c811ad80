"""Blocking waits of a thread for futures, which a signal interrupts at any moment.

Python sees a signal when its main thread next runs Python code. One that arrives just before a wait
begins, while the thread hands over the interpreter's lock, does not interrupt the wait: on a busy
machine one SIGTERM or Ctrl-C in ten. So no wait here lasts longer than `LOOK_S` at a time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from ps_runtime.system.clock import now_s
from ps_runtime.system.interrupts import uninterrupted

ResultT = TypeVar("ResultT")

LOOK_S = 0.25
"""The longest time for which a signal that came just before a wait stays unseen."""


def wait_until_ended(futures: Sequence[Future[Any]], timeout_s: float) -> None:
    """Wait until all are done or the first has failed, at most `timeout_s`; a signal interrupts it.
    Takes fewer calls than `concurrent.futures.wait`, which a small `push_pull` would feel.
    """
    done_counts = itertools.count(1)
    ended = threading.Lock()
    ended.acquire()

    def note(future: Future[Any]) -> None:
        is_last = next(done_counts) == len(futures)
        if is_last or future.cancelled() or future.exception() is not None:
            try:  # noqa: SIM105 - `suppress` takes three calls
                ended.release()
            except RuntimeError:  # a failure has ended the wait before
                pass

    with uninterrupted():  # else Ctrl-C could leave a future locked, for good
        for future in futures:
            future.add_done_callback(note)
    if not futures or ended.acquire(timeout=min(timeout_s, LOOK_S)):
        return
    end_s = now_s() + timeout_s - LOOK_S
    while (left_s := end_s - now_s()) > 0.0 and not ended.acquire(timeout=min(left_s, LOOK_S)):
        pass


def is_done(future: Future[Any]) -> bool:
    """As `Future.done`, for a script that asks again and again until Ctrl-C."""
    with uninterrupted():
        return future.done()


def tell_when_done(future: Future[Any], tell: Callable[[Any], object]) -> None:
    """As `Future.add_done_callback`, in a thread that Ctrl-C may come to."""
    with uninterrupted():
        future.add_done_callback(tell)


def result_of(future: Future[ResultT], timeout_s: float) -> ResultT:
    """The future's result; a signal interrupts the wait.

    Blocking: until it is done, at most `timeout_s`.

    Raises:
        TimeoutError: it was not done in time.
        Exception: the future's own.
    """
    wait_until_ended([future], timeout_s)
    return future.result(0.0)
