"""A replay leaves others their memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps_cli.replay.turns import check_memory
from ps_core.errors import TableFull


def machine(root: Path, left_mib: int) -> Path:
    """One of 1000 MiB."""
    (root / "proc").mkdir()
    lines = f"MemTotal: {1000 * 1024} kB\nMemAvailable: {left_mib * 1024} kB\n"
    (root / "proc/meminfo").write_text(lines)
    return root


def test_one_with_a_twentieth_of_its_memory_left_goes_on(tmp_path: Path) -> None:
    check_memory(machine(tmp_path, 50))


def test_one_with_less_ends_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        TableFull, match=r"has 49 MiB of memory left, of which 50 are not .* fewer tables"
    ):
        check_memory(machine(tmp_path, 49))


def test_a_system_that_does_not_say_is_not_refused(tmp_path: Path) -> None:
    check_memory(tmp_path)
