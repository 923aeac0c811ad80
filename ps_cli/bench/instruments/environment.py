"""The machine of a measurement, and its load."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ps_runtime.system.capacity import usable_core_count

QUIET_LOAD = 0.5
"""Above this 1-minute load average, other work shares the machine."""

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "grpcio", "protobuf", "numpy", "uvloop")


def environment() -> dict[str, Any]:
    """The machine, the versions, and the load before the first measurement of this process."""
    load = _load_at_start()
    return {
        "cpu": _cpu_model(),
        "core_count": usable_core_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
        "load_average": round(load, 2),
        "warnings": _warnings(load),
    }


@cache
def _load_at_start() -> float:
    """Read once: later, the measurements themselves are the load."""
    return os.getloadavg()[0]


def _warnings(load: float) -> list[str]:
    if load <= QUIET_LOAD:
        return []
    message = (
        f"the load average was {load:.2f} on {usable_core_count()} cores at the start; expected at "
        f"most {QUIET_LOAD}: other work shares this machine, so trust the ratios more than the "
        "figures"
    )
    return [message]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        run = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown: git is not installed"
    return run.stdout.strip() or "unknown: not a git checkout"
