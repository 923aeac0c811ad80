"""What every measurement shares: samples of a rate, and the machine that they were taken on."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

GB = 1e9


def rate_samples(action: Callable[[], object], byte_count: int, round_count: int) -> list[float]:
    """GB/s of an action that moves `byte_count`, once for each round after an uncounted one."""
    action()
    samples = []
    for _ in range(round_count):
        began_s = time.perf_counter()
        action()
        samples.append(byte_count / (time.perf_counter() - began_s) / GB)
    return samples


def summary(samples: list[float]) -> dict[str, float]:
    """Lowest, median and highest of some samples; the median is the figure to quote."""
    return {
        "min": round(min(samples), 3),
        "median": round(statistics.median(samples), 3),
        "max": round(max(samples), 3),
    }


def environment() -> dict[str, object]:
    """The machine, the versions, and what else was running."""
    return {
        "cpu": _cpu_model(),
        "core_count": len(os.sched_getaffinity(0)),
        "load_average_1_min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("torch", "grpcio", "numpy")},
        "commit": _commit(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "not a git checkout"
