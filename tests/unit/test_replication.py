"""The machines of replication, without a network: what is held, what is released, who serves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.cluster_view import BackupRequest, ClusterView, RangeAssignment, Role, Session
from ps_core.errors import WaitExpired
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.ledger import Ending, ReplyKind
from ps_core.sliced_work import at_once
from ps_server.ranges.events import AnswerPull, Record, RefusePull
from ps_server.ranges.range_copy import RangeDelta, WorkerFacts, fresh_copy
from ps_server.ranges.server_machine import ServerMachine
from ps_server.replication.backup import Replica
from ps_server.replication.lease import MAX_DRIFT
from ps_server.replication.messages import Ack, Beat, Grant, LogRecord, Snapshot
from ps_server.replication.range_roles import PLACED_EPOCH, Replication
from ps_server.values.mutations import Put
from ps_worker.window.push_window import BlockPlace, EntryState, PushWindow, Reply, StepTerms
from tests.unit.cluster_harness import Harness
from tests.unit.machine_harness import make_table
from tests.unit.snapshots import snapshots_of

LEASE_S = 3.0
RANGE = RangeId(0)
EPOCH = AssignmentEpoch(2)
TABLE = TableId(1)
ONE, TWO, THREE = NodeId(1), NodeId(2), NodeId(3)


def delta(*endings: tuple[Incarnation, int, Ending]) -> RangeDelta:
    table = make_table()
    workers = tuple(WorkerFacts(i, 0, 0, 0, None, 0, 0) for i, _, _ in endings)
    return RangeDelta(fresh_copy(table, range(4)).facts, workers, endings, ())


# --- one server's ranges


_Range = tuple[int, NodeId | None, tuple[NodeId, ...], tuple[NodeId, ...]]


def view(number: int, *ranges: _Range) -> ClusterView:
    """Ranges by epoch, primary, backups, and who joins."""
    slots = key_ranges(len(ranges))
    return ClusterView(
        number, "c", 1, 3, (),
        tuple(
            RangeAssignment(
                RangeId(i), slots[i], AssignmentEpoch(epoch), primary, backups, joining,
                () if primary is None or epoch != PLACED_EPOCH else (primary, *backups),
            )
            for i, (epoch, primary, backups, joining) in enumerate(ranges)
        ),
        (),
    )  # fmt: skip


def replication(node_id: NodeId) -> Replication:
    return Replication(node_id, ServerMachine(node_id, 1), LEASE_S)


def test_a_range_of_another_clusters_log_begins_empty_here() -> None:
    two = replication(TWO)
    two.recover([Replica(RANGE, AssignmentEpoch(7), LEASE_S, EPOCH)])
    two.observe(view(1, (1, None, (), ())), 0.0)
    two.observe(view(2, (PLACED_EPOCH, TWO, (), ())), 1.0)
    assert two.serve(1.0).ranges[0].primary == TWO
    assert two.missing == ()


def test_a_backup_that_is_promoted_serves_when_the_lease_has_run_out() -> None:
    two = replication(TWO)
    two.observe(view(1, (PLACED_EPOCH, ONE, (TWO,), ())), 0.0)
    two.serve(0.0)
    beat = next(iter(_primary(ONE, TWO).beats(5.0).values()))
    assert two.beat(beat, 5.0) == Grant(5.0, (RANGE,))
    two.observe(view(2, (3, TWO, (), ())), 6.0)
    assert two.serve(6.0).ranges[0].primary is None
    assert two.waits
    slow_clock_s = LEASE_S * (1.0 + MAX_DRIFT)
    assert two.serve(4.99 + slow_clock_s).ranges[0].primary is None
    assert two.serve(5.01 + slow_clock_s).ranges[0].primary == TWO
    assert two.primaries[RANGE].log.backups == ()


def _primary(node_id: NodeId, *backups: NodeId) -> Replication:
    found = replication(node_id)
    found.observe(view(1, (PLACED_EPOCH, node_id, backups, ())), 0.0)
    found.serve(0.0)
    return found


def given(epoch: int, primary: NodeId, *backups: NodeId, placed: int = PLACED_EPOCH) -> ClusterView:
    """A range that all of these have held since it was placed."""
    seen = view(epoch, (epoch, primary, backups, ()))
    (assignment,) = seen.ranges
    holders, placed_epoch = assignment.in_sync, AssignmentEpoch(placed)
    given_to = replace(assignment, initial_holders=holders, placed_epoch=placed_epoch)
    return replace(seen, ranges=(given_to,))


@pytest.mark.parametrize("sees_it_empty", [True, False])
def test_a_range_that_is_placed_anew_begins_empty_where_it_was_before(
    *, sees_it_empty: bool
) -> None:
    """It was copied to this server once, which has left it since. All its tables are gone."""
    two = replication(TWO)
    two.observe(view(2, (PLACED_EPOCH, ONE, (), (TWO,))), 0.0)
    assert two.join(Snapshot(RANGE, PLACED_EPOCH, PLACED_EPOCH, 3, {}, ())) is not None
    two.observe(view(3, (3, ONE, (), ())), 1.0)
    assert two.replicas == {}
    if sees_it_empty:
        two.observe(view(4, (4, None, (), ())), 2.0)
    two.observe(given(5, TWO, placed=5), 3.0)
    assert two.serve(3.0).ranges[0].primary == TWO
    assert two.missing == ()


def _of_older_placement() -> Replication:
    """A backup that has a record of a range, and has granted its lease under epoch 5 since."""
    two = replication(TWO)
    two.observe(given(PLACED_EPOCH, ONE, TWO), 0.0)
    record = LogRecord(RANGE, EPOCH, EPOCH, 1, TABLE, delta(), ())
    assert two.take(record, lambda: fresh_copy(make_table(), range(4)))[0]
    assert two.beat(Beat(5.0, ((RANGE, AssignmentEpoch(5)),)), 5.0).range_ids == (RANGE,)
    return two


def test_what_was_there_before_a_range_was_placed_anew_is_given_up() -> None:
    """Its new primary begins with the first record, under another term."""
    two, epoch = _of_older_placement(), AssignmentEpoch(5)
    two.observe(given(5, THREE, TWO, placed=5), 5.0)
    record = LogRecord(RANGE, epoch, epoch, 1, TABLE, delta(), ())
    copy = fresh_copy(make_table(), range(4))
    assert two.take(record, lambda: copy) == (True, Ack(RANGE, 1, epoch))
    two.leave(RANGE)
    two.observe(given(6, TWO, THREE, placed=5), 6.0)
    assert two.missing == (RANGE,)


def test_who_is_first_where_a_range_is_placed_anew_begins_it_at_once() -> None:
    two = _of_older_placement()
    two.observe(given(5, TWO, THREE, placed=5), 5.0)
    assert two.serve(5.0).ranges[0].primary == TWO
    log = two.primaries[RANGE].log
    assert (log.number, log.backups, log.candidates) == (0, (THREE,), frozenset())


@pytest.mark.parametrize("sees_it_placed", [True, False])
def test_a_lease_that_was_granted_before_the_placement_was_seen_is_waited_out(
    *, sees_it_placed: bool
) -> None:
    two = _of_older_placement()
    if sees_it_placed:
        two.observe(given(5, THREE, TWO, placed=5), 5.0)
    two.observe(given(6, TWO, placed=5), 5.0)
    assert two.serve(5.0).ranges[0].primary is None
    assert two.serves_within(5.0) > LEASE_S
    assert two.serve(5.0 + 2 * LEASE_S).ranges[0].primary == TWO


def test_an_initial_holder_that_has_left_a_range_stays_without_it() -> None:
    """Nobody has placed it anew: the server has missed what others were told."""
    two = replication(TWO)
    two.observe(given(PLACED_EPOCH, ONE, TWO), 0.0)
    two.leave(RANGE)
    two.observe(given(3, TWO, ONE), 1.0)
    assert two.missing == (RANGE,)


def test_a_holder_since_the_range_was_placed_begins_it_whichever_epoch_it_hears_of_first() -> None:
    """Its primary fell silent before any view came: nobody has seen anything of the range."""
    two = replication(TWO)
    two.observe(given(3, TWO), 0.0)
    assert two.serve(0.0).ranges[0].primary == TWO
    assert two.missing == ()
    assert two.primaries[RANGE].log.term == AssignmentEpoch(3)


def test_one_that_begins_a_range_late_has_the_others_as_heirs() -> None:
    """They may have log records of the primary before, of which it knows nothing."""
    two = replication(TWO)
    two.observe(given(3, TWO, THREE), 0.0)
    two.serve(0.0)
    log = two.primaries[RANGE].log
    assert log.candidates == {THREE}
    assert log.term == AssignmentEpoch(3)


def test_a_backup_that_hears_late_of_a_range_follows_it_from_its_first_record() -> None:
    two = replication(TWO)
    two.observe(given(4, ONE, TWO), 0.0)
    log_record = LogRecord(RANGE, EPOCH, AssignmentEpoch(4), 1, TABLE, delta(), ())
    copy = fresh_copy(make_table(), range(4))
    assert two.take(log_record, lambda: copy) == (True, Ack(RANGE, 1, AssignmentEpoch(4)))


def test_who_has_had_a_range_and_has_it_no_more_says_so() -> None:
    """It has missed what came since: the range may not begin anew there."""
    two = replication(TWO)
    two.observe(given(PLACED_EPOCH, ONE, TWO, THREE), 0.0)
    two.leave(RANGE)
    two.observe(given(3, TWO, THREE), 1.0)
    assert two.serve(100.0).ranges[0].primary is None
    assert two.missing == (RANGE,)
    backup_request = BackupRequest(RANGE, AssignmentEpoch(3), frozenset(), is_missing=True)
    assert two.backup_requests(1.0) == [backup_request]
    two.observe(given(4, THREE), 2.0)
    assert two.backup_requests(2.0) == []


def test_one_that_is_promoted_lets_nothing_be_seen_before_the_other_backups_are_left_out() -> None:
    """Each of them could still be made primary in its place, and may lack its newest log record."""
    two = replication(TWO)
    two.observe(view(1, (PLACED_EPOCH, ONE, (TWO, THREE), ())), 0.0)
    two.serve(0.0)
    two.observe(view(2, (3, TWO, (THREE,), ())), 0.0)
    two.serve(LEASE_S)
    log = two.primaries[RANGE].log
    two.granted(THREE, Grant(LEASE_S, (RANGE,)), LEASE_S)
    log.follow(["a read"])
    assert log.release(LEASE_S) == []
    assert two.backup_requests(LEASE_S) == [BackupRequest(RANGE, AssignmentEpoch(3), frozenset())]
    two.observe(view(3, (4, TWO, (), (THREE,))), LEASE_S)
    assert log.release(LEASE_S) == ["a read"]


@pytest.mark.parametrize("sees_it_placed", [True, False])
def test_one_that_is_promoted_alone_lets_nothing_be_seen_before_its_log_is_known_to_have_it(
    *, sees_it_placed: bool
) -> None:
    """Until then the range may be given to the log of the former primary, which has left (S13)."""
    two = Replication(TWO, ServerMachine(TWO, 1), LEASE_S, has_update_log=True)
    if sees_it_placed:
        two.observe(view(1, (PLACED_EPOCH, ONE, (TWO,), ())), 0.0)
    two.observe(given(3, TWO), 0.0)
    two.serve(LEASE_S)
    log = two.primaries[RANGE].log
    assert two.backup_requests(LEASE_S) == []
    log.follow(["a read"])
    log.begin_logged_snapshot()
    log.written(log.number)
    assert log.release(LEASE_S) == []
    assert two.backup_requests(LEASE_S) == [BackupRequest(RANGE, AssignmentEpoch(3), frozenset())]
    two.observe(given(4, TWO), LEASE_S)
    assert log.release(LEASE_S) == ["a read"]
    assert two.backup_requests(LEASE_S) == []


def test_heirs_are_told_nothing_and_do_not_count() -> None:
    """Of what it is given a promoted server tells nobody where too few will hold it: reads would
    wait for that until another has joined.
    """
    two = Replication(TWO, ServerMachine(TWO, 1), LEASE_S, 2)
    two.observe(view(1, (PLACED_EPOCH, ONE, (TWO,), ())), 0.0)
    two.observe(view(2, (3, TWO, (ONE,), ())), 0.0)
    two.serve(LEASE_S)
    primary = two.primaries[RANGE]
    assert (primary.holders, primary.is_heard, primary.is_alone) == ((), False, False)
    assert primary.log.is_short
    assert two.beats(LEASE_S) == {}


def test_who_joins_keeps_what_its_primary_counts_on_until_the_epoch_ends() -> None:
    """A view that does not name it may be older than what its primary has told it."""
    three = replication(THREE)
    three.observe(view(1, (4, ONE, (), (THREE,))), 0.0)
    snapshot = Snapshot(RANGE, AssignmentEpoch(5), EPOCH, 7, {})
    assert three.join(snapshot) == Ack(RANGE, 7, AssignmentEpoch(5))
    assert three.observe(view(2, (5, ONE, (TWO,), ())), 0.0) == ([], [])
    assert three.replicas[RANGE].number == 7
    assert three.observe(view(3, (6, ONE, (TWO,), ())), 0.0) == ([RANGE], [])
    assert three.replicas == {}


def test_who_has_nothing_to_serve_does_not_serve() -> None:
    """A range of another epoch than the first holds something, and not here."""
    two = replication(TWO)
    two.observe(view(9, (7, TWO, (), ())), 0.0)
    assert two.serve(0.0).ranges[0].primary is None
    assert two.primaries == {}
    assert two.missing == (RANGE,)


def test_a_silent_backup_is_asked_to_be_left_out() -> None:
    one = _primary(ONE, TWO)
    assert one.backup_requests(LEASE_S / 2) == []
    (request,) = one.backup_requests(LEASE_S)
    assert request.backups == frozenset()
    assert one.primaries[RANGE].log.backups == (TWO,), "its word counts until it has been left out"
    one.observe(view(2, (3, ONE, (), ())), LEASE_S)
    assert one.primaries[RANGE].log.backups == ()
    assert one.backup_requests(LEASE_S) == []


def test_a_primary_that_was_paused_listens_before_it_takes_backups_for_dead() -> None:
    """What they said lies unread; left out, they would have to join anew."""
    one = _primary(ONE, TWO)
    assert one.backup_requests(0.1) == []
    assert one.backup_requests(3 * LEASE_S) == []
    assert one.backup_requests(3.5 * LEASE_S) == []
    assert [backup_request.backups for backup_request in one.backup_requests(4 * LEASE_S)] == [
        frozenset()
    ]


def test_one_that_has_caught_up_is_asked_to_be_let_in() -> None:
    one = _primary(ONE)
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    ((peer, snapshot),) = snapshots_of(one, 0.0)
    assert (peer, snapshot.number) == (THREE, 0)
    assert one.backup_requests(0.0) == []
    three = replication(THREE)
    three.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    ack = three.join(snapshot)
    assert ack == Ack(RANGE, 0, EPOCH)
    one.acked(THREE, ack, 0.1)
    (request,) = one.backup_requests(0.1)
    assert request.backups == {THREE}
    assert one.primaries[RANGE].log.backups == (THREE,)


def test_one_that_joins_under_load_is_waited_for_before_it_is_asked_for() -> None:
    """What was seen already it must have, or a failover to it would take that back."""
    one = _primary(ONE)
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    list(snapshots_of(one, 0.0))
    log = one.primaries[RANGE].log
    log.decide(TABLE, delta(), (), ["seen"])
    assert log.release(0.0) == ["seen"]
    one.acked(THREE, Ack(RANGE, 0, EPOCH), 0.1)
    assert one.backup_requests(0.1) == []
    log.decide(TABLE, delta(), (), ["held"])
    one.granted(THREE, Grant(0.1, (RANGE,)), 0.1)
    assert log.release(0.1) == []
    one.acked(THREE, Ack(RANGE, 1, EPOCH), 0.2)
    assert [backup_request.backups for backup_request in one.backup_requests(0.2)] == [{THREE}]


def test_one_that_joins_and_does_not_get_on_is_waited_for_no_more() -> None:
    one = _primary(ONE)
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    list(snapshots_of(one, 0.0))
    log = one.primaries[RANGE].log
    log.decide(TABLE, delta(), (), [])
    log.release(0.0)
    one.acked(THREE, Ack(RANGE, 0, EPOCH), 0.1)
    one.backup_requests(0.1)
    assert THREE in log.backups
    one.backup_requests(0.1 + LEASE_S)
    assert not log.backups


def test_who_does_not_get_on_is_given_up_while_another_is_asked_for() -> None:
    """It may be away, and nothing would be released until it is back."""
    one = _primary(ONE)
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (TWO, THREE))), 0.0)
    list(snapshots_of(one, 0.0))
    log = one.primaries[RANGE].log
    log.decide(TABLE, delta(), (), ["seen"])
    assert log.release(0.0) == ["seen"]
    one.acked(TWO, Ack(RANGE, 1, EPOCH), 0.1)
    one.acked(THREE, Ack(RANGE, 0, EPOCH), 0.1)
    assert [backup_request.backups for backup_request in one.backup_requests(0.1)] == [{TWO}]
    assert set(log.backups) == {TWO, THREE}
    one.granted(TWO, Grant(LEASE_S, (RANGE,)), LEASE_S)
    one.granted(THREE, Grant(LEASE_S, (RANGE,)), LEASE_S)
    later_s = 2 * LEASE_S - 0.1
    assert [backup_request.backups for backup_request in one.backup_requests(later_s)] == [{TWO}]
    assert log.backups == (TWO,)
    ((peer, _),) = snapshots_of(one, later_s)
    assert peer == THREE


def test_one_that_falls_behind_while_it_joins_is_given_all_again() -> None:
    one = _primary(ONE)
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    list(snapshots_of(one, 0.0))
    log = one.primaries[RANGE].log
    log.decide(TABLE, delta(), (), [])
    log.release(0.0)
    assert list(snapshots_of(one, 0.1)) == []
    ((_, snapshot),) = snapshots_of(one, 5 * LEASE_S)
    assert snapshot.number == 1


def test_what_was_decided_alone_has_a_number_of_its_own() -> None:
    """Who was a backup before, and has the newest log record, does not have it."""
    one = _primary(ONE)
    log = one.primaries[RANGE].log
    assert one.decides_alone(RANGE)
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    ((_, snapshot),) = snapshots_of(one, 0.0)
    assert snapshot.number == log.number == 1
    assert not one.decides_alone(RANGE)  # somebody is listening now
    log.decide(TABLE, delta(), (), [])
    assert log.number == 2


def test_who_joins_has_to_make_what_is_held() -> None:
    """The values that come with a snapshot are those that were released."""
    one = _primary(ONE, TWO)
    record = Record(TABLE, RANGE, 1, 1, False, (), (), (0,))
    put = Put(record, "total")
    one.primaries[RANGE].log.decide(TABLE, delta(), (Put(record, None),), [put, "an answer"])
    one.observe(view(2, (PLACED_EPOCH, ONE, (TWO,), (THREE,))), 0.0)
    ((_, snapshot),) = snapshots_of(one, 0.0)
    assert (snapshot.number, snapshot.held) == (1, (put,))


def test_who_was_asked_for_counts_until_the_epoch_ends() -> None:
    """The request with it may be granted after the one without it was made (union)."""
    one = _primary(ONE, TWO)
    one.observe(view(2, (PLACED_EPOCH, ONE, (TWO,), (THREE,))), 0.0)
    ((_, snapshot),) = snapshots_of(one, 0.0)
    one.acked(THREE, Ack(RANGE, snapshot.number, EPOCH), 0.1)
    assert one.backup_requests(0.1)[0].backups == {TWO, THREE}
    one.backup_requests(0.1 + LEASE_S / 2)
    one.acked(TWO, Ack(RANGE, 0, EPOCH), LEASE_S)
    one.backup_requests(LEASE_S)
    assert one.backup_requests(0.2 + LEASE_S)[0].backups == {TWO}, "the other has fallen silent"
    one.lost(THREE)  # and its stream was opened again
    one.observe(view(3, (PLACED_EPOCH, ONE, (TWO,), ())), 4.0)
    log = one.primaries[RANGE].log
    assert set(log.backups) == {TWO, THREE}
    one.observe(view(4, (3, ONE, (TWO, THREE), ())), 4.0)
    assert set(log.backups) == {TWO, THREE}


def test_what_one_that_joins_had_before_it_gave_all_up_does_not_count() -> None:
    """An acknowledgement may come late: it was left out, and is to join, since it said that."""
    one = _primary(ONE, THREE)
    one.observe(view(2, (3, ONE, (), (THREE,))), 0.0)
    ((_, snapshot),) = snapshots_of(one, 0.0)
    one.acked(THREE, Ack(RANGE, snapshot.number, EPOCH), 0.1)
    assert one.backup_requests(0.1) == []
    one.acked(THREE, Ack(RANGE, snapshot.number, AssignmentEpoch(3)), 0.1)
    assert [backup_request.backups for backup_request in one.backup_requests(0.1)] == [{THREE}]


def test_what_one_that_joins_says_of_an_earlier_copy_does_not_count_for_the_next() -> None:
    """It missed a record that is not kept; what it had before says nothing of the copy that comes.
    Counted on, it would hold up all until that is there, and be given all again after a lease.
    """
    one = _primary(ONE)
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    list(snapshots_of(one, 0.0))
    log = one.primaries[RANGE].log
    log.decide(TABLE, delta(), (), [])
    log.release(0.0)
    one.acked(THREE, Ack(RANGE, 0, EPOCH), 0.1)
    one.backup_requests(0.1 + LEASE_S)
    ((_, snapshot),) = snapshots_of(one, 0.1 + LEASE_S)
    assert snapshot.number == 1
    one.acked(THREE, Ack(RANGE, 0, EPOCH), 0.2 + LEASE_S)
    assert one.backup_requests(0.3 + LEASE_S) == []
    assert log.backups == ()
    assert list(snapshots_of(one, 0.3 + 2 * LEASE_S)) == []
    one.acked(THREE, Ack(RANGE, 1, EPOCH), 0.4 + 2 * LEASE_S)
    (request,) = one.backup_requests(0.4 + 2 * LEASE_S)
    assert request.backups == {THREE}


def test_a_backup_that_left_a_new_range_has_nothing_of_it() -> None:
    """Begun again it would grant the lease, and acknowledge nothing for ever."""
    two = replication(TWO)
    placed = (PLACED_EPOCH, ONE, (TWO,), ())
    two.observe(view(1, placed), 0.0)
    two.leave(RANGE)
    two.observe(view(2, placed), 0.0)
    assert two.replicas == {}


def test_who_is_given_all_again_waits_out_what_it_granted_before() -> None:
    three = replication(THREE)
    three.observe(view(1, (4, ONE, (), (THREE,))), 0.0)
    three.join(Snapshot(RANGE, AssignmentEpoch(4), EPOCH, 7, {}))
    beat = Beat(1.0, ((RANGE, AssignmentEpoch(4)),))
    assert three.beat(beat, 1.0).range_ids == (RANGE,)
    three.join(Snapshot(RANGE, AssignmentEpoch(4), EPOCH, 9, {}))
    three.observe(view(2, (5, ONE, (THREE,), ())), 1.1)
    three.observe(view(3, (6, THREE, (), ())), 1.2)
    assert three.serve(0.9 + LEASE_S).ranges[0].primary is None


def test_what_a_deposed_primary_sends_late_does_not_replace_what_its_heir_sent() -> None:
    """Who joins may not have seen the view by which the heir is primary."""
    three = replication(THREE)
    three.observe(view(1, (3, ONE, (TWO,), (THREE,))), 0.0)
    of_heir = Snapshot(RANGE, AssignmentEpoch(4), AssignmentEpoch(4), 2, {})
    assert three.join(of_heir) == Ack(RANGE, 2, AssignmentEpoch(4))
    assert three.join(Snapshot(RANGE, AssignmentEpoch(3), EPOCH, 7, {})) is None
    assert three.replicas[RANGE].number == 2


def test_a_backup_that_does_not_get_on_with_what_it_lacks_is_asked_to_be_left_out() -> None:
    """It grants the lease, and what it does not acknowledge cannot be committed."""
    one = _primary(ONE, TWO)
    one.primaries[RANGE].log.decide(TABLE, delta(), (), [])
    at_s = 0.0
    while not (backup_requests := one.backup_requests(at_s)) and at_s < 10 * LEASE_S:
        at_s += LEASE_S / 4
        if at_s < 2 * LEASE_S:  # a copy of another range is before it
            one.sending({TWO}, {TWO}, at_s)
        one.granted(TWO, Grant(at_s, (RANGE,)), at_s)
    assert [backup_request.backups for backup_request in backup_requests] == [frozenset()]
    assert 7 * LEASE_S <= at_s + LEASE_S / 4 <= 7.5 * LEASE_S


def test_a_copy_that_is_on_its_way_is_not_begun_again() -> None:
    one = _primary(ONE)
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    assert len(list(snapshots_of(one, 0.0))) == 1
    one.sending({THREE}, {THREE}, 4 * LEASE_S)
    assert list(snapshots_of(one, 8 * LEASE_S)) == []
    assert len(list(snapshots_of(one, 9 * LEASE_S))) == 1


def test_one_that_joins_does_not_count_before_its_copy_is_there() -> None:
    """Steps would wait for all of it."""
    one = _primary(ONE)
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    list(snapshots_of(one, 0.0))
    one.backup_requests(0.0)
    assert one.primaries[RANGE].log.backups == ()


def test_no_record_is_sent_again_to_one_whose_copy_is_on_its_way() -> None:
    """It may have kept an older copy, and what was decided alone since then is in no record."""
    one = _primary(ONE, TWO)
    log = one.primaries[RANGE].log
    log.decide(TABLE, delta(), (), ["held"])
    one.observe(view(2, (PLACED_EPOCH, ONE, (TWO,), (THREE,))), 0.0)
    ((_, snapshot),) = snapshots_of(one, 0.0)
    log.decide(TABLE, delta(), (), [])
    assert [record.number for _, record in one.resends({TWO})] == [1, 2]
    assert list(one.resends({THREE})) == []
    one.acked(THREE, Ack(RANGE, snapshot.number, EPOCH), 0.1)
    assert [record.number for _, record in one.resends({THREE})] == [2]


def test_an_earlier_copy_with_the_newest_record_lacks_what_was_decided_alone() -> None:
    one = _primary(ONE)
    log = one.primaries[RANGE].log
    log.decide_alone()
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    ((_, snapshot),) = snapshots_of(one, 0.0)
    one.acked(THREE, Ack(RANGE, snapshot.number - 1, EPOCH), 0.1)
    one.backup_requests(0.1)
    assert not log.backups
    one.acked(THREE, Ack(RANGE, snapshot.number, EPOCH), 0.1)
    one.backup_requests(0.1)
    assert log.backups == (THREE,)


def test_a_server_without_room_is_given_nothing() -> None:
    one = _primary(ONE)
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    assert list(snapshots_of(one, 0.0, lambda node_id: node_id != THREE)) == []


def test_who_reads_from_a_deposed_primary_is_refused_whatever_was_held() -> None:
    one = _primary(ONE, TWO)
    answer = AnswerPull(7, TABLE, RANGE, 0, 0, {}, {}, None)
    refusal = RefusePull(8, TABLE, RANGE, WaitExpired("it took too long"))
    one.primaries[RANGE].log.follow([answer, refusal])
    _, effects = one.observe(view(2, (3, TWO, (), (ONE,))), 1.0)
    assert [(type(e), e.waiter) for e in effects if isinstance(e, RefusePull)] == [
        (RefusePull, 7),
        (RefusePull, 8),
    ]


def test_what_a_deposed_primary_held_is_given_up() -> None:
    one = _primary(ONE, TWO)
    lost, _ = one.observe(view(2, (3, TWO, (), (ONE,))), 1.0)
    assert lost == [RANGE]
    assert one.primaries == {}
    assert one.replicas == {}


def test_what_one_that_is_deposed_before_it_serves_held_is_given_up() -> None:
    """It waits for no lease any more, which would keep it from promising a change."""
    two = replication(TWO)
    two.observe(view(1, (PLACED_EPOCH, ONE, (TWO, THREE), ())), 0.0)
    two.serve(0.0)
    two.observe(view(2, (3, TWO, (THREE,), ())), 0.1)
    assert two.replicas[RANGE].is_promoted
    assert two.observe(view(3, (4, THREE, (), (TWO,))), 0.2) == ([RANGE], [])
    assert not two.waits
    assert two.replicas == {}
    of_heir = Snapshot(RANGE, AssignmentEpoch(4), AssignmentEpoch(4), 0, {})
    assert two.join(of_heir) == Ack(RANGE, 0, AssignmentEpoch(4))


# --- the scheduler


def replicated() -> tuple[Harness, list[Session]]:
    """A table on three servers, each of its ranges on two of them."""
    harness = Harness(server_count=3, replica_count=2, range_count=8)
    servers = [harness.join(Role.SERVER) for _ in range(3)]
    harness.create(harness.join(Role.WORKER))
    return harness, servers


def test_a_silent_primary_is_followed_by_its_backup_and_another_joins() -> None:
    harness, servers = replicated()
    before = harness.cluster.view.ranges
    assert all(len(r.backups) == 1 and r.primary not in r.backups for r in before)
    victim = before[0].primary
    harness.pass_time(4.0, *[s for s in servers if s.node_id != victim])
    for old, new in zip(before, harness.cluster.view.ranges, strict=True):
        if old.primary == victim:
            assert (new.primary,) == old.backups
            assert new.assignment_epoch == old.assignment_epoch + 1
            assert new.term == new.assignment_epoch
            assert (new.backups, new.catching_up) == ((victim,), ())  # it may live
        else:
            assert (new.primary, new.assignment_epoch) == (old.primary, old.assignment_epoch)
    (promoted, other) = [s for s in servers if s.node_id != victim]
    mine = [r for r in harness.cluster.view.ranges if r.primary == promoted.node_id]
    alone = [BackupRequest(r.range_id, r.assignment_epoch, frozenset()) for r in mine]
    assert harness.cluster.set_backups(promoted, alone).reply == ()
    harness.pass_time(1.0, promoted, other)
    for backup_request in alone:
        assert harness.cluster.view.ranges[backup_request.range_id].catching_up == (other.node_id,)


def test_a_request_that_came_too_late_is_void() -> None:
    harness, servers = replicated()
    assignment = harness.cluster.view.ranges[0]
    (primary,) = [s for s in servers if s.node_id == assignment.primary]
    epoch = assignment.assignment_epoch
    alone, as_it_was = frozenset[NodeId](), frozenset(assignment.backups)
    granted = harness.cluster.set_backups(primary, [BackupRequest(RANGE, epoch, alone)])
    assert granted.reply == ()
    before = harness.cluster.view
    late = harness.cluster.set_backups(primary, [BackupRequest(RANGE, epoch, as_it_was)])
    (other,) = [s for s in servers if s.node_id == assignment.backups[0]]
    next_epoch = AssignmentEpoch(epoch + 1)
    foreign = harness.cluster.set_backups(other, [BackupRequest(RANGE, next_epoch, alone)])
    assert (late.reply, foreign.reply) == ((RANGE,), (RANGE,))
    assert late.transitions == foreign.transitions == ()
    assert harness.cluster.view == before


# --- the worker


def test_what_another_server_held_goes_to_the_new_primary() -> None:
    window = PushWindow(1 << 20)
    window.assign({RANGE: ONE})
    window.connected(ONE)
    window.connected(TWO)
    window.submit(BlockPlace(TABLE, RANGE, 0), 1, "body", byte_count=8)
    window.submit(BlockPlace(TABLE, RANGE, 1), 1, "body", byte_count=8)
    window.poll(0.0)
    for sequence in (1, 2):
        window.reply(ONE, Reply(ReplyKind.RECEIVED, TABLE, RANGE, sequence), 0.1)
    window.seal(TABLE, 1, [RANGE], StepTerms())
    window.poll(0.2)
    window.reply(ONE, Reply(ReplyKind.RECEIVED, TABLE, RANGE, 3), 0.3)
    assert {state for _, state in window.open_entries()} == {EntryState.RECEIVED}
    window.assign({RANGE: TWO})
    assert {e.server for e in window.poll(0.4)} == {TWO}  # type: ignore[union-attr]
    assert [state for _, state in window.open_entries()] == [EntryState.SENT] * 3


# --- a table that was removed

REMOVED = replace(view(2, (PLACED_EPOCH, ONE, (TWO,), ())), next_table_id=2)


def _backup_of(number: int) -> Replication:
    """A backup that has so many log records of the table."""
    two = replication(TWO)
    made = replace(view(1, (PLACED_EPOCH, ONE, (TWO,), ())), tables=(make_table(),))
    two.observe(made, 0.0)
    two._machine.observe(two.serve(0.0))
    for each in range(1, number + 1):
        assert two.take(_log_record(each), lambda: fresh_copy(make_table(), range(4)))[0]
    return two


def _log_record(number: int, table_id: TableId = TABLE) -> LogRecord:
    return LogRecord(RANGE, EPOCH, EPOCH, number, table_id, delta(), ())


def test_a_backup_goes_on_with_the_numbers_of_a_table_that_was_removed() -> None:
    """Its primary has not heard so, or had decided it before: later records are of other tables."""
    two = _backup_of(2)
    two.observe(REMOVED, 0.0)
    assert two.replicas[RANGE].copies == {}
    for number in (3, 3, 4):
        assert two.take(_log_record(number), lambda: None) == (False, Ack(RANGE, number, EPOCH))
    assert two.take(_log_record(6), lambda: None) == (False, Ack(RANGE, 4, EPOCH)), "5 did not come"
    other = fresh_copy(make_table(), range(4))
    assert two.take(_log_record(5, TableId(2)), lambda: other) == (True, Ack(RANGE, 5, EPOCH))
    assert two.replicas[RANGE].copies == {TableId(2): other}


def test_a_backup_that_has_not_heard_of_a_table_waits_for_the_view_that_has_it() -> None:
    two = _backup_of(0)
    newer = _log_record(1, TableId(2))
    assert two.take(newer, lambda: None) == (False, Ack(RANGE, 0, EPOCH))


def test_a_copy_of_a_range_is_taken_without_what_was_removed() -> None:
    two = replication(TWO)
    second = replace(make_table(), table_id=TableId(2))
    joining = replace(view(2, (3, ONE, (), (TWO,))), tables=(second,), next_table_id=3)
    two.observe(joining, 0.0)
    record = Record(TABLE, RANGE, 1, 1, False, (), (), ())
    copies = {each: fresh_copy(make_table(), range(4)) for each in (TABLE, TableId(2))}
    came = Snapshot(RANGE, AssignmentEpoch(3), EPOCH, 7, copies, (Put(record, None),))
    living = two.living(came)
    assert (list(living.copies), living.held) == ([TableId(2)], ())
    assert two.join(living) == Ack(RANGE, 7, AssignmentEpoch(3))
    assert list(two.replicas[RANGE].copies) == [TableId(2)]


def test_a_copy_with_a_table_of_a_newer_view_is_not_taken_before_that_view() -> None:
    two = replication(TWO)
    joining = replace(view(2, (3, ONE, (), (TWO,))), tables=(make_table(),))
    two.observe(joining, 0.0)
    copies = {each: fresh_copy(make_table(), range(4)) for each in (TABLE, TableId(2))}
    came = Snapshot(RANGE, AssignmentEpoch(3), EPOCH, 7, copies)
    assert not two.knows(came)
    assert two.join(came) is None
    assert RANGE not in two.replicas
    second = replace(make_table(), table_id=TableId(2))
    two.observe(replace(joining, view_number=3, tables=(make_table(), second)), 0.0)
    assert two.knows(came)
    assert two.join(came) == Ack(RANGE, 7, AssignmentEpoch(3))


def test_what_waits_of_a_table_that_was_removed_is_not_done() -> None:
    """Its values are not there any more; what others decided meanwhile is done in its order."""
    one = _primary(ONE, TWO)
    log, record = one.primaries[RANGE].log, Record(TABLE, RANGE, 1, 1, False, (), (), ())
    other = Put(record._replace(table_id=TableId(2)), None)
    one._machine._tables = {TABLE: make_table()}
    read = AnswerPull(7, TABLE, RANGE, 1, 1, {}, {})
    log.decide(TABLE, delta(), (), [Put(record, None), read])
    log.decide(TableId(2), delta(), (), [other])
    effects = at_once(one.observing(REMOVED, 0.0))[1]
    assert [(type(each), each.waiter) for each in effects] == [(RefusePull, 7)]  # type: ignore[union-attr]
    one.acked(TWO, Ack(RANGE, 2, EPOCH), 0.0)
    one.granted(TWO, Grant(0.0, (RANGE,)), 0.0)
    assert one.release(0.0, [RANGE]) == [other]


def test_what_came_from_an_update_log_of_a_table_that_was_removed_is_nothing() -> None:
    two = replication(TWO)
    copies = {TABLE: fresh_copy(make_table(), range(4))}
    two.recover([Replica(RANGE, EPOCH, LEASE_S, EPOCH, copies, 4)])
    seen = replace(view(3, (3, TWO, (), ())), next_table_id=2)
    assert two.removed_by(seen) == {TABLE}
    two.observe(seen, 0.0)
    assert two.replicas[RANGE].copies == {}
    assert two.removed_by(seen) == frozenset()


def test_what_an_update_log_only_names_is_removed_too() -> None:
    two = replication(TWO)
    two.recover([Replica(RANGE, EPOCH, LEASE_S, EPOCH, {}, 4)], [TABLE, TableId(2)])
    seen = replace(view(3, (3, TWO, (), ())), tables=(make_table(),), next_table_id=3)
    assert two.removed_by(seen) == {TableId(2)}
    two.observe(seen, 0.0)
    assert two.removed_by(seen) == frozenset()
