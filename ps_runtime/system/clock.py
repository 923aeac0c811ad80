"""The clock of a process: monotonic seconds that count suspended time.

A lease must expire while a laptop sleeps or a virtual machine is paused; `time.monotonic`
(CLOCK_MONOTONIC) does not count that time on Linux.
"""

from __future__ import annotations

import time
from functools import partial

now_s = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Seconds since some fixed moment; never goes back, and never compared between machines."""
