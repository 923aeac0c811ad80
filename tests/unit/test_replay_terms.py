"""Replays of ranges whose former primary got them back before whoever was promoted had served; and
of values that came from a checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ps_core.errors import InvalidUpdateLog
from ps_core.keys import AssignmentEpoch, TableId
from ps_core.sliced_work import at_once
from ps_core.tables.table import Table
from ps_server.ranges.range_copy import fresh_copy
from ps_server.ranges.server_machine import ShardAdded
from ps_server.replay.replayer import Replay, read_run
from ps_server.replication.messages import Snapshot
from ps_server.wire.snapshot_wire import snapshot_messages
from tests.unit.written_logs import ASP, LEFT, MODEL, Owner, WrittenLog


def promoted(owner: Owner) -> Owner:
    """A backup that was promoted, with all that it has; it was granted nothing yet."""
    other = owner.twin()
    other._done = dict(owner._done)
    other.term = 4
    return other


def check(path: Path, owner: Owner, unseen_count: int) -> None:
    """The replay ends with what the owner has, and nothing is lost."""
    run = read_run(path)
    again = Replay(run, [MODEL])
    again.go_to(again.history.versions[-1].position)
    store = owner.shards.stores[MODEL.table_id, LEFT]
    assert all(again.block(MODEL, block) == store.saved(block) for block in owner.blocks)
    assert (run.unseen_count, run.lost_count) == (unseen_count, 0)


@pytest.mark.parametrize("lags", [False, True])
@pytest.mark.parametrize("decided_count", [0, 2])
def test_nobody_saw_what_the_promoted_one_decided(
    tmp_path: Path, lags: bool, decided_count: int
) -> None:
    """Its log has fewer records than the former primary's, as many, or more."""
    owner = Owner(LEFT)
    one, other = WrittenLog(tmp_path / "server-0"), WrittenLog(tmp_path / "server-1")
    one.begin(owner)
    one.record(owner.update(1))
    backup = promoted(owner)
    if lags:
        one.record(owner.update(2))
    other.snapshot(backup)
    for clock in range(2, 2 + decided_count):
        other.record(backup.update(clock, (0,), 9.0))
    other.segment()
    other.end(LEFT)
    owner.term = 6
    one.segment()
    one.taken_over(owner)
    one.record(owner.update(owner.number + 1))
    check(tmp_path, owner, decided_count)


@pytest.mark.parametrize("has_records", [False, True])
def test_a_term_whose_begin_is_gone_is_gone_on_with_by_the_next_snapshot(
    tmp_path: Path, has_records: bool
) -> None:
    """An older log has the range's begin; of the next primary's the oldest segment went."""
    owner = Owner(LEFT)
    one, other = WrittenLog(tmp_path / "server-0"), WrittenLog(tmp_path / "server-1")
    one.begin(owner)
    one.record(owner.update(1))
    owner.term = 4
    owner.update(2)
    record = owner.update(3)
    if has_records:
        other.record(record)
    owner.term = 6
    other.taken_over(owner)
    other.record(owner.update(4))
    other.segment()
    other.snapshot(owner)
    other.record(owner.update(5))
    run = read_run(tmp_path)
    again = Replay(run, [MODEL])
    again.go_to(again.history.versions[-1].position)
    store = owner.shards.stores[MODEL.table_id, LEFT]
    assert all(again.block(MODEL, block) == store.saved(block) for block in owner.blocks)
    assert run.lost_count == 3


def test_a_gap_before_a_server_that_was_started_again_is_damage(tmp_path: Path) -> None:
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path)
    log.begin(owner)
    log.record(owner.update(1))
    owner.update(2)
    owner.term = 4
    log.taken_over(owner)
    with pytest.raises(InvalidUpdateLog, match="it goes on from log record 2, after 1"):
        read_run(tmp_path)


class RestoringOwner(Owner):
    """One that gets a table from a checkpoint: it has a number, and no record."""

    def restore(self, another: Table) -> None:
        self.another = another
        self.shards.add([ShardAdded(another, self.range_id, self.blocks)])
        self.number += 1

    def snapshot(self) -> list[bytes]:
        copies = {
            self.of.table_id: self.copy,
            self.another.table_id: fresh_copy(self.another, self.blocks),
        }
        epoch = AssignmentEpoch(self.term)
        snapshot = Snapshot(self.range_id, epoch, epoch, self.number, copies)
        return list(snapshot_messages(at_once(self.shards.copying(snapshot))))


@pytest.mark.parametrize("of", [MODEL, ASP])
def test_values_of_a_checkpoint_that_come_late_are_no_loss(tmp_path: Path, of: Table) -> None:
    """The other table's updates before them are versions when it is replayed alone."""
    spec = replace(of.spec, name="late")
    late = replace(of, table_id=TableId(9), spec=spec, restored_clock=3)
    owner, log = RestoringOwner(LEFT, of), WrittenLog(tmp_path, of)
    log.begin(owner)
    for clock in range(1, 6):
        log.record(owner.update(clock))
    log.table(late)
    owner.restore(late)
    log.snapshot(owner)
    log.record(owner.update(6))
    run = read_run(tmp_path)
    assert run.lost_count == 0
    assert not any("are in no log" in note for note in run.notes)
    again = Replay(run, [of])
    assert [version.clock for version in again.history.versions] == list(range(7))
    again.go_to(again.history.versions[-1].position)
    store = owner.shards.stores[of.table_id, LEFT]
    assert all(again.block(of, block) == store.saved(block) for block in owner.blocks)
    assert not Replay(run, [of, late]).history.lost_count
