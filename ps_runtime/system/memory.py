"""How much memory this process may come to have, and with whom it shares it.

The least of what the machine has and what the control groups allow that the process is in, of
version 2 or 1: a container's limit is one of these.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

from ps_runtime.system.control_groups import limit_files, text_of

_ROOT = Path("/")


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
