"""`pushpull bench link`, between network namespaces that it makes as root."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.bench.cli import run_cli


def namespaces() -> str:
    command = ["ip", "netns", "list"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.thorough
@pytest.mark.timeout(180)  # it measures seven codecs
def test_fewer_bytes_travel_over_a_link(tmp_path: Path) -> None:
    """Whoever is not root is told so."""
    run = run_cli(
        "link", "--quick", "--size-mb=1", "--rate-mbit=40", "--json=link.json", cwd=tmp_path
    )
    if os.geteuid() != 0:
        assert run.returncode == 2
        assert "this user is not root; run the benchmark as root" in " ".join(run.stderr.split())
        return
    assert run.returncode == 0, run.stderr
    document = json.loads((tmp_path / "link.json").read_text())
    waiting, overlapping = document["compared"]
    assert (waiting["overlap_pull"], overlapping["overlap_pull"]) == (False, True)
    assert waiting["step_s"] > waiting["compute_s"] > 0
    assert overlapping["step_over_waiting"] > 1.02
    rows = document["rows"]
    codecs = ["none", "bf16", "fp16", "int8", "sign", "topk", "lowrank"]
    assert [row["codec"] for row in rows] == codecs
    assert all(0 < row["of_link"] <= 1 for row in rows), "no round is faster than the link"
    whole, half, _, quarter, signs, few, factors = rows
    for row, bytes_over in (
        (half, 0.5),
        (quarter, 0.254),
        (signs, 0.268),
        (few, 0.26),
        (factors, 0.26),
    ):
        assert abs(row["bytes_over_none"] - bytes_over) < 0.03
        # How much less depends on the machine: at a memcpy of 1 GB/s encoding takes as long as this
        # link. PERFORMANCE has the figures of a quiet one.
        assert row["round_s"] > 0
    assert whole["pushed_bytes"] > 2**20
    assert "pushpull-" not in namespaces(), "they are removed"
