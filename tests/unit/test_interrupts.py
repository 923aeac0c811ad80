"""Ctrl-C, other signals, and work that must not be cut in two."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from ps_runtime.system.interrupts import uninterrupted


def test_what_has_begun_is_done_and_then_interrupted() -> None:
    done = []

    def work() -> None:
        with uninterrupted(lambda: done.append("what is left")):
            signal.raise_signal(signal.SIGINT)
            done.append("work")
        done.append("what comes behind it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["work", "what is left"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextmanager
def _handled(
    number: signal.Signals, handler: Callable[[int, FrameType | None], Any] | signal.Handlers
) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_handlers_of_other_signals_come_afterwards_too_each_of_them() -> None:
    done: list[object] = []

    def end(number: int, _: object) -> None:
        done.append(signal.Signals(number))
        raise SystemExit(number)

    def work() -> None:
        with uninterrupted(), uninterrupted():
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGTERM)
            done.append("work")

    with _handled(signal.SIGTERM, end), _handled(signal.SIGALRM, end):
        with pytest.raises(SystemExit):
            work()
        assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGALRM)] == [end, end]
    assert done == ["work", signal.SIGALRM, signal.SIGTERM]


def test_what_the_script_ignores_or_leaves_to_the_system_stays_so() -> None:
    with _handled(signal.SIGUSR1, signal.SIG_IGN), uninterrupted():
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_fails_has_its_own_error_and_leaves_nothing_behind() -> None:
    told: list[str] = []
    with pytest.raises(ZeroDivisionError), uninterrupted(lambda: told.append("interrupted")):
        raise ZeroDivisionError
    assert not told
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


def test_a_signal_at_the_beginning_leaves_every_handler_as_it_was() -> None:
    """Ctrl-C is delayed then, and the other signal not yet: its handler raises."""

    def look(frame: FrameType, event: str, called: Any) -> None:
        if (
            event == "c_call"
            and called.__name__ == "signal"
            and frame.f_locals["number"] == (signal.SIGUSR1)
        ):
            sys.setprofile(None)
            signal.raise_signal(signal.SIGUSR1)

    def end(number: int, _: object) -> None:
        raise SystemExit(number)

    with _handled(signal.SIGUSR1, end):
        sys.setprofile(look)
        try:
            with pytest.raises(SystemExit), uninterrupted():
                pytest.fail("the block began")
        finally:
            sys.setprofile(None)
        assert signal.getsignal(signal.SIGUSR1) is end
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
