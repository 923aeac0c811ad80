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
def test_the_example_trains(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(program, encoding="utf-8")
    arguments = ("train", str(script), "--workers", "2", "--servers", "2")
    run = run_warm(*arguments, cwd=ROOT, has_warm_roles=True)
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
