"""Rows made again from logs that were made by hand: all that a server has of them, by id."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ps_core.errors import InvalidUpdateLog
from ps_core.keys import RangeId, TableId
from ps_core.sliced_work import at_once
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Eviction, RowsSpec, RowStorage, TableSpec
from ps_server.replay.replayer import Replay, read_run
from tests.unit.written_logs import LEFT, RIGHT, RowsOwner, WrittenLog, by_id

ROWS = RowsSpec(6, 3)
"""Three partitions in each range."""

PRUNED = replace(ROWS, max_row_count=60, evict_after=16, admit_after=2, eviction=Eviction.LFU)


def table(kind: OptimizerKind, rows: RowsSpec = ROWS) -> Table:
    spec = TableSpec("users", DType.FLOAT32, 5, OptimizerSpec(kind), rows=rows)
    return Table(TableId(1), 0, spec.validated())


ROUNDED = replace(ROWS, storage=RowStorage.INT8)

FTRL = table(OptimizerKind.FTRL, PRUNED)


def replayed(path: Path, of: Table) -> Replay:
    return Replay(read_run(path), [of])


def check_all(again: Replay, *owners: RowsOwner) -> None:
    """What was made is what they have, and each row lies in one of them."""
    again.go_to(again.history.versions[-1].position)
    for owner in owners:
        made = by_id(again.block(owner.of, block).tensors for block in owner.blocks)
        assert made == owner.rows()
    assert again.row_count == sum(len(owner.rows()["ids"]) for owner in owners)


@pytest.mark.thorough
@pytest.mark.parametrize("rows", [ROWS, PRUNED, ROUNDED], ids=["all", "pruned", "rounded"])
@pytest.mark.parametrize(
    "kind",
    [
        OptimizerKind.SGD, OptimizerKind.ADAM, OptimizerKind.ADAGRAD,
        OptimizerKind.ROWWISE_ADAGRAD, OptimizerKind.FTRL,
    ],
)  # fmt: skip
def test_rows_of_two_servers_are_as_they_have_them(
    kind: OptimizerKind, rows: RowsSpec, tmp_path: Path
) -> None:
    """Values, the optimizer's state, and what decides about eviction and admission."""
    of = table(kind, rows)
    owners = [RowsOwner(LEFT, of), RowsOwner(RIGHT, of)]
    logs = [WrittenLog(tmp_path / f"server-{index}", of) for index in range(2)]
    for owner, log in zip(owners, logs, strict=True):
        log.begin(owner)
        for clock in range(1, 25):
            log.record(owner.update(clock, (0, 1), clock / 7))
    again = replayed(tmp_path, of)
    check_all(again, *owners)
    assert [version.number for version in again.history.versions] == list(range(25))
    assert again.history.versions[0].time_s == 1001.0, "that of the first update"
    if rows is PRUNED:
        assert any(owner.rows()["candidate_ids"] for owner in owners)


def test_each_range_alone_makes_the_same(tmp_path: Path) -> None:
    """Up to a version in the middle, whatever the whole has made; of the other range is nothing."""
    owners = {LEFT: RowsOwner(LEFT, FTRL), RIGHT: RowsOwner(RIGHT, FTRL)}
    log = WrittenLog(tmp_path, FTRL)
    for owner in owners.values():
        log.begin(owner)
    expected = {}
    for clock in range(1, 13):
        for range_id, owner in owners.items():
            log.record(owner.update(clock, (0, 1), clock / 7))
            if clock == 8:
                expected[range_id] = owner.rows()
    again = replayed(tmp_path, FTRL)
    again.go_to(again.history.versions[3].position)
    for range_id, part in zip((LEFT, RIGHT), again.by_range(FTRL), strict=True):
        assert part.blocks == list(owners[range_id].blocks)
        assert part.change_count == 12
        part.go_to(again.history.versions[8].position)
        assert part.made_count == 8
        assert (
            by_id(part.block(FTRL, block).tensors for block in part.blocks) == (expected[range_id])
        )
        assert part.row_count == len(expected[range_id]["ids"])
    assert again.made_count == 6


def test_after_a_record_that_is_in_no_log_all_comes_from_a_snapshot(tmp_path: Path) -> None:
    """What only a server without a log had decided is in the rows, and no version."""
    one, other = WrittenLog(tmp_path / "server-0", FTRL), WrittenLog(tmp_path / "server-1", FTRL)
    owner = RowsOwner(LEFT, FTRL)
    one.begin(owner)
    for clock in range(1, 7):
        one.record(owner.update(clock, (0, 1), clock / 7))
    for clock in (7, 8):
        owner.update(clock, (0, 1), clock / 7)
    owner.term += 1
    other.now_s = one.now_s + 1
    other.snapshot(owner)
    for clock in range(9, 14):
        other.record(owner.update(clock, (0, 1), clock / 7))
    again = replayed(tmp_path, FTRL)
    check_all(again, owner)
    numbers = [version.number for version in again.history.versions]
    assert numbers == [*range(7), *range(9, 14)]


