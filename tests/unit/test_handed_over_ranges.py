"""A range at the servers that hand it over, and take it (SEMANTICS S9)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.cluster_view import (
    BackupRequest,
    ClusterView,
    Node,
    NodeState,
    RangeAssignment,
    Role,
)
from ps_core.errors import NotOwner
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.tables.table import Table
from ps_server.ranges.events import Place, PullEvent, RefusePull
from ps_server.ranges.range_copy import ShardCopy, fresh_copy
from ps_server.ranges.server_machine import ServerMachine
from ps_server.replication.messages import Ack, Beat, Grant, LogRecord
from ps_server.replication.range_roles import PLACED_EPOCH, Replication
from tests.unit.machine_harness import make_table
from tests.unit.test_replication import LEASE_S, delta
from tests.unit.test_suspended_ranges import MODEL, SPEC, refused, run
from tests.unit.test_suspended_ranges import Server as OneServer

ME, TARGET, OTHER = NodeId(1), NodeId(2), NodeId(3)
RANGE, TABLE = RangeId(0), TableId(1)
NOW_S = 50.0


def seen(
    epoch: int,
    primary: NodeId,
    *backups: NodeId,
    target: NodeId | None = None,
    term: int = PLACED_EPOCH,
) -> ClusterView:
    """A view, numbered as the range's epoch times ten."""
    (slots,) = key_ranges(1)
    assignment = RangeAssignment(
        RANGE, slots, AssignmentEpoch(epoch), primary, backups,
        initial_holders=(ME, TARGET, OTHER), term=AssignmentEpoch(term),
        placed_epoch=PLACED_EPOCH, hand_over_to=target,
    )  # fmt: skip
    number = 10 * epoch + (target is not None)
    return ClusterView(number, "c", 1, 3, (), (assignment,), (make_table(),))


class Server:
    """The replication of one server, and its machine."""

    def __init__(self, node_id: NodeId) -> None:
        self.machine = ServerMachine(node_id, 1)
        self.replication = Replication(node_id, self.machine, LEASE_S)
        self.see(seen(PLACED_EPOCH, ME, TARGET, OTHER))

    def see(self, view: ClusterView, now_s: float = NOW_S) -> list[object]:
        _, effects = self.replication.observe(view, now_s)
        self.serve(now_s)
        return list(effects)

    def serve(self, now_s: float = NOW_S) -> RangeAssignment:
        view = self.replication.serve(now_s)
        self.machine.observe(view)
        return view.ranges[RANGE]

    def decide(self, *effects: object) -> LogRecord:
        log = self.replication.primaries[RANGE].log
        return log.decide(TABLE, delta(), (), effects)

    def ack(self, number: int, *backups: NodeId) -> None:
        for backup in backups:
            self.replication.acked(backup, Ack(RANGE, number, PLACED_EPOCH), NOW_S)

    def grant(self, *backups: NodeId, now_s: float = NOW_S) -> list[set[RangeId]]:
        grant = Grant(now_s, (RANGE,))
        return [self.replication.granted(backup, grant, now_s) for backup in backups]

    def release(self, now_s: float = NOW_S) -> list[object]:
        return self.replication.release(now_s, [RANGE])

    def asks(self, now_s: float = NOW_S) -> list[BackupRequest]:
        return self.replication.backup_requests(now_s)


ADVISED = seen(PLACED_EPOCH, ME, TARGET, OTHER, target=TARGET)
ASKED = BackupRequest(RANGE, PLACED_EPOCH, frozenset((TARGET, OTHER)), hand_over_to=TARGET)


@pytest.fixture
def former() -> Server:
    """It has a decision on its way, and is advised to hand the range over."""
    server = Server(ME)
    server.grant(TARGET, OTHER)
    server.decide("an answer")
    server.see(ADVISED)
    return server


def test_who_is_advised_takes_nothing_more_and_asks_when_all_have_everything(
    former: Server,
) -> None:
    """PR-3."""
    assert former.machine.assignment_epoch(RANGE) == 0
    assert former.machine.shards == {}
    assert former.asks() == []
    former.ack(1, TARGET)
    assert former.asks() == []
    former.ack(1, OTHER)
    assert former.asks() == []
    assert former.release() == ["an answer"]
    assert former.asks() == [ASKED]


def test_what_came_without_a_record_is_not_handed_over_to_who_has_no_copy_of_it() -> None:
    """PR-3. Nothing waits, and the others' newest record is of before."""
    server = Server(ME)
    server.grant(TARGET, OTHER)
    server.replication.primaries[RANGE].log.begin_anew()
    server.see(ADVISED)
    assert server.asks() == []
    server.ack(1, TARGET, OTHER)
    assert server.asks() == [ASKED]


