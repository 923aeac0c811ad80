"""The machines of replication, without a network: what is held, what is released, who serves."""

from __future__ import annotations

from ps_core.cluster_view import BackupWish, ClusterView, RangeAssignment, Role, Session
from ps_core.errors import WaitExpired
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.ledger import Ending, Outcome, ReplyKind
from ps_server.changes import Put
from ps_server.events import AnswerPull, Apply, Effect, Record, RefusePull
from ps_server.part_copy import (
    Delta,
    WorkerFacts,
    copy_of,
    delta_of,
    facts_of,
    fresh_copy,
    restore,
)
from ps_server.range_log import RangeLog
from ps_server.replica import MAX_DRIFT
from ps_server.replication import PLACED_EPOCH, Ack, Beat, Grant, Replication, Snapshot
from ps_server.server_machine import ServerMachine
from ps_worker.push_entries import BlockPlace, EntryState, Reply, SealTerms
from ps_worker.push_window import PushWindow
from tests.unit.cluster_harness import Harness
from tests.unit.machine_harness import Bench, make_table, outcomes

LEASE_S = 3.0
RANGE = RangeId(0)
EPOCH = AssignmentEpoch(2)
TABLE = TableId(1)
ONE, TWO, THREE = NodeId(1), NodeId(2), NodeId(3)


def delta(*endings: tuple[Incarnation, int, Ending]) -> Delta:
    table = make_table()
    workers = tuple(WorkerFacts(i, 0, 0, 0, None, 0, 0) for i, _, _ in endings)
    return Delta(fresh_copy(table, range(4)).facts, workers, endings, ())


def log_with(*backups: NodeId) -> RangeLog:
    log = RangeLog(RANGE, EPOCH, backups, LEASE_S)
    for backup in backups:
        log.granted(backup, 0.0)
    return log


# --- from one primary to the next


def moved(at: Bench) -> Bench:
    """The same range at another server, as its copy has it."""
    other = Bench(at.table, workers=at.workers)
    restore(copy_of(at.machine.state), other.machine.state, at.now_s)
    return other


def test_what_was_answered_is_answered_again_alike() -> None:
    at = Bench(make_table(), workers=2)
    for rank in range(2):
        at.push(rank, 1, 1, block=rank)
        at.seal(rank, 2, 1)
    before = outcomes(at.effects)
    other = moved(at)
    for rank in range(2):
        again = other.push(rank, 1, 1, block=rank) + other.seal(rank, 2, 1)
        assert outcomes(again) == {k: v for k, v in before.items() if k[0] == rank}
    assert other.machine.state.versions == at.machine.state.versions
    assert other.machine.state.clock == 1


def test_what_was_not_answered_comes_again_and_counts_once() -> None:
    at = Bench(make_table(), workers=2)
    at.push(0, 1, 1)
    at.seal(0, 2, 1)
    other = moved(at)
    other.push(0, 1, 1)
    other.seal(0, 2, 1)
    other.push(1, 1, 1)
    assert set(outcomes(other.seal(1, 2, 1)).values()) == {Outcome.APPLIED}
    assert other.machine.state.update_count == 1


def test_a_goodbye_is_kept_if_it_was_answered() -> None:
    at = Bench(make_table(), workers=2)
    at.seal(1, 1, 1, skip=True, last=True)
    other = moved(at)
    other.push(0, 1, 1)
    assert outcomes(other.seal(0, 2, 1))[0, 2] is Outcome.APPLIED


def test_a_goodbye_that_was_not_answered_is_said_again() -> None:
    at = Bench(make_table(), workers=2)
    at.push(1, 1, 1)
    at.seal(1, 2, 1, last=True)  # its step counts: the update waits for the other
    other = moved(at)
    assert not other.machine.state.by_rank[1].has_left
    other.push(0, 1, 1)
    assert (0, 2) not in outcomes(other.seal(0, 2, 1))
    other.push(1, 1, 1)
    other.seal(1, 2, 1, last=True)
    assert other.machine.state.clock == 1


def test_a_sum_that_waits_for_its_scale_waits_at_the_next_primary() -> None:
    at = Bench(make_table(), workers=1)
    at.push(0, 1, 1)
    at.seal(0, 2, 1, clip_scale=0.5)
    other = moved(at)
    assert other.machine.state.clock == 0
    assert outcomes(other.scale(0, 3, 1, 0.25)) == {(0, 3): Outcome.APPLIED}
    assert other.machine.state.clock == 1
    assert other.machine.state.versions[0] == 1