def test_what_nobody_has_seen_is_not_in_the_rows(tmp_path: Path) -> None:
    """A primary that was replaced had decided it alone: rows it made, others it evicted."""
    one, other = WrittenLog(tmp_path / "server-0", FTRL), WrittenLog(tmp_path / "server-1", FTRL)
    owner = RowsOwner(LEFT, FTRL)
    one.begin(owner)
    for clock in range(1, 7):
        one.record(owner.update(clock, (0, 1), clock / 7))
    backup = owner.twin()
    for clock in range(7, 12):
        one.record(owner.update(clock, (0, 1), clock / 3))
    backup.term += 1
    other.now_s = one.now_s
    other.snapshot(backup)
    for clock in range(7, 9):
        other.record(backup.update(clock, (0, 1), clock / 7))
    check_all(replayed(tmp_path, FTRL), backup)
    assert read_run(tmp_path).unseen_count == 5


def test_a_snapshot_with_rows_in_another_order_is_the_same(tmp_path: Path) -> None:
    """A server that was restored has them so: a row has no fixed number."""
    owner, log = RowsOwner(LEFT, FTRL), WrittenLog(tmp_path, FTRL)
    log.begin(owner)
    for clock in range(1, 9):
        log.record(owner.update(clock, (0, 1), clock / 7))
    before = owner.rows()
    owner.turn_round()
    assert owner.rows() == before
    log.snapshot(owner)
    for clock in range(9, 13):
        log.record(owner.update(clock, (0, 1), clock / 7))
    again = replayed(tmp_path, FTRL)
    check_all(again, owner)
    assert again.checked_count == 1


@pytest.mark.parametrize("what", ["a row", "a candidate", "a version", "a sum that waits"])
def test_a_snapshot_with_something_else_is_an_error(what: str, tmp_path: Path) -> None:
    owner, log = RowsOwner(LEFT, FTRL), WrittenLog(tmp_path, FTRL)
    log.begin(owner)
    for clock in range(1, 5):
        log.record(owner.update(clock, (0, 1), clock / 7))
    log.record(owner.kept(5, (0, 1), 0.5))
    other = owner.twin()
    store = other.shards.stores[FTRL.table_id, RangeId(0)]
    copy = store.snapshot()
    at = next(i for i, each in enumerate(copy.blocks) if each.values)
    if what == "a row":
        values = bytearray(copy.blocks[at].values)
        values[-1] ^= 1
        changed = copy.blocks[at]._replace(values=bytes(values))
        blocks = (*copy.blocks[:at], changed, *copy.blocks[at + 1 :])
        at_once(store.restoring(copy._replace(blocks=blocks)))
    elif what == "a candidate":
        blocks = tuple(
            each._replace(slots=tuple((name, b"") for name, _ in each.slots))
            if "candidate_ids" in dict(each.slots)
            else each
            for each in copy.blocks
        )
        at_once(store.restoring(copy._replace(blocks=blocks)))
    elif what == "a version":
        blocks = tuple(each._replace(version=each.version + 1) for each in copy.blocks)
        at_once(store.restoring(copy._replace(blocks=blocks)))
    else:
        at_once(store.restoring(copy._replace(sums=())))
    log.snapshot(other)
    again = replayed(tmp_path, FTRL)
    with pytest.raises(InvalidUpdateLog, match="table 'users' is other than what its updates make"):
        again.go_to(10**6)


@pytest.mark.parametrize("is_later", [False, True])
def test_a_table_whose_beginning_is_gone_is_not_taken_for_a_new_one(
    is_later: bool, tmp_path: Path
) -> None:
    """Its run was removed before the snapshot with which the log begins. One that was made after
    it has no rows yet.
    """
    other = replace(FTRL, table_id=TableId(2), spec=replace(FTRL.spec, name="others"))
    owner = RowsOwner(LEFT, FTRL)
    for clock in range(1, 5):
        owner.update(clock, (0, 1), clock / 7)
    log = WrittenLog(tmp_path, FTRL)
    if not is_later:
        log.table(other)
    log.snapshot(owner)
    if is_later:
        log.table(other)
    log.record(owner.update(5, (0, 1), 1.0))
    check_all(replayed(tmp_path, FTRL), owner)
    if is_later:
        assert replayed(tmp_path, other).row_count == 0
        return
    with pytest.raises(InvalidUpdateLog, match="no range of 'others' from its beginning"):
        replayed(tmp_path, other)
    both = Replay(read_run(tmp_path), [FTRL, other])
    with pytest.raises(InvalidUpdateLog, match="of table 'others' is in: give the directory"):
        next(both.by_range(other))
