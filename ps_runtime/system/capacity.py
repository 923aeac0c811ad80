"""The cores that this process may use, and the memory that it may come to have: what the machine
has, or less where a control group that it is in, of version 2 or 1, has a limit. A container's is
one of these.

A limit of CPU time takes no core away: the system shows all of them, torch starts a thread for
each, and the kernel stops them all when their time is used up. So threads follow the limit.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, MutableMapping
from pathlib import Path

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


_CGROUPS = "sys/fs/cgroup"


def limit_files(root: Path, controller: str, version_1: str, version_2: str) -> Iterator[Path]:
    """The files of a limit: of each group that the process is in, and of those above them.

    Args:
        root: of the file system.
        controller: the limit's, as version 1 names it.
        version_1: the file's name where groups are of version 1.
        version_2: the file's name where they are of version 2.

    Blocking: reads a file of the kernel's.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            top, file = root / _CGROUPS, version_2
        elif controller in controllers.split(","):
            top, file = root / _CGROUPS / controller, version_1
        else:
            continue
        parts = [part for part in name.split("/") if part not in {"", ".."}]
        for depth in range(len(parts) + 1):
            yield Path(top, *parts[:depth], file)


def text_of(file: Path) -> str:
    """What a file of the kernel's says; empty if it is not there."""
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def memory_bytes(root: Path = _ROOT) -> int:
    """What the process may have, in bytes; 0: the system does not say.

    Args:
        root: of the file system, for tests.

    Blocking: reads files of the kernel's.
    """
    found = [*_machine(root), *_groups(root)]
    return min(found, default=0)


def memory_pool(root: Path = _ROOT) -> str:
    """Names the memory: processes of one machine, or of one container, share it."""
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{boot}/{socket.gethostname()}"[:128]


def _machine(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            yield int(rest.split()[0]) * 1024


def _groups(root: Path) -> Iterator[int]:
    """Limits, but for those that mean none: "max", or more than any machine has."""
    for file in limit_files(root, "memory", "memory.limit_in_bytes", "memory.max"):
        text = text_of(file)
        if text.isdecimal() and int(text) < 1 << 60:
            yield int(text)
