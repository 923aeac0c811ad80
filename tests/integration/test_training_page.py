"""The script on docs/guides/TRAINING.md runs, and ends as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.integration.command_line import ROOT, run_warm

pytestmark = pytest.mark.thorough

PAGE = (ROOT / "docs/guides/TRAINING.md").read_text(encoding="utf-8")


@pytest.mark.timeout(120)
def test_the_pages_script_trains_and_evaluates(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), "utf-8")
    (command,) = re.findall(r"`pushpull (train script\.py [^`]*)`", PAGE)
    run = run_warm(*command.split(), cwd=tmp_path, has_warm_roles=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (found,) = re.findall(r"accuracy (0\.\d+|1\.0+) of 512 by workers \[0, 1\]", run.stdout)
    assert float(found) > 0.9
    assert len(re.findall(r"worker \d has ended epoch", run.stdout)) == 6
    assert set(torch.load(tmp_path / "model.pt")) == {"weight", "bias"}
