"""A range's log at its primary, its replica at a backup: what is held, released, granted."""

from __future__ import annotations

import pytest

from ps_core.cluster_view import RangeAssignment
from ps_core.errors import InvariantViolation
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.ledger import Ending
from ps_server.ranges.range_copy import RangeDelta, WorkerFacts, fresh_copy
from ps_server.replication.backup import Replica
from ps_server.replication.lease import MAX_DRIFT
from ps_server.replication.messages import Ack, LogRecord
from ps_server.replication.primary import Primary
from ps_server.replication.replication_log import RangeLog
from tests.unit.machine_harness import make_table

LEASE_S = 3.0
RANGE = RangeId(0)
EPOCH = AssignmentEpoch(2)
TABLE = TableId(1)
ONE, TWO, THREE = NodeId(1), NodeId(2), NodeId(3)


def delta(*endings: tuple[Incarnation, int, Ending]) -> RangeDelta:
    table = make_table()
    workers = tuple(WorkerFacts(i, 0, 0, 0, None, 0, 0) for i, _, _ in endings)
    return RangeDelta(fresh_copy(table, range(4)).facts, workers, endings, ())


def log_with(*backups: NodeId) -> RangeLog:
    log = RangeLog(RANGE, EPOCH, backups, LEASE_S)
    for backup in backups:
        log.granted(backup, 0.0)
    return log


# --- the primary


def test_without_backups_all_is_released_at_once() -> None:
    log = log_with()
    log.decide(TABLE, delta(), (), ["a"])
    log.follow(["b"])
    assert log.release(1e9) == ["a", "b"]


def test_nothing_is_released_that_a_backup_does_not_have() -> None:
    """RL-1, RL-2."""
    log = log_with(TWO, THREE)
    log.decide(TABLE, delta(), (), ["a"])
    log.follow(["read of a"])
    log.decide(TABLE, delta(), (), ["b"])
    log.acked(TWO, 2)
    assert log.release(1.0) == []
    log.acked(THREE, 1)
    assert log.release(1.0) == ["a", "read of a"]
    log.acked(THREE, 2)
    assert log.release(1.0) == ["b"]
    assert log.is_drained


def test_nothing_is_released_without_the_lease() -> None:
    """It counts from when the beat was sent, and every backup's word counts."""
    log = log_with(TWO, THREE)
    log.follow(["read"])
    log.granted(TWO, 10.0)
    assert log.release(LEASE_S) == []
    log.granted(THREE, 9.0)
    assert not log.may_serve(9.0 + LEASE_S)
    assert log.release(8.9 + LEASE_S) == ["read"]


def test_what_was_not_acknowledged_is_sent_again() -> None:
    log = log_with(TWO)
    records = [log.decide(TABLE, delta(), (), []) for _ in range(3)]
    log.acked(TWO, 1)
    assert log.after(log.acked_by(TWO)) == records[1:]


def test_an_acknowledgement_of_what_was_not_decided_is_a_bug() -> None:
    with pytest.raises(InvariantViolation, match="RL-2"):
        log_with(TWO).acked(TWO, 1)


def test_who_was_not_included_cannot_be_configured() -> None:
    with pytest.raises(InvariantViolation, match="RL-2"):
        log_with(TWO).reconfigure(AssignmentEpoch(3), [THREE])


def test_one_that_joins_counts_before_it_is_configured() -> None:
    """The union of both sets, until the scheduler has answered."""
    log = log_with(TWO)
    log.include(THREE, 0)
    log.granted(THREE, 0.0)
    log.decide(TABLE, delta(), (), ["a"])
    log.acked(TWO, 1)
    assert log.release(1.0) == []
    log.reconfigure(AssignmentEpoch(3), [TWO])
    assert log.release(1.0) == ["a"]


def test_servers_that_left_are_no_longer_heard() -> None:
    """However many replace each other: a primary that knew each that ever answered would grow."""
    ((slots),) = key_ranges(1)
    primary = Primary(log_with(TWO), LEASE_S, heard_s=0.0)
    for number in range(3, 20):
        came = NodeId(number)
        epoch = AssignmentEpoch(number)
        primary.log.include(came, 0)
        primary.observe(RangeAssignment(RANGE, slots, epoch, ONE, (came,), term=EPOCH))
        primary.acked(came, Ack(RANGE, 0, epoch), 1.0)
        assert primary.backup_request(2.0) is None, "all that count are heard"
    assert set(primary._heard_s) <= {NodeId(18), came}


# --- the backup


def record(number: int, epoch: int = EPOCH, term: int = EPOCH) -> LogRecord:
    return LogRecord(
        RANGE, AssignmentEpoch(term), AssignmentEpoch(epoch), number, TABLE, delta(), ()
    )


