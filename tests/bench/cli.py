"""`pushpull bench` as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.joining import SECRET

ROOT = Path(__file__).parents[2]
RUN_TIMEOUT_S = 170


def bench_environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PUSHPULL_")}
    kept["PUSHPULL_JOIN_SECRET"] = SECRET
    kept["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "protos")))
    return kept


def run_cli(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ps_cli", "bench", *arguments],
        cwd=cwd,
        env=bench_environment(),
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
