"""Work that Ctrl-C must not interrupt: a step is sealed on all tables, or on none.

Nor must another signal that the script handles: its handler may raise, as Ctrl-C does. Preemptible
jobs have one of SIGTERM or SIGUSR1, time limits one of SIGALRM, torch's DataLoader one of SIGCHLD.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FrameType
from typing import Any

# `signal` takes 50 µs for what a block needs of it, to look for handlers among its constants; the
# module beneath it takes one.
_signal = import_module("_signal")

_DELAYED = tuple(
    map(
        int,
        (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGALRM,
            signal.SIGUSR1,
            signal.SIGUSR2,
            signal.SIGCHLD,
        ),
    )
)

_Handler = Callable[[int, FrameType | None], Any]


class _Delayed:
    """The handler of all signals within a block. Where a signal leaves it in force after the block,
    it does what the script's own does.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.handlers: dict[int, _Handler] = {}
        self.came: dict[int, FrameType | None] = {}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_over:
            self.handlers[number](number, frame)
        else:
            self.came.setdefault(number, frame)

    def restore(self) -> None:
        """Put the script's handlers in place again; may raise, for a signal that comes then."""
        for number, handler in self.handlers.items():
            _signal.signal(number, handler)

    def hand_on(self) -> None:
        """Call the script's handlers of the signals that came, each of them even if one raises."""
        self.is_over = True
        with contextlib.ExitStack() as calls:
            for number, frame in reversed(self.came.items()):
                calls.callback(self.handlers[number], number, frame)


@contextlib.contextmanager
def uninterrupted(interrupted: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Delays Ctrl-C, and other signals that the script handles, until the block has ended; the
    block must not wait for another process. Only the main thread is ever interrupted.
    `interrupted` is called before the handlers of what came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    delayed = _Delayed()
    try:
        for number in _DELAYED:
            handler = _signal.getsignal(number)
            if callable(handler):  # else nothing would be raised
                delayed.handlers[number] = handler
                _signal.signal(number, delayed)
        yield
    finally:
        with contextlib.ExitStack() as ends:
            ends.callback(delayed.hand_on)
            ends.callback(delayed.restore)
            if delayed.came:
                interrupted()
