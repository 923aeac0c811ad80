"""All ranges of one server: those that it is primary of, those that it backs up, and between the
two (SEMANTICS S8, S9).

    nothing --joining: snapshot--> backup --promoted--> waits for the lease --> primary
       ^                                                                          |
       +---- another is primary <--the new one serves-- suspended <--deposed------+
                                                           +------primary again---^

Rules:
    - What a server is for a range, the newest view says. A deposed primary is suspended while the
      view names it as a backup: it keeps all that it has, decides nothing, takes and grants
      nothing, and goes on if it is primary again. When it is not named any more the new primary may
      have served: what is here is given up, whether this server served yet or not, since it may
      have what nobody else has. It joins anew, from nothing.
    - A server that the view names among a range's initial holders begins with nothing, once,
      whichever epoch it hears of first: what it was not told then, nobody has seen. One that has
      left the range since has missed what came, and tells the scheduler that it is missing.

    - Of a table that was removed nothing is taken, given or done any more, though its records keep
      their numbers: the view of a primary and those of its backups may differ for a while.

Invariants:
    RN-1  A server serves what some view gives it.

What it deliberately does not do: carry messages or values (the edge does, in the order given).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace

from ps_core.cluster_view import BackupRequest, ClusterView, RangeAssignment
from ps_core.errors import InvariantViolation, NotOwner, TableNotFound
from ps_core.keys import AssignmentEpoch, NodeId, RangeId, TableId
from ps_core.work import Work, at_once
from ps_server.ranges.events import AnswerPull, Effect, RefusePull
from ps_server.ranges.range_copy import ShardCopy, copying
from ps_server.ranges.server_machine import ServerMachine
from ps_server.replication.backup import Replica
from ps_server.replication.messages import Ack, Beat, Grant, LogRecord, Snapshot
from ps_server.replication.primary import Primary
from ps_server.replication.replication_log import RangeLog
from ps_server.values.mutations import Change

_PAUSE_LEASES = 0.5
"""Between two looks at the backups, which are ten times as frequent, so much is a pause."""

PLACED_EPOCH = AssignmentEpoch(2)
"""In which a range is placed: its first primary is one since then."""


class Replication:
    """The replication of one server.

    Args:
        node_id: the server's.
        machine: its machine.
        lease_s: of the cluster.
        min_in_sync: servers that must have what is committed.
        has_update_log: whether what is decided here is to be in an update log too.

    Attributes:
        primaries: the ranges that it is primary of.
        replicas: those that it backs up, or is about to serve.
        suspended: those that it was primary of, and may be again.
        renewed: the ranges that have got another epoch with the newest view.
        deposed: those that another is primary of since the newest view.
    """

    def __init__(
        self,
        node_id: NodeId,
        machine: ServerMachine,
        lease_s: float,
        min_in_sync: int = 1,
        *,
        has_update_log: bool = False,
    ) -> None:
        self.primaries: dict[RangeId, Primary] = {}
        self.replicas: dict[RangeId, Replica] = {}
        self.suspended: dict[RangeId, Primary] = {}
        self.renewed: set[RangeId] = set()
        self.deposed: set[RangeId] = set()
        self._node_id = node_id
        self._machine = machine
        self._lease_s = lease_s
        self._min_in_sync = min_in_sync
        self._has_update_log = has_update_log
        self._recovered: set[RangeId] = set()
        self._logged_tables: set[TableId] = set()
        self._view: ClusterView | None = None
        self._with_catching_up: list[RangeAssignment] = []
        self._had: set[RangeId] = set()
        self._looked_s: float | None = None

    def recover(self, replicas: Iterable[Replica], table_ids: Iterable[TableId] = ()) -> None:
        """What the update log of a server before this one has, which the scheduler was told; before
        the first view.

        Args:
            replicas: its ranges.
            table_ids: all tables that it names, of which there may be nothing in any range.
        """
        self._logged_tables = set(table_ids)
        for replica in replicas:
            self.replicas[replica.range_id] = replica
            self._recovered.add(replica.range_id)
            self._had.add(replica.range_id)

    # --- what the scheduler says

    def observe(self, view: ClusterView, now_s: float) -> tuple[list[RangeId], list[Effect]]:
        """`observing`, at once."""
        return at_once(self.observing(view, now_s))

    def observing(
        self, view: ClusterView, now_s: float
    ) -> Work[tuple[list[RangeId], list[Effect]]]:
        """A newer view: the ranges of which nothing is here any more, and what that means for those
        who wait. `serve` must follow.
        """
        lost: list[RangeId] = []
        effects = yield from self._removing(self.removed_by(view))
        given_up: set[RangeId] = set()
        self._view = view
        self.renewed, self.deposed = set(), set()
        self._with_catching_up = [
            assignment for assignment in view.ranges if assignment.catching_up
        ]
        lost += self._not_given_back(view)
        for assignment in view.ranges:
            range_id = assignment.range_id
            if assignment.primary == self._node_id:
                self._be_primary(assignment, now_s)
                continue
            is_backup = self._node_id in assignment.backups
            effects += self._depose(range_id)
            if range_id in self.suspended:
                if not is_backup:  # the new primary may have served
                    del self.suspended[range_id]
                    given_up.add(range_id)
                    lost.append(range_id)
                continue
            replica = self.replicas.get(range_id)
            if replica is not None and replica.is_promoted:  # deposed before it served
                replica.stand_down()
                if not is_backup:
                    del self.replicas[range_id]
                    lost.append(range_id)
                    replica = None
            if is_backup:
                replica = replica or self._begun(assignment)
                if replica is not None:  # else it is taken for dead, and joins anew
                    replica.follow(assignment.assignment_epoch)
            elif (  # of one that is told of a newer epoch its primary may count on what it has
                replica is not None
                and self._node_id not in assignment.catching_up
                and replica.assignment_epoch < assignment.assignment_epoch
            ):
                del self.replicas[range_id]
                lost.append(range_id)
        if given_up:
            effects += yield from self._machine.giving_up(given_up)
        if self.deposed - given_up:
            effects += yield from self._machine.suspending(self.deposed - given_up)
        return lost, effects

    def removed_by(self, view: ClusterView) -> frozenset[TableId]:
        """The tables of which something may be here, and that a newer view has not any more."""
        recovered = [] if self._view is not None else self.replicas.values()
        named = {table_id for replica in recovered for table_id in replica.copies}
        named |= self._logged_tables if self._view is None else set()
        return self._machine.removed_by(view) | (named - view.tables_by_id.keys())

    def _removing(self, table_ids: frozenset[TableId]) -> Work[list[Effect]]:
        """These tables were removed: what was decided of them and waits is not done, and nobody
        goes on with them. Log records keep their numbers, whatever they are of.
        """
        if not table_ids:
            return []
        for replica in self.replicas.values():
            for table_id in table_ids:
                replica.copies.pop(table_id, None)
        effects: list[Effect] = []
        for primary in (*self.primaries.values(), *self.suspended.values()):
            for held in primary.log.take_out(lambda held: table_of(held) in table_ids):
                if isinstance(held, AnswerPull | RefusePull):
                    error = TableNotFound(f"table {held.table_id} was removed")
                    effects.append(RefusePull(held.waiter, held.table_id, held.range_id, error))
            yield
        return effects + (yield from self._machine.removing(table_ids))

    def _depose(self, range_id: RangeId) -> list[Effect]:
        """Another is primary: what this server decided waits, and reads do not."""
        primary = self.primaries.pop(range_id, None)
        if primary is None:
            return []
        self.suspended[range_id] = primary
        self.deposed.add(range_id)
        return [self._refused(held) for held in primary.log.take_out(_is_read)]  # type: ignore[arg-type]

    def _may_begin(self, assignment: RangeAssignment) -> bool:
        """Whether this server has held the range since it was placed, and had nothing of it yet."""
        range_id = assignment.range_id
        return self._node_id in assignment.initial_holders and range_id not in self._had

    def _begun(self, assignment: RangeAssignment) -> Replica | None:
        """The empty range, if this server may begin it."""
        if not self._may_begin(assignment):
            return None
        range_id, assignment_epoch = assignment.range_id, assignment.assignment_epoch
        self._had.add(range_id)
        replica = Replica(range_id, assignment_epoch, self._lease_s, PLACED_EPOCH)
        self.replicas[range_id] = replica
        return replica

    def _not_given_back(self, view: ClusterView) -> list[RangeId]:
        """What came from an update log, and another is primary of: it is of no use, for joining it
        neither.
        """
        others = {a.range_id for a in view.ranges if a.primary != self._node_id}
        refused = sorted(self._recovered & others)
        for range_id in refused:
            self._recovered.discard(range_id)
            self._had.discard(range_id)  # not in this cluster: it may be placed here, empty
            del self.replicas[range_id]
        return refused

    def _refused(self, held: AnswerPull | RefusePull) -> RefusePull:
        error = NotOwner(f"server {self._node_id} is not primary of range {held.range_id} any more")
        return RefusePull(held.waiter, held.table_id, held.range_id, error)

    def _be_primary(self, assignment: RangeAssignment, now_s: float) -> None:
        range_id, assignment_epoch = assignment.range_id, assignment.assignment_epoch
        if range_id in self.suspended:
            self.primaries[range_id] = self.suspended.pop(range_id)
            self._machine.resume(range_id)
        primary, replica = self.primaries.get(range_id), self.replicas.get(range_id)
        if primary is not None:
            if primary.observe(assignment):
                self.renewed.add(range_id)
            return
        is_alone = not assignment.backups  # else they may have heard of the primary before it
        is_first = assignment_epoch == PLACED_EPOCH or is_alone
        if replica is None and is_first and self._may_begin(assignment):
            self._had.add(range_id)
            log = self._log(assignment, written=0)
            self.primaries[range_id] = Primary(log, self._lease_s, heard_s=now_s)
            return
        replica = replica or self._begun(assignment)
        if replica is not None:  # else it is missing
            replica.promote(assignment_epoch)

    def serve(self, now_s: float) -> ClusterView:
        """The newest view as the machine shall see it: ranges whose old lease may still hold are
        nobody's. Those whose time has come are this server's from now on.
        """
        view = self._view
        if view is None:
            raise InvariantViolation("RN-1", "there is no view to serve")
        ranges = []
        for assignment in view.ranges:
            range_id, replica = assignment.range_id, self.replicas.get(assignment.range_id)
            if assignment.primary == self._node_id and replica is None:
                if range_id not in self.primaries:  # nor may it begin anew, without the training
                    assignment = replace(assignment, primary=None)
            elif assignment.primary == self._node_id and replica is not None:
                if now_s < replica.serves_s:
                    assignment = replace(assignment, primary=None)
                else:
                    del self.replicas[range_id]
                    log = self._log(assignment, replica.number, written=self._logged(replica))
                    log.inherit()
                    self.primaries[range_id] = Primary(log, self._lease_s)
                    self._machine.adopt(range_id, replica.copies, now_s)
            ranges.append(assignment)
        return replace(view, ranges=tuple(ranges))

    @property
    def missing(self) -> tuple[RangeId, ...]:
        """What the newest view gives this server, and it has nothing of."""
        return tuple(
            a.range_id
            for a in (() if self._view is None else self._view.ranges)
            if a.primary == self._node_id
            and a.range_id not in self.primaries
            and a.range_id not in self.replicas
        )

    def _logged(self, replica: Replica) -> int:
        """Up to where the update log has what the replica has: all, if it came from there."""
        is_recovered = replica.range_id in self._recovered
        self._recovered.discard(replica.range_id)
        return replica.number if is_recovered else -1

    def _log(self, assignment: RangeAssignment, number: int = 0, *, written: int) -> RangeLog:
        log = RangeLog(
            assignment.range_id,
            assignment.assignment_epoch,
            assignment.backups,
            self._lease_s,
            number,
            self._min_in_sync,
        )
        if self._has_update_log:
            log.keep_log(written)
        return log

    @property
    def waits(self) -> bool:
        """Whether an old lease keeps this server from serving."""
        return any(replica.is_promoted for replica in self.replicas.values())

    def serves_within(self, now_s: float) -> float:
        """Seconds until an old lease ends that keeps this server from serving; else infinite."""
        times_s = (r.serves_s for r in self.replicas.values() if r.is_promoted)
        return min(times_s, default=math.inf) - now_s

    @property
    def has_candidates(self) -> bool:
        """Whether others may be made primary of some range in this server's place."""
        return any(primary.log.candidates for primary in self.primaries.values())

    # --- a primary

    def decides_alone(self, range_id: RangeId) -> bool:
        """Whether nobody else has to hear of what is decided in the range, which then is done."""
        primary = self.primaries.get(range_id)
        if primary is None or not primary.is_alone:
            return False
        primary.log.decide_alone()
        return True

    @property
    def all_holders(self) -> set[NodeId]:
        """Everybody who gets log records of some range."""
        return {node_id for primary in self.primaries.values() for node_id in primary.holders}

    def release(self, now_s: float, range_ids: Iterable[RangeId]) -> list[object]:
        """What may be done now, range by range."""
        found: list[object] = []
        for range_id in range_ids:
            primary = self.primaries.get(range_id)
            if primary is not None:
                found += primary.log.release(now_s)
        return found

    def acked(self, backup: NodeId, ack: Ack, now_s: float) -> None:
        """A backup, or one that joins, has taken log records."""
        primary = self.primaries.get(ack.range_id)
        if primary is not None:
            primary.acked(backup, ack, now_s)

    def granted(self, backup: NodeId, grant: Grant, now_s: float) -> None:
        """A backup has answered a beat."""
        for range_id in grant.range_ids:
            if range_id in self.primaries:
                self.primaries[range_id].granted(backup, grant.sent_s, now_s)

    def lost(self, node_id: NodeId) -> None:
        """What was on its way to a server is lost: if it joins it is given all again."""
        for primary in self.primaries.values():
            primary.lost(node_id)

    def sending(self, node_ids: Iterable[NodeId], now_s: float) -> None:
        """Something is on its way to these servers still: they are not behind with that."""
        for node_id in node_ids:
            for primary in self.primaries.values():
                primary.sending(node_id, now_s)

    def beats(self, now_s: float) -> dict[NodeId, Beat]:
        """What to ask each backup for."""
        asked: dict[NodeId, list[tuple[RangeId, AssignmentEpoch]]] = {}
        for range_id, primary in self.primaries.items():
            for backup in primary.followers:
                asked.setdefault(backup, []).append((range_id, primary.log.assignment_epoch))
        return {backup: Beat(now_s, tuple(ranges)) for backup, ranges in asked.items()}

    def resends(self, peers: Container[NodeId]) -> Iterator[tuple[NodeId, LogRecord]]:
        """Log records that these have not acknowledged."""
        for primary in self.primaries.values():
            yield from primary.resends(peers)

    def copies(
        self, now_s: float, has_room: Callable[[NodeId], bool]
    ) -> Iterator[tuple[NodeId, Work[Snapshot]]]:
        """All of a range as of its newest record, for each server that joins and has room for it.
        Each is to be made, and sent with the values of that moment, before the next is asked for.
        """
        for assignment in self._with_catching_up:
            primary = self.primaries.get(assignment.range_id)
            if primary is not None:
                for node_id in assignment.catching_up:
                    if primary.begins_copy(node_id, now_s, has_room):
                        yield node_id, self._copying(primary.log)

    def _copying(self, log: RangeLog) -> Work[Snapshot]:
        copies = {}
        for (table_id, at), part in self._machine.shards.items():
            if at == log.range_id:
                copies[table_id] = yield from copying(part.state)
        held = tuple(effect for effect in log.held if isinstance(effect, Change))
        number = log.begin_snapshot()
        return Snapshot(log.range_id, log.assignment_epoch, log.term, number, copies, held)

    def snapshotting_for_log(self, range_id: RangeId) -> Work[Snapshot]:
        """All of a range as of its newest record, for the update log, which writes it with the
        values of that moment before anything that follows.
        """
        log = self.primaries[range_id].log
        snapshot = yield from self._copying(log)
        log.begin_logged_snapshot()
        return snapshot

    def backup_requests(self, now_s: float) -> list[BackupRequest]:
        """Requests to the scheduler; see `Primary.backup_request`. Also for other primaries of what
        is missing here.
        """
        before_s, self._looked_s = self._looked_s, now_s
        paused_s = 0.0 if before_s is None else now_s - before_s
        if paused_s > _PAUSE_LEASES * self._lease_s:
            for primary in self.primaries.values():
                primary.forgive(paused_s, now_s)
        found = (primary.backup_request(now_s) for primary in self.primaries.values())
        return [
            *self._missing_backup_requests(),
            *(backup_request for backup_request in found if backup_request is not None),
        ]

    def _missing_backup_requests(self) -> list[BackupRequest]:
        """That others be primaries of what this server was given and has nothing of."""
        if self._view is None:
            return []
        given = (self._view.ranges[range_id] for range_id in self.missing)
        return [BackupRequest(r.range_id, r.assignment_epoch, frozenset(), True) for r in given]

    # --- a backup

    def take(
        self, log_record: LogRecord, fresh: Callable[[], ShardCopy | None]
    ) -> tuple[bool, Ack | None]:
        """Take a record: whether its changes are to be made now, and what to answer. A record of a
        removed table is taken, and nothing is made of it.

        Raises:
            InvalidKeys: it does not go with what is here, of which nothing is of use any more.
        """
        replica = self.replicas.get(log_record.range_id)
        if replica is None or not replica.follows(log_record):
            return False, None
        if self._is_removed(log_record.table_id):
            replica.skip(log_record)
            return False, _ack(replica)
        is_next = replica.take(log_record, fresh)
        return is_next, _ack(replica)

    def _is_removed(self, table_id: TableId) -> bool:
        return self._view is not None and self._view.is_removed(table_id)

    def living(self, snapshot: Snapshot) -> Snapshot:
        """The copy of a range without tables that were removed, which its primary had not heard."""
        gone = {table_id for table_id in snapshot.copies if self._is_removed(table_id)}
        if not gone:
            return snapshot
        copies = {t: copy for t, copy in snapshot.copies.items() if t not in gone}
        held = tuple(each for each in snapshot.held if each.record.table_id not in gone)
        return snapshot._replace(copies=copies, held=held)

    def leave(self, range_id: RangeId) -> None:
        """What is here of the range is of no use: be taken for dead, and join anew."""
        self.replicas.pop(range_id, None)

    def knows(self, snapshot: Snapshot) -> bool:
        """Whether the newest view is not older than the assignment that a snapshot was made in."""
        ranges = self._view.ranges if self._view is not None else ()
        return (
            snapshot.range_id < len(ranges)
            and ranges[snapshot.range_id].assignment_epoch >= snapshot.assignment_epoch
        )

    def join(self, snapshot: Snapshot) -> Ack | None:
        """All of a range came, which the newest view has this server join."""
        range_id = snapshot.range_id
        ranges = self._view.ranges if self._view is not None else ()
        assignment = ranges[range_id] if range_id < len(ranges) else None
        if assignment is None or self._node_id not in assignment.catching_up:
            return None
        if snapshot.assignment_epoch < assignment.assignment_epoch or range_id in self.primaries:
            return None
        replica = self.replicas.get(range_id)
        if replica is not None and replica.term > snapshot.term:
            return None  # the view may be older than what is here
        is_known = replica is not None and replica.term == snapshot.term
        if replica is not None and is_known and replica.number >= snapshot.number:
            replica.follow(snapshot.assignment_epoch)  # it was late, or came twice
            return _ack(replica)
        self._had.add(range_id)
        joined = self.replicas[range_id] = Replica(
            range_id,
            snapshot.assignment_epoch,
            self._lease_s,
            snapshot.term,
            snapshot.copies,
            snapshot.number,
        )
        if replica is not None:
            joined.keep_grants(replica)
        return _ack(joined)

    def beat(self, beat: Beat, now_s: float) -> Grant:
        """A primary asks for the lease."""
        granted = tuple(
            range_id
            for range_id, assignment_epoch in beat.epochs
            if range_id in self.replicas and self.replicas[range_id].beat(assignment_epoch, now_s)
        )
        return Grant(beat.sent_s, granted)


def table_of(held: object) -> TableId | None:
    """The table of something that waits in a range's log: an effect, a change, what was told."""
    record, place = getattr(held, "record", None), getattr(held, "place", None)
    if record is not None:
        return TableId(record.table_id)
    found = getattr(held, "table_id", None) if place is None else place[0]
    return None if found is None else TableId(found)


def _is_read(effect: object) -> bool:
    return isinstance(effect, AnswerPull | RefusePull)


def _ack(replica: Replica) -> Ack:
    return Ack(replica.range_id, replica.number, replica.assignment_epoch)
