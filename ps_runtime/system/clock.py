"""The clock of a process: monotonic seconds that count suspended time.

A lease must expire while a laptop sleeps or a virtual machine is paused; `time.monotonic`
(CLOCK_MONOTONIC) does not count that time on Linux.
"""

from __future__ import annotations

import time

_CLOCK_ID = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_s() -> float:
    """Seconds since some fixed moment; never goes back, and never compared between machines."""
    return time.clock_gettime(_CLOCK_ID)
