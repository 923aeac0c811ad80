"""The script on docs/guides/TRAINING.md runs, and ends as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.integration.command_line import ROOT, run_warm

pytestmark = pytest.mark.thorough

PAGE = (ROOT / "docs/guides/TRAINING.md").read_text(encoding="utf-8")

SCRIPT = "".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
DIES_AFTER_ITS_LAST_STEP = """
if client.rank == 1 and not client.is_late_joiner:
    import os
    os._exit(3)
optimizer.synchronize()
"""


@pytest.mark.timeout(120)
def test_the_pages_script_trains_and_evaluates(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, "utf-8")
    (command,) = re.findall(r"`pushpull (train script\.py [^`]*)`", PAGE)
    run = run_warm(*command.split(), cwd=tmp_path, has_warm_roles=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (found,) = re.findall(r"accuracy (0\.\d+|1\.0+) of 512 by workers \[0, 1\]", run.stdout)
    assert float(found) > 0.9
    assert len(re.findall(r"worker \d has ended epoch", run.stdout)) == 6
    assert set(torch.load(tmp_path / "model.pt")) == {"weight", "bias"}


@pytest.mark.timeout(120)
def test_who_takes_the_place_of_one_that_died_after_its_last_step_ends_well(tmp_path: Path) -> None:
    """It makes no call with the others, which may have left."""
    assert SCRIPT.count("\noptimizer.synchronize()\n") == 1
    script = SCRIPT.replace("\noptimizer.synchronize()\n", DIES_AFTER_ITS_LAST_STEP)
    (tmp_path / "script.py").write_text(script, "utf-8")
    arguments = ("train", "script.py", "--workers", "2", "--max-restarts", "1")
    run = run_warm(*arguments, cwd=tmp_path, has_warm_roles=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "restart 1 of 1" in run.stdout
    assert re.search(r"accuracy \S+ of 256 by workers \[0\]", run.stdout)
