"""The one clock of a process: monotonic seconds that count suspended time.

Leases are compared with it, so a laptop that slept or a virtual machine that was paused must see
the time that passed; `time.monotonic` (CLOCK_MONOTONIC) does not count it on Linux.
"""

from __future__ import annotations

import time

_CLOCK_ID = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_s() -> float:
    """Seconds since some fixed moment; never goes back, and never compared between machines."""
    return time.clock_gettime(_CLOCK_ID)
