"""Periodic release of memory that was kept for reuse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

INTERVAL_S = 60.0
"""Longer than a step takes, since the next step reuses a step's memory."""


class Trimmed(Protocol):
    """An owner of memory for reuse; `trim` releases what was not needed since its last call."""

    def trim(self) -> None: ...


def trim_often(memory: Trimmed) -> Callable[[], None]:
    """Trim `memory` on the running loop, from now until the result is called."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def trim() -> None:
        nonlocal timer
        memory.trim()
        timer = loop.call_later(INTERVAL_S, trim)

    timer = loop.call_later(INTERVAL_S, trim)
    return lambda: timer.cancel()
