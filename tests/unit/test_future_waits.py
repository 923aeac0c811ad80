"""Waits for futures: what ends them, and that a signal does at any moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from ps_runtime.system.clock import now_s
from ps_runtime.system.future_waits import LOOK_S, result_of, wait_until_ended

TIMEOUT_S = 30.0


class Stopped(BaseException):
    """The script was told to stop."""


@pytest.fixture
def stops_on_signal() -> Iterator[None]:
    def stop(_number: int, _frame: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGUSR1, stop)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("stops_on_signal")
def test_a_signal_that_does_not_wake_the_wait_is_seen_all_the_same() -> None:
    # Sent to another thread, it wakes the waiting one as little as one that came just before.
    sent_by_itself = threading.Timer(
        0.05, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    )
    never: Future[None] = Future()
    sent_by_itself.start()
    with pytest.raises(Stopped):
        result_of(never, TIMEOUT_S)
    sent_by_itself.join()


def test_a_wait_ends_when_all_are_done_or_one_has_failed() -> None:
    first: Future[int] = Future()
    second: Future[int] = Future()
    first.set_result(1)
    threading.Timer(LOOK_S * 1.2, second.set_result, [2]).start()
    wait_until_ended([first, second], TIMEOUT_S)
    assert (first.result(0), second.result(0)) == (1, 2)
    failed: Future[int] = Future()
    threading.Timer(0.01, failed.set_exception, [ValueError("on purpose")]).start()
    wait_until_ended([Future(), failed], TIMEOUT_S)
    with pytest.raises(ValueError, match="on purpose"):
        result_of(failed, TIMEOUT_S)


def test_a_wait_ends_when_one_is_cancelled() -> None:
    cancelled: Future[None] = Future()
    threading.Timer(0.01, cancelled.cancel).start()
    begun_s = now_s()
    wait_until_ended([Future(), cancelled], TIMEOUT_S)
    assert now_s() - begun_s < TIMEOUT_S


def test_a_wait_ends_in_time() -> None:
    for timeout_s in (0.0, 0.01, LOOK_S * 1.1):
        with pytest.raises(TimeoutError):
            result_of(Future(), timeout_s)
    wait_until_ended([], TIMEOUT_S)