def test_a_read_that_may_have_been_answered_counts_in_what_is_promised() -> None:
    """A change that is promised by the new primary is after every step that was read for."""
    at = Bench(make_table(), workers=1)
    at.push(0, 1, 1)
    at.seal(0, 2, 1)
    at.pull(0, 1)  # for its step 2
    assert at.machine.state.read_clock == 2
    assert moved(at).machine.state.read_clock == 2


def test_a_copy_is_what_the_state_is() -> None:
    """Told by deltas or as a whole, a backup knows the same."""
    at = Bench(make_table(), workers=2)
    told = fresh_copy(at.table, range(4))
    for rank, sequence, clock in ((0, 1, 1), (1, 1, 1), (1, 3, 2), (0, 3, 2)):
        for effects in (at.push(rank, sequence, clock), at.seal(rank, sequence + 1, clock)):
            told.take(_delta(at, effects))
    whole = copy_of(at.machine.state)
    assert told.facts == whole.facts == facts_of(at.machine.state)
    assert told.versions == whole.versions
    for incarnation, worker in whole.workers.items():
        other = told.workers[incarnation]
        assert (other.facts, other.own_updates) == (worker.facts, worker.own_updates)
        assert other.ledger.low_water == worker.ledger.low_water


def _delta(at: Bench, effects: list[Effect]) -> Delta:
    counted = [effect.record for effect in effects if isinstance(effect, Apply)]
    return delta_of(at.machine.state, effects, counted)


# --- one server's ranges


_Range = tuple[int, NodeId | None, tuple[NodeId, ...], tuple[NodeId, ...]]


def view(number: int, *ranges: _Range) -> ClusterView:
    """Ranges by epoch, primary, backups, and who joins."""
    slots = key_ranges(len(ranges))
    return ClusterView(
        number, "c", 1, 3, (),
        tuple(
            RangeAssignment(RangeId(i), slots[i], AssignmentEpoch(r[0]), *r[1:])
            for i, r in enumerate(ranges)
        ),
        (),
    )  # fmt: skip


def replication(node_id: NodeId) -> Replication:
    return Replication(node_id, ServerMachine(node_id, 1), LEASE_S)


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
    assert two.logs[RANGE].backups == ()


def _primary(node_id: NodeId, *backups: NodeId) -> Replication:
    found = replication(node_id)
    found.observe(view(1, (PLACED_EPOCH, node_id, backups, ())), 0.0)
    found.serve(0.0)
    return found


def test_one_that_is_promoted_lets_nothing_be_seen_before_the_other_backups_are_left_out() -> None:
    """Each of them could still be made primary in its place, and may lack its newest batch."""
    two = replication(TWO)
    two.observe(view(1, (PLACED_EPOCH, ONE, (TWO, THREE), ())), 0.0)
    two.serve(0.0)
    two.observe(view(2, (3, TWO, (THREE,), ())), 0.0)
    two.serve(LEASE_S)
    log = two.logs[RANGE]
    two.granted(THREE, Grant(LEASE_S, (RANGE,)), LEASE_S)
    log.follow(["a read"])
    assert log.release(LEASE_S) == []
    assert two.wishes(LEASE_S) == [BackupWish(RANGE, AssignmentEpoch(3), frozenset())]
    two.observe(view(3, (4, TWO, (), (THREE,))), LEASE_S)
    assert log.release(LEASE_S) == ["a read"]


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
    assert two.logs == {}
    assert two.missing == (RANGE,)


def test_a_silent_backup_is_asked_to_be_left_out() -> None:
    one = _primary(ONE, TWO)
    assert one.wishes(LEASE_S / 2) == []
    (request,) = one.wishes(LEASE_S)
    assert request.backups == frozenset()
    assert one.logs[RANGE].backups == (TWO,), "its word counts until it has been left out"
    one.observe(view(2, (3, ONE, (), ())), LEASE_S)
    assert one.logs[RANGE].backups == ()
    assert one.wishes(LEASE_S) == []


