"""Work that Ctrl-C must not interrupt: a step is sealed on all tables, or on none.

Nor must another signal that the script handles: its handler may raise, as Ctrl-C does. Preemptible
jobs have one of SIGTERM or SIGUSR1, time limits one of SIGALRM, torch's DataLoader one of SIGCHLD.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any

# `signal` takes 50 µs for what a block needs of it, to look for handlers among its constants; the
# module beneath it takes one.
_signal = import_module("_signal")

_DELAYED = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD")
)

_Handler = Callable[[int, FrameType | None], Any]


class uninterrupted:  # noqa: N801 - it is used as a function, thousands of times a second
    """Delays Ctrl-C, and other signals that the script handles, until the block has ended; the
    block must not wait for another process. Only the main thread is ever interrupted.

    Args:
        interrupted: called before the handlers of what came.
    """

    __slots__ = ("_came", "_handlers", "_interrupted", "_is_over")

    def __init__(self, interrupted: Callable[[], object] | None = None) -> None:
        self._interrupted = interrupted
        self._is_over = False
        self._handlers: dict[int, _Handler] = {}
        self._came: dict[int, FrameType | None] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _DELAYED:
                handler = _signal.getsignal(number)
                if callable(handler):  # else nothing would be raised
                    self._handlers[number] = handler
                    _signal.signal(number, self._delay)
        except BaseException:  # a signal that is not delayed yet
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            if self._came and self._interrupted is not None:
                self._interrupted()
        finally:
            try:
                for number, handler in self._handlers.items():
                    _signal.signal(number, handler)  # may raise, for one that comes then
            finally:
                self._is_over = True
                if self._came:
                    self._hand_on()

    def _delay(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:  # a signal has left it in force after the block
            self._handlers[number](number, frame)
        else:
            self._came.setdefault(number, frame)

    def _hand_on(self) -> None:
        """Call the script's handlers of the signals that came, each of them even if one raises."""
        with contextlib.ExitStack() as calls:
            for number, frame in reversed(self._came.items()):
                calls.callback(self._handlers[number], number, frame)
