"""How many cores this process may use: of those of the machine what its container's limit allows.

A limit of CPU time takes no core away: the system shows all of them, torch starts a thread for
each, and the kernel stops them all when their time is used up. So threads follow the limit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from ps_runtime.system.control_groups import limit_files, text_of

THREADS_VARIABLE = "OMP_NUM_THREADS"
"""Read by torch when it is imported, and by the processes that a script starts."""

_ROOT = Path("/")


def usable_core_count(root: Path = _ROOT, core_count: int | None = None) -> int:
    """The cores that the process may run on, or as many as its limit of CPU time is worth, rounded
    up; at least 1.

    Args:
        root: of the file system, for tests.
        core_count: the cores that it may run on; None asks the system.

    Blocking: reads files of the kernel's.
    """
    if core_count is None:
        core_count = len(os.sched_getaffinity(0))
    return max(1, min([core_count, *map(math.ceil, _limits(root))]))


def follow_limit(
    environment: MutableMapping[str, str], root: Path = _ROOT, core_count: int | None = None
) -> None:
    """Have torch start no more threads than the limit of CPU time is worth, where there is one.
    What the user set stands. To be called before torch is imported.

    Args: as `usable_core_count`.
    """
    if core_count is None:
        core_count = len(os.sched_getaffinity(0))
    usable = usable_core_count(root, core_count)
    if usable < core_count:
        environment.setdefault(THREADS_VARIABLE, str(usable))


def _limits(root: Path) -> Iterator[float]:
    for file in limit_files(root, "cpu", "cpu.cfs_quota_us", "cpu.max"):
        quota, _, period = text_of(file).partition(" ")
        period = period or text_of(file.with_name("cpu.cfs_period_us"))
        if quota.isdecimal() and period.isdecimal() and int(period):  # else "max", or -1
            yield int(quota) / int(period)
