"""Ctrl-C and work that must not be cut in two."""

from __future__ import annotations

import signal
import threading

import pytest

from ps_runtime.system.interrupts import uninterrupted


def test_what_has_begun_is_done_and_then_interrupted() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("work")
        done.append("what comes behind it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["work"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_fails_has_its_own_error_and_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError), uninterrupted():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_are_never_interrupted() -> None:
    seen = []

    def work() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
