"""Background threads: training goes first when the processor, or the interpreter, is short."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_SWITCH_S = 0.001
"""Python's own interval is 5 ms for each computing thread: three of them make a turn too long."""

_NICE = 10
"""A tenth of the processor where others could use all of it, so that waiting has an end."""


def give_way() -> None:
    """Lower the calling thread's priority for good. Only Linux has priorities for threads."""
    if sys.platform == "linux":
        own = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, own, max(_NICE, os.getpriority(os.PRIO_PROCESS, own)))


def switch_often() -> None:
    """Let a thread that waits for the interpreter have it soon, however many threads compute. A
    call of an extension is not interrupted.
    """
    sys.setswitchinterval(_SWITCH_S)
