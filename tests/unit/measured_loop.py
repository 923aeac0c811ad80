"""An event loop that measures its turns by the processor time that they take."""

from __future__ import annotations

import asyncio
import gc
import selectors
import time
from collections.abc import Coroutine
from typing import Any


class _Meter(selectors.DefaultSelector):
    """A turn is from when the loop has looked at its sockets until it looks again."""

    def __init__(self) -> None:
        super().__init__()
        self.turns_s: list[float] = []
        self._began_s: float | None = None

    def select(self, *wait: Any, **named: Any) -> list[Any]:
        """As the loop calls it, between two turns."""
        if self._began_s is not None:
            self.turns_s.append(time.thread_time() - self._began_s)
        found = super().select(*wait, **named)
        self._began_s = time.thread_time()
        return found


def turns_of(main: Coroutine[Any, Any, None]) -> list[float]:
    """Run `main` on a loop of its own: the seconds of processor time of each turn, longest first.

    Time in which another process had the processor does not count, so that a machine that is busy
    changes nothing. What the process had before is none of the collector's business.
    """
    meter = _Meter()
    gc.collect()
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(meter)) as runner:
            runner.run(main)
    finally:
        gc.unfreeze()
    return sorted(meter.turns_s, reverse=True)
