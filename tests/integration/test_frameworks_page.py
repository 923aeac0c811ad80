"""docs/FRAMEWORKS.md: its scripts run, and learn."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.page_folder import ENDED_WITHIN_S, PageFolder

pytestmark = pytest.mark.timeout(200)

LEARNT: dict[str, Callable[[str], bool]] = {
    r"lightning: (\d+)% right": lambda found: int(found) > 80,
    r"accelerate: (\d+)% right": lambda found: int(found) > 80,
    r"trainer: loss (\d+\.\d+)": lambda found: float(found) < 2.0,
}


def test_each_frameworks_script_trains(tmp_path: Path) -> None:
    page = PageFolder("FRAMEWORKS.md", tmp_path)
    page.save("lightning_run.py", "accelerate_run.py", "trainer_run.py")
    for command, (pattern, is_good) in zip(page.commands(), LEARNT.items(), strict=True):
        # What transformers imports starts a process that a copy of a warm one does not have.
        with page.start(command, is_warm="trainer" not in command) as tool:
            assert tool.end(ENDED_WITHIN_S) == 0, tool.text
        printed = tool.text
        (found,) = re.findall(pattern, printed)
        assert is_good(found), printed