def test_who_has_asked_releases_nothing_whoever_grants_it(former: Server) -> None:
    """The request may have been granted: PR-3."""
    former.ack(1, TARGET, OTHER)
    former.release()
    former.asks()
    former.replication.primaries[RANGE].log.follow(["a read"])
    former.grant(TARGET, OTHER)
    assert former.release() == []
    later_s = NOW_S + 100 * LEASE_S
    former.grant(TARGET, OTHER, now_s=later_s)
    assert former.serve(later_s).primary is None
    assert former.asks(later_s) == [ASKED]
    former.see(seen(PLACED_EPOCH, ME, TARGET, OTHER), later_s)  # no more advice; it has asked
    assert former.asks(later_s) == [ASKED]
    assert former.release(later_s) == []


def test_who_waits_for_the_answer_asks_at_once_no_more(former: Server) -> None:
    """It sent beats as fast as its backups answered them, until the scheduler had answered."""
    former.ack(1, TARGET, OTHER)
    former.release()
    before = former.replication.can_hand_over
    assert former.asks() == [ASKED]
    assert (before, former.replication.can_hand_over) == (True, False)
    assert former.asks() == [ASKED]


def test_a_newer_epoch_ends_that(former: Server) -> None:
    former.ack(1, TARGET, OTHER)
    former.release()
    former.asks()
    former.see(seen(3, ME, TARGET, OTHER))
    assert former.machine.assignment_epoch(RANGE) == 3
    assert len(former.machine.shards) == 1
    former.decide("another")
    former.grant(TARGET, OTHER)
    former.ack(2, TARGET, OTHER)
    assert former.release() == ["another"]


def test_who_cannot_hand_over_in_time_goes_on_until_it_is_advised_anew(former: Server) -> None:
    """Workers wait no longer for a backup that is slow."""
    soon_s, late_s = NOW_S + 0.2, NOW_S + 0.31
    assert not former.replication.must_serve(soon_s)
    assert former.replication.must_serve(late_s)
    assert former.serve(late_s).primary == ME
    assert len(former.machine.shards) == 1
    former.ack(1, TARGET, OTHER)
    former.release(late_s)
    former.see(replace(ADVISED, view_number=30), late_s)
    assert former.asks(late_s) == []
    former.see(replace(seen(PLACED_EPOCH, ME, TARGET, OTHER), view_number=31), late_s)
    former.see(replace(ADVISED, view_number=32), late_s)
    assert former.asks(late_s) == [ASKED]


def test_advice_that_ends_before_it_has_asked_ends_the_stop(former: Server) -> None:
    former.see(replace(seen(PLACED_EPOCH, ME, TARGET, OTHER), view_number=30))
    assert former.serve().primary == ME
    assert not former.replication.is_handing_over


def test_reads_that_wait_are_refused() -> None:
    server = Server(ME)
    read = PullEvent(Place(TABLE, RANGE, PLACED_EPOCH), 7, None, 5, True, 99.0)
    assert server.machine.pull(read, NOW_S) == []
    (refusal,) = server.see(ADVISED)
    assert isinstance(refusal, RefusePull)
    assert refusal.waiter == 7


def test_who_has_handed_over_backs_the_range_up_with_what_it_has(former: Server) -> None:
    """It follows the new primary's first record, under the same term, and grants it the lease."""
    former.ack(1, TARGET, OTHER)
    former.release()
    former.asks()
    former.see(seen(4, TARGET, ME, OTHER))
    assert former.replication.handed_over == {RANGE: 0.0}
    assert (former.replication.primaries, former.replication.suspended) == ({}, {})
    assert former.machine.suspended == {}
    epoch = AssignmentEpoch(4)
    assert former.replication.beat(Beat(NOW_S, ((RANGE, epoch),)), NOW_S).range_ids == (RANGE,)
    record = LogRecord(RANGE, PLACED_EPOCH, epoch, 2, TABLE, delta(), ())
    assert former.replication.take(record, lambda: None) == (True, Ack(RANGE, 2, epoch))


def test_who_backs_a_range_up_no_more_was_not_replaced_as_its_primary(former: Server) -> None:
    """Its log warned of that after each hand-over: a backup beyond the need is left out then."""
    former.ack(1, TARGET, OTHER)
    former.release()
    former.asks()
    former.see(seen(4, TARGET, ME, OTHER))
    former.see(seen(5, TARGET, OTHER))
    assert former.replication.not_backed_up == {RANGE}
    deposed = Server(ME)
    deposed.see(seen(3, TARGET, ME, OTHER, term=3))
    deposed.see(seen(4, TARGET, OTHER, term=3))
    assert deposed.replication.not_backed_up == set()


@pytest.mark.parametrize("backups", [(ME, OTHER), (OTHER,)])
def test_a_failover_meanwhile_is_one(former: Server, backups: tuple[NodeId, ...]) -> None:
    """The scheduler had not got the request: who is in its place may lack nothing, and has a term
    of its own.
    """
    former.ack(1, TARGET, OTHER)
    former.release()
    former.asks()
    former.see(seen(3, TARGET, *backups, term=3))
    assert former.replication.handed_over == {}
    assert set(former.replication.suspended) == ({RANGE} if ME in backups else set())
    if ME in backups:
        former.see(seen(4, ME, TARGET, OTHER, term=4))
        assert len(former.machine.shards) == 1
        assert former.replication.primaries[RANGE].log.candidates == {TARGET, OTHER}


