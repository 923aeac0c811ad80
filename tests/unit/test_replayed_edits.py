"""Initial values and edits, which no version counts, are made again, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps_core.keys import TableId
from ps_core.tables.table import Table
from ps_server.replay.replayer import Replay, read_run
from ps_server.values.mutations import Put, SentAccumulator
from tests.unit.written_logs import ASP, LEFT, Owner, WrittenLog


def replayed(path: Path) -> Replay:
    return Replay(read_run(path), [ASP], by_clock=True)


def values(again: Replay, owner: Owner) -> dict[int, bytes]:
    return {block: bytes(again.block(ASP, block).tensors[0][1]) for block in owner.blocks}


def updates(owner: Owner, count: int) -> dict[tuple[TableId, int], int]:
    """The same count for each block."""
    return {(ASP.table_id, block): count for block in owner.blocks}


@pytest.mark.parametrize("is_whole", [True, False], ids=["from its begin", "from a snapshot"])
def test_a_range_without_an_update_has_the_values_that_it_began_with(
    tmp_path: Path, is_whole: bool
) -> None:
    owner = Owner(LEFT, ASP)
    log = WrittenLog(tmp_path, ASP)
    if is_whole:
        log.begin(owner)
        log.record(owner.assigned(3.0))
    else:
        owner.assigned(3.0, 1)
        log.snapshot(owner)
    expected = owner.values()
    log.record(owner.update(2))
    again = replayed(tmp_path)
    assert again.go_to_versions(updates(owner, 0)) == []
    assert values(again, owner) == expected


def test_a_log_that_begins_beyond_the_wanted_updates_does_not_have_them(tmp_path: Path) -> None:
    """Its range is not taken for one of zeros."""
    owner = Owner(LEFT, ASP)
    owner.update(1)
    log = WrittenLog(tmp_path, ASP)
    log.snapshot(owner)
    problems = replayed(tmp_path).go_to_versions(updates(owner, 0))
    assert problems == [f"block {b} has had 1 updates in range 0; expected 0" for b in owner.blocks]


@pytest.mark.parametrize("edit_count", [0, 1, 2])
def test_edits_behind_the_last_update_are_made_until_the_values_are_found(
    tmp_path: Path, edit_count: int
) -> None:
    """A step without a gradient, and a snapshot, may lie between them."""
    owner = Owner(LEFT, ASP)
    log = WrittenLog(tmp_path, ASP)
    log.begin(owner)
    log.record(owner.update(1))
    moments = [owner.values()]
    for clock in (2, 4):
        log.record(owner.assigned(float(clock), clock))
        moments.append(owner.values())
        record = owner._record(clock + 1, (0,))
        log.record(owner._decide(Put(record, SentAccumulator(())), record))
        log.segment()
        log.snapshot(owner)
    log.record(owner.update(6))
    expected = moments[edit_count]
    again = replayed(tmp_path)

    def is_found(table: Table, block: int) -> bool:
        return bytes(again.block(table, block).tensors[0][1]) == expected[block]

    assert again.go_to_versions(updates(owner, 1), is_found) == []
    assert values(again, owner) == expected
