"""The cores, the memory and the open files that this process may use.

Cores and memory are the machine's, or fewer where a control group of the process, of version 2 or
1, has a limit. A container is such a group.

A limit of CPU time takes no core away: the system shows all of them, torch starts a thread for
each, and the kernel stops them all when their time is used up. So threads follow the limit.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import socket
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from ps_core import limits

THREADS_VARIABLE = "OMP_NUM_THREADS"
"""The variable that torch reads at its import; processes that a script starts inherit it."""

_ROOT = Path("/")


def usable_core_count(root: Path = _ROOT, core_count: int | None = None) -> int:
    """The cores that the process may run on, or those that its limit of CPU time is worth, rounded
    up, if they are fewer; at least 1. Tests give `root`, the file system's, and `core_count`.

    Blocking: reads files of the kernel's.
    """
    if core_count is None:
        core_count = len(os.sched_getaffinity(0))
    return max(1, min([core_count, *map(math.ceil, _limits(root))]))


def follow_limit(
    environment: MutableMapping[str, str], root: Path = _ROOT, core_count: int | None = None
) -> None:
    """Limit torch's threads to the CPU limit, before its import; a user's value stays."""
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


def limit_files(root: Path, controller: str, version_1: str, version_2: str) -> Iterator[Path]:
    """The files of a limit, for each group of the process and for each group above them: of the
    `controller` in version 1, each version with its own name. Blocking: reads the kernel's files.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:
            top, file = root / "sys/fs/cgroup", version_2
        elif controller in controllers.split(","):
            top, file = root / "sys/fs/cgroup" / controller, version_1
        else:
            continue
        parts = [part for part in name.split("/") if part not in {"", ".."}]
        for depth in range(len(parts) + 1):
            yield Path(top, *parts[:depth], file)


def text_of(file: Path) -> str:
    """The text of a file of the kernel's; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def memory_bytes(root: Path = _ROOT) -> int:
    """The memory that the process may use; 0: the system does not say. Blocking: as above."""
    return min([*_machine(root), *_groups(root)], default=0)


def table_bytes(root: Path = _ROOT) -> int:
    """The memory that tables may take in a server's process; 0: the system does not say. Blocking:
    as above.
    """
    usable = memory_bytes(root)
    if not usable:
        return 0
    return max(1, int((usable - limits.SERVER_PROCESS_BYTES) * limits.TABLE_MEMORY_SHARE))


def available_bytes(root: Path = _ROOT) -> int:
    """The memory that is left to the process and others; below 0: the system does not say. Memory
    that only caches files counts as left. Blocking: as above.
    """
    left = [*_machine(root, "MemAvailable"), *_left_in_groups(root)]
    return max(0, min(left)) if left else -1


def machine_name(root: Path = _ROOT) -> str:
    """A name for the machine, the same in all of its containers. Blocking: reads a file."""
    return text_of(root / "proc/sys/kernel/random/boot_id") or socket.gethostname()


def memory_pool(root: Path = _ROOT) -> str:
    """A name for the memory that processes share: the machine's, or the container's where a group
    has a limit. Each container has a host name, with a limit or without. Blocking: as above.
    """
    machine = min(_machine(root), default=0)
    is_limited = any(not machine or limit < machine for limit in _groups(root))
    name = machine_name(root)
    return (f"{name}/{socket.gethostname()}" if is_limited else name)[:128]


def _machine(root: Path, wanted: str = "MemTotal") -> Iterator[int]:
    for line in text_of(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == wanted:
            yield int(rest.split()[0]) * 1024


def _groups(root: Path) -> Iterator[int]:
    for _, limit in _limited(root):
        yield limit


def _left_in_groups(root: Path) -> Iterator[int]:
    for file, limit in _limited(root):
        used = text_of(file.with_name("memory.current")) or text_of(
            file.with_name("memory.usage_in_bytes")
        )
        if used.isdecimal():
            yield limit - int(used) + _cached(text_of(file.with_name("memory.stat")))


def _cached(statistics: str) -> int:
    """Bytes of a group that cache files and are not in use; both versions name them so."""
    for line in statistics.splitlines():
        name, _, count = line.partition(" ")
        if name == "inactive_file" and count.isdecimal():
            return int(count)
    return 0


def _limited(root: Path) -> Iterator[tuple[Path, int]]:
    """Limits of groups, with their files; "max", or more than any machine has, is none."""
    for file in limit_files(root, "memory", "memory.limit_in_bytes", "memory.max"):
        text = text_of(file)
        if text.isdecimal() and int(text) < 1 << 60:
            yield file, int(text)


def allow_open_files() -> int:
    """Have as many open files and connections as the system allows; returns their number. A shell
    gives 1,024 of them, as for programs that wait with `select`.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # it allows fewer than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
