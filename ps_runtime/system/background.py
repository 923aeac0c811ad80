"""Threads whose work can wait: what trains goes first when the processor is short, or the
interpreter.

What it deliberately does not do: hold such a thread back when there is time for all.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_SWITCH_S = 0.001
"""Python's own is 5 ms, for each thread that computes: three of them make a turn too long."""

_NICE = 10
"""A tenth of the processor where everybody else could use all of it: waiting has an end."""


def give_way() -> None:
    """From here on the calling thread gives way to others; it cannot be taken back.

    Linux has priorities for threads; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        own = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, own, max(_NICE, os.getpriority(os.PRIO_PROCESS, own)))


def switch_often() -> None:
    """Who waits for the interpreter in this process, as its event loop does, has it soon, however
    many threads compute. It is not taken from a thread within one call of an extension.
    """
    sys.setswitchinterval(_SWITCH_S)
