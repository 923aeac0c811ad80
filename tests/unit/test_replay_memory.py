"""A replay leaves others their memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ps_cli.replay.turns import check_memory, reading
from ps_core.errors import TableFull
from ps_core.keys import TableId
from ps_server.replay.replayer import Replay, read_run
from tests.unit.written_logs import ASP, LEFT, Owner, WrittenLog

UPDATES = 200


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


@pytest.fixture
def log(tmp_path: Path) -> WrittenLog:
    """Two tables in a range, which take turns."""
    other = replace(ASP, table_id=TableId(9), spec=replace(ASP.spec, name="other"))
    owners = Owner(LEFT, ASP), Owner(LEFT, other)
    found = WrittenLog(tmp_path / "log", ASP)
    found.table(other)
    found.begin(owners[0])
    for number in range(UPDATES):
        owner = owners[number % 2]
        owner.number = number
        found.record(owner.update(1 + number // 2))
    return found


def test_one_that_reads_a_log_looks_at_the_memory_too(log: WrittenLog, tmp_path: Path) -> None:
    told: list[int] = []
    machine(tmp_path, 49)
    with pytest.raises(TableFull):
        read_run(log.path, reading(lambda done, _: told.append(done), tmp_path))
    assert not told


def test_tables_that_are_not_chosen_are_not_kept(log: WrittenLog) -> None:
    whole = read_run(log.path)
    run = read_run(log.path, is_chosen=lambda table: table.spec.name == ASP.spec.name)
    wanted = [each for each in whole.changes if each.place[0] == ASP.table_id]
    assert run.changes == wanted
    assert len(wanted) == UPDATES / 2
    assert (run.lost_count, run.notes) == (whole.lost_count, whole.notes)


def test_one_that_looks_for_versions_takes_turns(log: WrittenLog) -> None:
    run = read_run(log.path)
    again, turns = Replay(run, [run.tables[ASP.spec.name]]), list[None]()
    blocks = ASP.blocks_by_range(run.range_count)[LEFT]
    wanted = {(ASP.table_id, block): UPDATES // 2 for block in blocks}
    assert again.go_to_versions(wanted, turn=lambda: turns.append(None)) == []
    assert len(turns) == 2
