"""Ctrl-C that comes in the midst of a function."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FrameType

import pytest


@contextmanager
def _ctrl_c_when(
    event: str, is_there: Callable[[CodeType], bool], number: signal.Signals = signal.SIGINT
) -> Iterator[None]:
    """Ctrl-C comes at this event of a function of this thread."""

    def look(frame: FrameType, found: str, _: object) -> None:
        if found == event and is_there(frame.f_code):
            sys.setprofile(None)
            signal.raise_signal(number)

    sys.setprofile(look)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sys.setprofile(None)


def ctrl_c_after(
    function: str, number: signal.Signals = signal.SIGINT
) -> AbstractContextManager[None]:
    """Ctrl-C comes when this thread returns from a function of that name; or another signal, whose
    handler raises KeyboardInterrupt, too.
    """
    return _ctrl_c_when("return", lambda code: code.co_name == function, number)


def ctrl_c_in(function: str, file: str) -> AbstractContextManager[None]:
    """Ctrl-C comes when this thread enters a function of that name in that file."""
    return _ctrl_c_when(
        "call", lambda code: code.co_name == function and code.co_filename.endswith(file)
    )
