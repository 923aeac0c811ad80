"""Scripts that a child of `multiprocessing` imports anew."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from ps_core.errors import InvalidConfig, WaitExpired

CONNECTS = """
import ps_worker as ps

def train():
    ps.connect("localhost:1", connect_deadline_s=0.1)

if {condition}:
    train()
"""


def test_a_script_that_a_child_imports_does_not_connect(tmp_path: Path) -> None:
    """As by a DataLoader with "spawn": the child has its parent's identity, and would end it."""
    script = tmp_path / "train.py"
    script.write_text(CONNECTS.format(condition="True"))
    with pytest.raises(InvalidConfig, match=r"imports .*train.py anew.* __name__ == "):
        runpy.run_path(str(script), run_name="__mp_main__")  # as `multiprocessing.spawn` does


def test_what_the_script_guards_connects_when_the_child_calls_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CONNECTS.format(condition='__name__ == "__main__"'))
    imported = runpy.run_path(str(script), run_name="__mp_main__")
    with pytest.raises(WaitExpired):
        imported["train"]()


def test_code_in_globals_without_a_name_connects() -> None:
    with pytest.raises(WaitExpired):
        exec(CONNECTS.format(condition="True"), {})  # noqa: S102 - as some launchers run a script
