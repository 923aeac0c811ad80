"""Work that Ctrl-C must not interrupt: a step is sealed on all tables, or on none."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from importlib import import_module
from types import FrameType

# `signal` takes 50 µs for what a block needs of it, to look for handlers among its constants; the
# module beneath it takes one.
_signal = import_module("_signal")


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C until the block has ended; the block must not wait for another process. Only
    the main thread is ever interrupted.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = _signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(handler):  # nothing would be raised
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    _signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        _signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])
