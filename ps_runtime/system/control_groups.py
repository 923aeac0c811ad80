"""Limits of the control groups that this process is in, of version 2 or 1: a container has some."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