def test_the_target_serves_at_once_and_goes_on_with_the_numbers() -> None:
    """It waits out no lease that it granted, and leaves nobody out: all have the same records."""
    target = Server(TARGET)
    for number in (1, 2):
        record = LogRecord(RANGE, PLACED_EPOCH, PLACED_EPOCH, number, TABLE, delta(), ())
        assert target.replication.take(record, _copy)[0]
    target.replication.beat(Beat(NOW_S, ((RANGE, PLACED_EPOCH),)), NOW_S)
    target.see(seen(4, TARGET, ME, OTHER))
    assert target.serve().primary == TARGET
    log = target.replication.primaries[RANGE].log
    assert (log.number, log.term, log.candidates) == (2, PLACED_EPOCH, frozenset())
    assert target.asks() == []
    record = target.decide("an answer")
    assert (record.number, record.term, record.assignment_epoch) == (3, PLACED_EPOCH, 4)
    assert target.release() == []


def test_records_that_came_before_the_view_are_sent_again_with_the_first_grant() -> None:
    """The former primary refuses them until it has heard that it is none any more."""
    target = Server(TARGET)
    target.see(seen(4, TARGET, ME, OTHER))
    target.decide("an answer")
    assert target.grant(OTHER, ME) == [{RANGE}, {RANGE}]
    assert target.grant(OTHER, ME) == [set(), set()]
    assert not target.replication.awaits_grants
    target.ack(1, ME, OTHER)
    assert target.release() == ["an answer"]


def test_a_former_primary_that_saw_no_view_goes_on_when_the_range_comes_back(
    former: Server,
) -> None:
    """Its target could show nothing: it needs the word of everyone whom the view names."""
    former.ack(1, TARGET, OTHER)
    former.release()
    former.asks()
    former.see(seen(6, ME, TARGET, OTHER))
    log = former.replication.primaries[RANGE].log
    assert (log.term, log.candidates, log.is_given_up) == (PLACED_EPOCH, frozenset(), False)
    former.decide("more")
    assert former.release() == []
    former.grant(TARGET, OTHER)
    former.ack(2, TARGET, OTHER)
    assert former.release() == ["more"]


@pytest.mark.parametrize("what", ["asked", "target joins", "closed"])
def test_nobody_stops_while_its_backups_change(what: str) -> None:
    """The request would not be granted, or values are about to come."""
    server = Server(ME)
    primary = server.replication.primaries[RANGE]
    if what == "asked":
        server.asks(NOW_S + 10 * LEASE_S)
    elif what == "closed":
        primary.close()
    target = NodeId(9) if what == "target joins" else TARGET
    server.see(seen(PLACED_EPOCH, ME, TARGET, OTHER, target=target))
    assert not server.replication.is_handing_over
    assert server.serve().primary == ME


def _copy() -> ShardCopy:
    return fresh_copy(make_table(), range(4))


# --- the values


def _sees(server: OneServer, epoch: int, primary: NodeId, *, advised: bool = False) -> None:
    """A view with the only range at this primary, and at the other server."""
    heir = NodeId(7)
    (slots,) = key_ranges(1)
    backup = heir if primary == ME else ME
    assignment = RangeAssignment(
        RANGE, slots, AssignmentEpoch(epoch), primary, (backup,), (),
        term=PLACED_EPOCH, hand_over_to=heir if advised else None,
    )  # fmt: skip
    server.number += 1
    node = Node(heir, Incarnation(20), Role.SERVER, 0, "h:1", NodeState.ALIVE)
    table = Table(MODEL, 0, SPEC)
    server.node.observe(
        ClusterView(server.number, "cluster", 2, 2, (node,), (assignment,), (table,))
    )
    server.node.works.finish()


def test_a_step_that_waits_for_others_is_gone_with_its_sum_and_comes_again() -> None:
    """Its worker is told that this server is not the primary; what is decided stays, to the bit."""

    async def scenario(server: OneServer) -> None:
        server.push(0, 2)
        (log,) = (primary.log for primary in server.replication.primaries.values())
        heir = NodeId(7)
        _sees(server, 2, ME, advised=True)
        assert server.node.machine.shards == {}
        server.replication.acked(heir, Ack(RANGE, log.number, PLACED_EPOCH), 5.0)
        server.replication.granted(heir, Grant(5.0, (RANGE,)), 5.0)
        server.node.tick()
        server.node.works.finish()
        (asked,) = server.asks()
        assert asked.hand_over_to == heir
        store = server.node.shards.stores[MODEL, RANGE]
        assert store._accumulators
        _sees(server, 4, heir)
        assert not store._accumulators
        assert server.replication.handed_over.keys() == {RANGE}
        assert server.node.machine.gate_bytes == 0
        assert all(isinstance(error, NotOwner) for error in refused(server.streams[0]))
        assert refused(server.streams[0])

    run(scenario)
