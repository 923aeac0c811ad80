"""`ps_cli/bench/quality.py` from end to end, on pictures that a child could tell apart."""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ps_cli.bench.quality import SINGLE
from tests.integration.command_line import ROOT, environment

KINDS = 10
RUN_DEADLINE_S = 100.0

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Where the script looks for pictures: one row of each is white, and says what it is."""
    folder = tmp_path / "pushpull" / "fashion-mnist"
    folder.mkdir(parents=True)
    for part, count in (("train", 480), ("t10k", 100)):
        labels = torch.arange(count, dtype=torch.uint8) % KINDS
        pixels = torch.zeros(count, 28, 28, dtype=torch.uint8)
        pixels[torch.arange(count), 2 * labels.long() + 4] = 255
        for name, values in ((f"{part}-images-idx3", pixels), (f"{part}-labels-idx1", labels)):
            header = bytes((0, 0, 8, values.dim())) + struct.pack(
                f">{values.dim()}I", *values.shape
            )
            content = gzip.compress(header + values.numpy().tobytes())
            (folder / f"{name}-ubyte.gz").write_bytes(content)
    return tmp_path


def test_a_setting_is_judged_beside_one_process(cache: Path, tmp_path: Path) -> None:
    report = tmp_path / "quality.json"
    command = [
        sys.executable, "-m", "ps_cli.bench.quality", "--modes", "ssp:2", "--rates", "0.01",
        "--seeds", "3", "--epochs", "2", "--workers", "2", "--batch-size", "32",
        "--hold-out", "160", "--report", str(report),
    ]  # fmt: skip
    found = subprocess.run(
        command, cwd=ROOT, env={**environment(), "XDG_CACHE_HOME": str(cache)},
        capture_output=True, text=True, timeout=RUN_DEADLINE_S, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    single, ssp = json.loads(report.read_text(encoding="utf-8"))
    assert (single["mode"], single["points"]) == (SINGLE, 0.0)
    assert ssp["mode"] == "ssp:2"
    for row in (single, ssp):
        assert row["rate"] == 0.01
        assert row["tests"] == [row["median"]]
        assert row["median"] > 2 / KINDS, "it has learned, so the pictures were these"
        assert row["validation"].keys() == {"0.01"}
        assert row["validation"]["0.01"] > 2 / KINDS
    assert ssp["points"] == pytest.approx(100 * (ssp["median"] - single["median"]))
    first, second = found.stdout.splitlines()
    assert first.startswith("one process: ")
    assert second.startswith("ssp:2: ")
