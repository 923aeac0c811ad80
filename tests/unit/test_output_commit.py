"""When a server tells the scheduler what it has prepared: as soon as its backups know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ps_core.change import TableChange
from ps_core.cluster_view import ClusterView
from ps_core.consistency import parsed
from ps_core.keys import AssignmentEpoch, Incarnation, RangeId
from ps_core.sliced_work import Work, at_once
from ps_server.ranges.events import (
    Effect,
    Place,
    PullEvent,
    PushEvent,
    Sender,
    WithdrawEvent,
)
from ps_server.ranges.range_copy import fresh_copy
from ps_server.ranges.server_machine import PreparedChange, ServerMachine
from ps_server.replication.messages import Ack, Grant, LogRecord
from ps_server.replication.output_commit import OutputCommit
from ps_server.replication.range_roles import Replication
from tests.unit.machine_harness import make_table
from tests.unit.snapshots import snapshots_of
from tests.unit.test_replication import EPOCH, LEASE_S, ONE, RANGE, TWO, view

TABLE = make_table()


def _long(record: LogRecord) -> Work[None]:
    del record
    yield


class Server:
    """A server whose range needs one more that has what is committed, or none."""

    def __init__(self, min_in_sync: int = 2, *, has_update_log: bool = False) -> None:
        self.machine = ServerMachine(ONE, 1)
        self.replication = Replication(
            ONE, self.machine, LEASE_S, min_in_sync, has_update_log=has_update_log
        )
        self.sent: list[LogRecord] = []
        self.output = OutputCommit(
            self.machine,
            self.replication,
            NotImplemented,
            lambda _, record: self.sent.append(record),
            encode=_long,
        )

    def see(self, seen: ClusterView, change_number: int = 1) -> None:
        """A newer view, with a change that is proposed, as `ps_server.service.node` does."""
        table = replace(TABLE, proposed=TableChange(change_number, 0, parsed("asp")))
        self.replication.observe(replace(seen, tables=(table,)), 0.0)
        self.machine.observe(self.replication.serve(0.0))
        at_once(self.output.deciding(at_once(self.machine.observing_changes(0.0)), lambda: 0.0))
        at_once(self.output.telling_prepared(lambda: 0.0))


def test_what_could_be_told_to_nobody_is_promised_when_it_came_with_something_else() -> None:
    server = Server()
    server.see(view(1, (2, ONE, (), ())))
    server.see(view(2, (2, ONE, (), (TWO,))))
    assert not list(server.output.prepared_changes)
    ((_, snapshot),) = snapshots_of(server.output, 0.0)
    place, sender = Place(TABLE.table_id, RANGE, EPOCH), Sender(Incarnation(11), 0, 11)
    effects = server.machine.entry(WithdrawEvent(place, sender, 1), 0.0)
    at_once(server.output.deciding(effects, lambda: 0.0))
    (record,) = server.sent
    assert (record.number, record.delta.facts.prepared) == (snapshot.number + 1, 1)
    server.replication.acked(TWO, Ack(RANGE, record.number, EPOCH), 0.0)
    (backup_request,) = server.replication.backup_requests(0.0)
    assert backup_request.backups == {TWO}
    server.replication.granted(TWO, Grant(0.0, (RANGE,)), 0.0)
    server.see(view(3, (3, ONE, (TWO,), ())))
    server.output.release(0.0, [RANGE])
    server.see(view(4, (3, ONE, (TWO,), ())))
    assert list(server.output.prepared_changes) == [PreparedChange(TABLE.table_id, 1, 0)]


def test_nothing_is_promised_of_a_table_that_has_blocks_in_a_missing_range() -> None:
    """Whoever comes with that range may have reached a later clock."""
    server, other = Server(min_in_sync=1), RangeId(1)
    server.see(view(1, (2, ONE, (), ()), (2, TWO, (ONE,), ())))
    assert list(server.output.prepared_changes) == [PreparedChange(TABLE.table_id, 1, 0)]
    server.replication.leave(other)
    server.see(view(2, (2, ONE, (), ()), (3, ONE, (), ())))
    assert server.replication.missing == (other,)
    assert not list(server.output.prepared_changes)


def test_nothing_is_promised_while_a_range_has_stopped() -> None:
    """It could not keep the promise, and its clock may be beyond those of the others (S9)."""
    server = Server(min_in_sync=1)
    both = view(1, (2, ONE, (), ()), (2, ONE, (TWO,), ()))
    first, second = both.ranges
    server.see(both)
    for record in server.sent:
        server.replication.acked(TWO, Ack(record.range_id, record.number, EPOCH), 0.0)
    server.replication.granted(TWO, Grant(0.0, (second.range_id,)), 0.0)
    server.output.release(0.0, [second.range_id])
    promised = [PreparedChange(TABLE.table_id, 1, 0)]
    assert list(server.output.prepared_changes) == promised
    advised = replace(second, hand_over_to=TWO)
    server.see(replace(both, view_number=2, ranges=(first, advised)))
    assert server.replication.primaries[second.range_id].is_stopped
    assert not list(server.output.prepared_changes)
    server.see(replace(both, view_number=3))
    assert list(server.output.prepared_changes) == promised


def test_who_joins_again_is_given_what_was_promised_while_nobody_listened() -> None:
    """It has the newest record still, and that does not have the promise (S9)."""
    server = Server(min_in_sync=1)
    server.see(view(1, (2, ONE, (TWO,), ())))
    place, sender = Place(TABLE.table_id, RANGE, EPOCH), Sender(Incarnation(11), 0, 11)
    at_once(
        server.output.deciding(
            server.machine.entry(WithdrawEvent(place, sender, 1), 0.0), lambda: 0.0
        )
    )
    record = server.sent[-1]
    server.replication.acked(TWO, Ack(RANGE, record.number, EPOCH), 0.0)  # no lease: answers wait
    server.see(view(2, (3, ONE, (), (TWO,))), change_number=2)
    server.output.release(0.0, [RANGE])
    assert list(server.output.prepared_changes) == [PreparedChange(TABLE.table_id, 2, 0)]
    ((_, snapshot),) = snapshots_of(server.output, 0.0)
    assert snapshot.copies[TABLE.table_id].facts.prepared == 2
    assert snapshot.number > server.sent[-1].number
    kept = Ack(RANGE, record.number, AssignmentEpoch(3))  # of the copy that it had
    server.replication.acked(TWO, kept, 0.0)
    assert not list(server.replication.backup_requests(0.0))
    server.replication.acked(TWO, Ack(RANGE, snapshot.number, AssignmentEpoch(3)), 0.0)
    (backup_request,) = server.replication.backup_requests(0.0)
    assert backup_request.backups == {TWO}


def test_a_log_has_the_facts_of_each_worker_that_its_records_name() -> None:
    """A worker's first facts came while nobody was told, neither a backup nor the log."""
    server, written = Server(has_update_log=True), list[LogRecord]()
    server.output = OutputCommit(
        server.machine,
        server.replication,
        NotImplemented,
        lambda _, record: server.sent.append(record),
        written.append,
        _long,
    )
    server.see(view(1, (2, ONE, (), ())))
    place, sender = Place(TABLE.table_id, RANGE, EPOCH), Sender(Incarnation(11), 0, 11)

    def decide(effects: Sequence[Effect]) -> None:
        at_once(server.output.deciding(effects, lambda: 0.0))

    push = PushEvent(place, sender, 1, 1, 0, 4, b"1234")
    decide(server.machine.entry(push, 0.0))
    decide(server.machine.pull(PullEvent(place, 1, None, 0, False, 1.0), 0.0))
    decide(server.machine.entry(WithdrawEvent(place, sender, 1), 0.0))
    assert written
    copy = fresh_copy(TABLE, range(4))
    for record in written:
        copy.take(record.delta)
    assert Incarnation(11) in copy.workers


def test_what_takes_long_releases_nothing_when_the_lease_is_over() -> None:
    """Its first steps were under the lease: another may serve the range by the last (OC-2)."""
    for ends_s, released_count in ((0.0, 1), (2 * LEASE_S, 0)):
        server, now_s = Server(), [0.0]
        server.see(view(1, (2, ONE, (TWO,), ())))
        server.replication.granted(TWO, Grant(0.0, (RANGE,)), 0.0)
        place, sender = Place(TABLE.table_id, RANGE, EPOCH), Sender(Incarnation(11), 0, 11)
        at_once(
            server.output.deciding(
                server.machine.entry(WithdrawEvent(place, sender, 1), 0.0), lambda: 0.0
            )
        )
        effects = server.machine.entry(WithdrawEvent(place, sender, 2), 0.0)
        work = server.output.deciding(effects, partial(now_s.__getitem__, 0))
        next(work)
        now_s[0] = ends_s
        server.replication.acked(TWO, Ack(RANGE, server.sent[-1].number, EPOCH), 0.0)
        assert len(at_once(work)) == released_count