def test_a_primary_that_was_paused_listens_before_it_takes_backups_for_dead() -> None:
    """What they said lies unread; left out, they would have to join anew."""
    one = _primary(ONE, TWO)
    assert one.wishes(0.1) == []
    assert one.wishes(3 * LEASE_S) == []
    assert one.wishes(3.5 * LEASE_S) == []
    assert [wish.backups for wish in one.wishes(4 * LEASE_S)] == [frozenset()]


def test_one_that_has_caught_up_is_asked_to_be_let_in() -> None:
    one = _primary(ONE)
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    ((peer, snapshot),) = one.snapshots(0.0)
    assert (peer, snapshot.number) == (THREE, 0)
    assert one.wishes(0.0) == []
    three = replication(THREE)
    three.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    ack = three.join(snapshot)
    assert ack == Ack(RANGE, 0, EPOCH)
    one.acked(THREE, ack, 0.1)
    (request,) = one.wishes(0.1)
    assert request.backups == {THREE}
    assert one.logs[RANGE].backups == (THREE,)


def test_one_that_joins_under_load_is_waited_for_before_it_is_asked_for() -> None:
    """What was seen already it must have, or a failover to it would take that back."""
    one = _primary(ONE)
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    list(one.snapshots(0.0))
    log = one.logs[RANGE]
    log.decide(TABLE, delta(), (), ["seen"])
    assert log.release(0.0) == ["seen"]
    one.acked(THREE, Ack(RANGE, 0, EPOCH), 0.1)
    assert one.wishes(0.1) == []
    log.decide(TABLE, delta(), (), ["held"])
    one.granted(THREE, Grant(0.1, (RANGE,)), 0.1)
    assert log.release(0.1) == []
    one.acked(THREE, Ack(RANGE, 1, EPOCH), 0.2)
    assert [wish.backups for wish in one.wishes(0.2)] == [{THREE}]


def test_one_that_joins_and_does_not_get_on_is_waited_for_no_more() -> None:
    one = _primary(ONE)
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    list(one.snapshots(0.0))
    log = one.logs[RANGE]
    log.decide(TABLE, delta(), (), [])
    log.release(0.0)
    one.acked(THREE, Ack(RANGE, 0, EPOCH), 0.1)
    one.wishes(0.1)
    assert THREE in log.backups
    one.wishes(0.1 + LEASE_S)
    assert not log.backups


def test_one_that_falls_behind_while_it_joins_is_given_all_again() -> None:
    one = _primary(ONE)
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    list(one.snapshots(0.0))
    log = one.logs[RANGE]
    log.decide(TABLE, delta(), (), [])
    log.release(0.0)
    assert list(one.snapshots(0.1)) == []
    ((_, snapshot),) = one.snapshots(5 * LEASE_S)
    assert snapshot.number == 1


def test_what_was_decided_alone_has_a_number_of_its_own() -> None:
    """Who was a backup before, and has the newest batch, does not have it."""
    one = _primary(ONE)
    log = one.logs[RANGE]
    assert one.decides_alone(RANGE)
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    ((_, snapshot),) = one.snapshots(0.0)
    assert snapshot.number == log.number == 1
    assert not one.decides_alone(RANGE)  # somebody is listening now
    log.decide(TABLE, delta(), (), [])
    assert log.number == 2


def test_who_joins_has_to_make_what_is_held() -> None:
    """The values that come with a snapshot are those that were released."""
    one = _primary(ONE, TWO)
    record = Record(TABLE, RANGE, 1, 1, False, (), (), (0,))
    put = Put(record, "total")
    one.logs[RANGE].decide(TABLE, delta(), (Put(record, None),), [put, "an answer"])
    one.observe(view(2, (PLACED_EPOCH, ONE, (TWO,), (THREE,))), 0.0)
    ((_, snapshot),) = one.snapshots(0.0)
    assert (snapshot.number, snapshot.held) == (1, (put,))


