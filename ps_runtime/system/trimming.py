"""Memory that is kept to be used again, and let go of when it is not needed any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

INTERVAL_S = 60.0
"""Longer than a step takes, since a step's memory is the next one's."""


class Trimmed(Protocol):
    """Keeps memory."""

    def trim(self) -> None:
        """Let go of what was not needed since the last call."""


def trim_often(memory: Trimmed) -> Callable[[], None]:
    """Let go of what is not needed, on the running loop, from now until the result is called."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def trim() -> None:
        nonlocal timer
        memory.trim()
        timer = loop.call_later(INTERVAL_S, trim)

    timer = loop.call_later(INTERVAL_S, trim)
    return lambda: timer.cancel()
