"""The scripts on docs/guides/DATA_SHARDS.md run, and their workers train on each sample once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.command_line import ROOT, run_warm

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/guides/DATA_SHARDS.md").read_text(encoding="utf-8")


@pytest.mark.timeout(120)
@pytest.mark.thorough
def test_the_pages_script_shares_its_data_out(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    *blocks, adaptive = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    script.write_text("".join(blocks), "utf-8")
    (command,) = re.findall(r"`pushpull (train script\.py [^`]*)`", PAGE)
    run = run_warm(*command.split(), cwd=tmp_path)  # its loader has processes
    assert run.returncode == 0, run.stdout + run.stderr
    seen: Counter[str] = Counter()
    for count, number in re.findall(r"trained on (\d+) samples of pass (\d)", run.stdout):
        seen[number] += int(count)
    assert seen == {"0": 960, "1": 960, "2": 960}
    assert len(re.findall(r"worker \d has ended pass 3", run.stdout)) == 2
    script.write_text(adaptive, "utf-8")
    run = run_warm(*command.split(), cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    ends = set(re.findall(r"ends with batches of \{0: (\d+), 1: (\d+)\}", run.stdout))
    assert len(ends) == 1, "both workers agree"
    assert sum(map(int, ends.pop())) == 2 * 16