def test_records_are_taken_in_order_and_once() -> None:
    """RE-1."""
    replica = Replica(RANGE, EPOCH, LEASE_S, EPOCH)
    fresh = lambda: fresh_copy(make_table(), range(4))  # noqa: E731
    assert not replica.take(record(2), fresh)
    assert replica.take(record(1), fresh)
    assert not replica.take(record(1), fresh)
    assert replica.take(record(2), fresh)
    assert replica.number == 2


def test_a_table_that_no_view_has_shown_yet_is_not_taken() -> None:
    replica = Replica(RANGE, EPOCH, LEASE_S, EPOCH)
    assert not replica.take(record(1), lambda: None)
    assert replica.number == 0


def test_a_deposed_primary_is_not_followed() -> None:
    replica = Replica(RANGE, EPOCH, LEASE_S, EPOCH)
    assert replica.follows(record(1))
    replica.follow(AssignmentEpoch(3))
    assert not replica.follows(record(1))
    assert replica.follows(record(1, epoch=3))
    assert not replica.follows(record(1, epoch=4, term=4)), "its numbers mean other records"
    replica.promote(AssignmentEpoch(4), AssignmentEpoch(4))
    assert not replica.follows(record(1, epoch=4))


def test_one_that_is_promoted_grants_no_more_and_waits_its_last_grant_out() -> None:
    replica = Replica(RANGE, EPOCH, LEASE_S, EPOCH)
    assert replica.beat(EPOCH, 10.0)
    replica.promote(AssignmentEpoch(3), AssignmentEpoch(3))
    assert not replica.beat(AssignmentEpoch(3), 11.0)
    assert replica.serves_s == 10.0 + LEASE_S * (1.0 + MAX_DRIFT)


def test_a_beat_of_an_older_epoch_is_not_granted() -> None:
    replica = Replica(RANGE, AssignmentEpoch(3), LEASE_S, EPOCH)
    assert not replica.beat(EPOCH, 10.0)


def test_too_few_servers_commit_nothing_and_answer_reads() -> None:
    log = RangeLog(RANGE, EPOCH, (TWO,), LEASE_S, min_in_sync=2)
    log.granted(TWO, 0.0)
    log.decide(TABLE, delta(), (), ["committed"])
    log.acked(TWO, 1)
    assert log.release(0.1) == ["committed"]
    log.reconfigure(AssignmentEpoch(3), ())
    assert not log.is_alone
    log.follow(["a read"])
    log.decide(TABLE, delta(), (), ["held"])
    assert log.release(0.1) == ["a read"]
    log.include(THREE, 2)
    log.granted(THREE, 0.1)
    assert log.release(0.1) == []  # it has all, and could not be made primary yet
    log.reconfigure(AssignmentEpoch(4), (THREE,))
    assert log.release(0.1) == ["held"]


def test_too_few_servers_answer_no_read_of_values_that_the_update_log_lacks() -> None:
    """LOG-1: it gives back older values, or none, to a server that dies before they are in it."""
    log = RangeLog(RANGE, EPOCH, (), LEASE_S, number=4, min_in_sync=2)
    log.keep_log(-1)
    log.follow(["a read"])
    assert log.release(0.1) == []
    log.begin_logged_snapshot()
    log.written(4)
    assert log.release(0.1) == ["a read"]
    log.begin_anew()
    log.lose_logged_snapshot()
    log.follow(["a read of other values"])
    assert log.release(0.2) == []
    log.begin_logged_snapshot()
    log.written(5)
    assert log.release(0.2) == ["a read of other values"]


def test_reads_before_and_after_a_snapshot_for_the_update_log_are_answered_by_too_few() -> None:
    """Nothing of them waits for another server: the first read has told facts without a record, so
    the snapshot has a number of its own.
    """
    log = RangeLog(RANGE, EPOCH, (), LEASE_S, number=4, min_in_sync=2)
    log.keep_log(-1)
    log.decide_alone()
    log.follow(["a read"])
    number = log.begin_snapshot()
    log.begin_logged_snapshot()
    log.follow(["a read meanwhile"])
    log.written(number)
    log.follow(["a read after it"])
    assert log.release(0.1) == ["a read", "a read meanwhile", "a read after it"]
    log.decide(TABLE, delta(), (), ["held"])
    log.written(number + 1)
    assert log.release(0.2) == []


def test_a_copy_with_what_nobody_was_told_has_a_number_of_its_own_while_others_wait() -> None:
    """What waits is not done by it, and who has the records alone does not have what was seen."""
    log = RangeLog(RANGE, EPOCH, (), LEASE_S, min_in_sync=2)
    log.decide(TABLE, delta(), (), ["held"])
    log.decide_alone()
    assert (log.begin_snapshot(), log.number, log.shown, log.released) == (2, 2, 2, 0)
    assert log.release(0.0) == []
    log.include(TWO, 2)
    log.granted(TWO, 0.0)
    log.reconfigure(AssignmentEpoch(3), (TWO,))
    assert log.release(0.1) == ["held"]
    assert (log.begin_snapshot(), log.shown) == (2, 2)