def test_who_was_asked_for_counts_until_the_epoch_ends() -> None:
    """The request with it may be granted after the one without it was made (union)."""
    one = _primary(ONE, TWO)
    one.observe(view(2, (PLACED_EPOCH, ONE, (TWO,), (THREE,))), 0.0)
    ((_, snapshot),) = one.snapshots(0.0)
    one.acked(THREE, Ack(RANGE, snapshot.number, EPOCH), 0.1)
    assert one.wishes(0.1)[0].backups == {TWO, THREE}
    one.wishes(0.1 + LEASE_S / 2)
    one.acked(TWO, Ack(RANGE, 0, EPOCH), LEASE_S)
    one.wishes(LEASE_S)
    assert one.wishes(0.2 + LEASE_S)[0].backups == {TWO}, "the other has fallen silent"
    one.lost(THREE)  # and its stream was opened again
    one.observe(view(3, (PLACED_EPOCH, ONE, (TWO,), ())), 4.0)
    log = one.logs[RANGE]
    assert set(log.backups) == {TWO, THREE}
    one.observe(view(4, (3, ONE, (TWO, THREE), ())), 4.0)
    assert set(log.backups) == {TWO, THREE}


def test_what_one_that_joins_had_before_it_gave_all_up_does_not_count() -> None:
    """An acknowledgement may come late: it was left out, and is to join, since it said that."""
    one = _primary(ONE, THREE)
    one.observe(view(2, (3, ONE, (), (THREE,))), 0.0)
    ((_, snapshot),) = one.snapshots(0.0)
    one.acked(THREE, Ack(RANGE, snapshot.number, EPOCH), 0.1)
    assert one.wishes(0.1) == []
    one.acked(THREE, Ack(RANGE, snapshot.number, AssignmentEpoch(3)), 0.1)
    assert [wish.backups for wish in one.wishes(0.1)] == [{THREE}]


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


def test_a_server_without_room_is_given_nothing() -> None:
    one = _primary(ONE)
    one.observe(view(2, (PLACED_EPOCH, ONE, (), (THREE,))), 0.0)
    assert list(one.snapshots(0.0, lambda node_id: node_id != THREE)) == []


def test_who_reads_from_a_deposed_primary_is_refused_whatever_was_held() -> None:
    one = _primary(ONE, TWO)
    answer = AnswerPull(7, TABLE, RANGE, 0, 0, {}, {}, None)
    refusal = RefusePull(8, TABLE, RANGE, WaitExpired("it took too long"))
    one.logs[RANGE].follow([answer, refusal])
    _, effects = one.observe(view(2, (3, TWO, (), (ONE,))), 1.0)
    assert [(type(e), e.waiter) for e in effects if isinstance(e, RefusePull)] == [
        (RefusePull, 7),
        (RefusePull, 8),
    ]


def test_what_a_deposed_primary_held_is_given_up() -> None:
    one = _primary(ONE, TWO)
    lost, _ = one.observe(view(2, (3, TWO, (), (ONE,))), 1.0)
    assert lost == [RANGE]
    assert one.logs == {}
    assert one.replicas == {}


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
            assert new.backups == ()
            assert victim not in new.joining
            assert len(new.joining) == 1
        else:
            assert (new.primary, new.assignment_epoch) == (old.primary, old.assignment_epoch)


def test_a_request_that_came_too_late_is_void() -> None:
    harness, servers = replicated()
    assignment = harness.cluster.view.ranges[0]
    (primary,) = [s for s in servers if s.node_id == assignment.primary]
    epoch = assignment.assignment_epoch
    alone, as_it_was = frozenset[NodeId](), frozenset(assignment.backups)
    granted = harness.cluster.set_backups(primary, [BackupWish(RANGE, epoch, alone)])
    assert granted.reply == ()
    before = harness.cluster.view
    late = harness.cluster.set_backups(primary, [BackupWish(RANGE, epoch, as_it_was)])
    (other,) = [s for s in servers if s.node_id == assignment.backups[0]]
    next_epoch = AssignmentEpoch(epoch + 1)
    foreign = harness.cluster.set_backups(other, [BackupWish(RANGE, next_epoch, alone)])
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
    window.seal(TABLE, 1, [RANGE], SealTerms())
    window.poll(0.2)
    window.reply(ONE, Reply(ReplyKind.RECEIVED, TABLE, RANGE, 3), 0.3)
    assert {state for _, state in window.open_entries()} == {EntryState.RECEIVED}
    window.assign({RANGE: TWO})
    assert {e.server for e in window.poll(0.4)} == {TWO}  # type: ignore[union-attr]
    assert [state for _, state in window.open_entries()] == [EntryState.SENT] * 3
