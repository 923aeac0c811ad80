"""Periodic release of memory that was kept for reuse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_S = 60.0
"""Longer than a step takes, since the next step reuses a step's memory."""


def trim_often(trim: Callable[[], None]) -> Callable[[], None]:
    """Call `trim`, which releases what was not needed since its last call, on the running loop,
    until the result is called.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def trim_again() -> None:
        nonlocal timer
        trim()
        timer = loop.call_later(INTERVAL_S, trim_again)

    timer = loop.call_later(INTERVAL_S, trim_again)
    return lambda: timer.cancel()
