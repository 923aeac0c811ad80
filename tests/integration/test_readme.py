"""The README's program and commands do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.command_line import ROOT, run_warm

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_example_trains_and_goes_on_when_it_is_done(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(program, encoding="utf-8")
    arguments = ("train", str(script), "--workers", "2", "--servers", "2")
    saved = ("--checkpoint-url", str(tmp_path / "runs"), "--resume", "auto")
    for _ in range(2):  # the second one has no step left to take
        run = run_warm(*arguments, *saved, cwd=ROOT, has_warm_roles=True)
        assert run.returncode == 0, run.stdout + run.stderr
        reached = re.search(r"loss (\d+\.\d+)\n", run.stdout)
        assert reached, run.stdout
        assert float(reached[1]) < 0.5


def test_every_target_it_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", README.replace("make, nothing", "")))
    assert {"demo", "test", "check", "help"} <= named
    assert named <= targets
