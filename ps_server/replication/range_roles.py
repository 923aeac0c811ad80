"""Roles of one server in all ranges: primary, backup, and between the two (SEMANTICS S8, S9).

    nothing --catching up: snapshot--> backup --promoted--> waits for the lease --> primary
       ^                                                                              |
       +------ another is primary <--the new one serves-- suspended <--deposed--------+
                                                             +------primary again-----^
    primary --advised to hand over--> stopped --the scheduler has granted it--> backup
       ^                                 +-- the target, a backup, is primary at once
       +--it cannot, or another epoch----+

Rules:
    - A deposed primary is suspended while the view names it as a backup: it keeps everything,
      decides, takes and grants nothing, and goes on if it is primary again. Once it is not named,
      the new primary may have served: the server gives the range up, since it may have records that
      nobody else has, and joins anew, from nothing.
    - A range's initial holders begin it empty, once, whichever epoch they hear of first: nobody has
      seen records that they were not sent. A server that has left the range since has missed
      records, and tells the scheduler that the range is missing.
    - A range that is placed anew was empty in between (`placed_epoch`). What a server has or had of
      it from before is of removed tables: it begins the range as one that never had it.
    - A range that is handed over keeps its term. Its former primary is a backup at once, with all
      that it has: every other holder has the same. What it had not decided is gone there.
    - Nothing of a removed table is taken or given, though its records keep their numbers: the views
      of a primary and its backups may differ for a while.

Invariants:
    RN-1  A server serves only ranges that some view gives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace

from ps_core.cluster_view import BackupRequest, ClusterView, NodeState, RangeAssignment
from ps_core.errors import InvariantViolation, NotOwner, TableNotFound
from ps_core.keys import AssignmentEpoch, NodeId, RangeId, TableId
from ps_core.sliced_work import Work, at_once
from ps_server.ranges.events import AnswerPull, Effect, RefusePull
from ps_server.ranges.range_copy import ShardCopy, copying
from ps_server.ranges.server_machine import ServerMachine
from ps_server.replication.backup import Replica
from ps_server.replication.messages import Ack, Beat, Grant, LogRecord, Snapshot
from ps_server.replication.primary import Primary
from ps_server.replication.replication_log import RangeLog
from ps_server.values.mutations import Mutation

_PAUSE_LEASES = 0.5
"""Leases between two looks at the backups that count as a pause; ten looks a lease are due."""

PLACED_EPOCH = AssignmentEpoch(2)
"""The epoch in which a range is placed for the first time, and its first primary's term."""


class Replication:
    """The replication of one server.

    Args:
        min_in_sync: servers that must have a committed record.
        has_update_log: True if decisions go to an update log, too.

    Attributes:
        primaries: ranges that the server is primary of.
        replicas: ranges that it backs up, or is about to serve.
        suspended: ranges that it was primary of, and may be again.
        renewed: ranges that have another epoch since the newest view.
        deposed: ranges that have another primary since the newest view.
        handed_over: ranges that this server has handed over, by the newest view, and the seconds
            for which each had stopped.
        not_backed_up: ranges that this server only backed up, or joined, until the newest view.
        placed_anew: ranges that were placed, empty, since this server had them, by the newest view.
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
        self.handed_over: dict[RangeId, float] = {}
        self.not_backed_up: set[RangeId] = set()
        self._stopped: set[RangeId] = set()  # primaries that are about to hand their range over
        self.placed_anew: frozenset[RangeId] = frozenset()
        self._node_id = node_id
        self._machine = machine
        self._lease_s = lease_s
        self._min_in_sync = min_in_sync
        self._has_update_log = has_update_log
        self._recovered: set[RangeId] = set()
        self._logged_tables: set[TableId] = set()
        self._view: ClusterView | None = None
        self._with_catching_up: list[RangeAssignment] = []
        self._had: dict[RangeId, AssignmentEpoch] = {}  # under which epoch
        self._former: dict[RangeId, Replica] = {}  # of ranges that the newest view has placed anew
        self._looked_s: float | None = None
        self._advanced: set[NodeId] = set()  # acknowledged something new since the last `sending`

    def recover(self, replicas: Iterable[Replica], table_ids: Iterable[TableId] = ()) -> None:
        """Take the ranges that were recovered from an update log, before the first view.
        `table_ids`: all tables that the log names, even if no range has anything of them.
        """
        self._logged_tables = set(table_ids)
        for replica in replicas:
            self.replicas[replica.range_id] = replica
            self._recovered.add(replica.range_id)
            self._had[replica.range_id] = replica.assignment_epoch

    # --- views

    def observe(self, view: ClusterView, now_s: float) -> tuple[list[RangeId], list[Effect]]:
        """`observing`, at once."""
        return at_once(self.observing(view, now_s))

    def observing(
        self, view: ClusterView, now_s: float
    ) -> Work[tuple[list[RangeId], list[Effect]]]:
        """Take the roles of a newer view. Returns the ranges that are lost here, and the effects on
        waiting reads. `serve` must follow.
        """
        effects = yield from self._removing(self.removed_by(view))
        given_up: set[RangeId] = set()
        self.placed_anew = self._placed_anew(view)
        self._former = self._taking_out(self.placed_anew)
        self._view = view
        self.renewed, self.deposed, self.handed_over = set(), set(), {}
        self.not_backed_up = set()
        self._with_catching_up = [r for r in view.ranges if r.catching_up]
        lost = [*sorted(self.placed_anew), *self._not_given_back(view)]
        for assignment in view.ranges:
            range_id = assignment.range_id
            if assignment.primary == self._node_id:
                self._be_primary(assignment, now_s)
                continue
            is_backup = self._node_id in assignment.backups
            if is_backup and self._has_handed_over(assignment):
                yield from self._following(assignment, now_s)
                continue
            effects += self._depose(range_id)
            if range_id in self.suspended:
                if not is_backup:  # the new primary may have served
                    del self.suspended[range_id]
                    given_up.add(range_id)
                    lost.append(range_id)
                continue
            replica = self.replicas.get(range_id)
            if replica is not None and replica.is_promoted:  # deposed before it served
                replica.is_promoted = False  # it keeps everything, serves nothing, grants no older
                if not is_backup:
                    del self.replicas[range_id]
                    lost.append(range_id)
                    replica = None
            if is_backup:
                replica = replica or self._begun(assignment)
                if replica is not None:  # else it counts as dead, and joins anew
                    replica.follow(assignment.assignment_epoch)
            elif (  # a primary may count on the copy of a replica that has heard of its epoch
                replica is not None
                and self._node_id not in assignment.catching_up
                and replica.assignment_epoch < assignment.assignment_epoch
            ):
                del self.replicas[range_id]
                lost.append(range_id)
                self.not_backed_up.add(range_id)
        effects += yield from self._stopping()
        if given_up:
            effects += yield from self._machine.giving_up(given_up)
        if self.handed_over:
            effects += yield from self._machine.giving_up(self.handed_over)
        if self.deposed - given_up:
            effects += yield from self._machine.suspending(self.deposed - given_up)
        return lost, effects

    def removed_by(self, view: ClusterView) -> frozenset[TableId]:
        """Tables that a newer view has no more, and of which something may be here."""
        recovered = [] if self._view is not None else self.replicas.values()
        named = {table_id for replica in recovered for table_id in replica.copies}
        named |= self._logged_tables if self._view is None else set()
        return self._machine.removed_by(view) | (named - view.tables_by_id.keys())

    def _removing(self, table_ids: frozenset[TableId]) -> Work[list[Effect]]:
        """Drop held effects and copies of removed tables. Log records keep their numbers."""
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
        """Suspend a range that has another primary: decisions wait, and reads are refused."""
        primary = self.primaries.pop(range_id, None)
        if primary is None:
            return []
        primary.go_on()  # if it is primary again
        self.suspended[range_id] = primary
        self.deposed.add(range_id)
        return self._refuse_reads(range_id, primary)

    def _refuse_reads(self, range_id: RangeId, primary: Primary) -> list[Effect]:
        """Take the reads that wait for decisions out of a range's log."""
        error = NotOwner(f"server {self._node_id} is not primary of range {range_id} any more")
        reads = primary.log.take_out(lambda held: isinstance(held, AnswerPull | RefusePull))
        return [RefusePull(held.waiter, held.table_id, range_id, error) for held in reads]  # type: ignore[attr-defined]

    # --- hand-over

    def _stopping(self) -> Work[list[Effect]]:
        """Stop ranges that are to be handed over, and let others go on."""
        before = self._stopped & self.primaries.keys()
        stopped = {range_id for range_id, each in self.primaries.items() if each.is_stopped}
        for range_id in before - stopped:
            self._machine.resume(range_id)
        self._stopped = stopped
        effects: list[Effect] = []
        if stopped - before:
            for range_id in stopped - before:
                effects += self._refuse_reads(range_id, self.primaries[range_id])
            effects += yield from self._machine.suspending(stopped - before)
        return effects

    def _has_handed_over(self, assignment: RangeAssignment) -> bool:
        primary = self.primaries.get(assignment.range_id)
        if primary is None or not primary.log.is_given_up:
            return False
        return primary.log.term == assignment.term

    def _following(self, assignment: RangeAssignment, now_s: float) -> Work[None]:
        """Back up a range that this server has handed over."""
        range_id = assignment.range_id
        primary = self.primaries.pop(range_id)
        log = primary.log
        copies = {}
        for (table_id, at), shard in self._machine.suspended.items():
            if at == range_id:
                copies[table_id] = yield from copying(shard.state)
        self.replicas[range_id] = Replica(
            range_id, assignment.assignment_epoch, self._lease_s, log.term, copies, log.number
        )
        self.handed_over[range_id] = primary.stopped_for_s(now_s)

    @property
    def can_hand_over(self) -> bool:
        """True if the scheduler can be asked, and has not been, for the target of some range."""
        stopped = self._stopped and self._stopped & self.primaries.keys()
        return any(self.primaries[range_id].can_hand_over for range_id in stopped)

    @property
    def is_handing_over(self) -> bool:
        """True while some range has stopped, or may have another primary already."""
        return bool(self._stopped)

    @property
    def awaits_grants(self) -> bool:
        """True while a range that was handed over to this server has no lease yet."""
        return any(primary.awaits_grants for primary in self.primaries.values())

    def must_serve(self, now_s: float) -> bool:
        """True if `serve` is to be called again, since time has passed."""
        stopped = self._stopped & self.primaries.keys()
        return self.waits or any(self.primaries[r].is_late(now_s) for r in stopped)

    def _placed_anew(self, view: ClusterView) -> frozenset[RangeId]:
        """Ranges that were placed, empty, since this server had them; views that said so may have
        passed it by.
        """
        return frozenset(
            r.range_id
            for r in view.ranges
            if self._had.get(r.range_id, r.placed_epoch) < r.placed_epoch
        )

    def _taking_out(self, range_ids: Iterable[RangeId]) -> dict[RangeId, Replica]:
        """Take out all that is here of ranges that were placed anew; returns the replicas."""
        former: dict[RangeId, Replica] = {}
        for range_id in range_ids:
            del self._had[range_id]
            self._recovered.discard(range_id)
            self.primaries.pop(range_id, None)
            self.suspended.pop(range_id, None)
            if range_id in self.replicas:
                former[range_id] = self.replicas.pop(range_id)
        return former

    def _may_begin(self, assignment: RangeAssignment) -> bool:
        """True if this server has held the range since it was placed, and had none of it since."""
        range_id = assignment.range_id
        return self._node_id in assignment.initial_holders and range_id not in self._had

    def _begun(self, assignment: RangeAssignment) -> Replica | None:
        """An empty replica of the range, if this server may begin it."""
        if not self._may_begin(assignment):
            return None
        range_id, assignment_epoch = assignment.range_id, assignment.assignment_epoch
        self._had[range_id] = assignment_epoch
        term = max(assignment.placed_epoch, PLACED_EPOCH)  # of its first primary
        replica = Replica(range_id, assignment_epoch, self._lease_s, term)
        if range_id in self._former:  # it may have granted the new primary its lease already
            replica.keep_grants(self._former[range_id])
        self.replicas[range_id] = replica
        return replica

    def _not_given_back(self, view: ClusterView) -> list[RangeId]:
        """Drop recovered ranges that have another primary, for joining which their copies are of no
        use (LOG-2), and return them.
        """
        others = {a.range_id for a in view.ranges if a.primary != self._node_id}
        refused = sorted(self._recovered & others)
        for range_id in refused:
            self._recovered.discard(range_id)
            self._had.pop(range_id, None)  # not in this cluster: it may be placed here, empty
            del self.replicas[range_id]
        return refused

    def stands_elsewhere(self, range_id: RangeId) -> bool:
        """True if the newest view shows that a range stands elsewhere than in this server's update
        log, from which it was not claimed. The scheduler gives it to no server with the log then.

        No former writer of the log counts as alive once this server is registered, so a living
        primary is one that took the range over. It serves if it has been given a configuration
        since. If this server is primary, it has joined the range since, from one that had it.

        What the log has is of removed tables if the range has no primary, or has had a living one
        since it was placed, which no former writer is.
        """
        view, assignment = self._view, self._assignment(range_id)
        if view is None or assignment is None or assignment.is_lost:
            return False
        if assignment.primary in (self._node_id, None):
            return True
        living = {node.node_id for node in view.nodes if node.state is NodeState.ALIVE}
        term, placed_epoch = assignment.term, assignment.placed_epoch
        is_first = 0 < placed_epoch == term  # 0: an older scheduler does not say
        return assignment.primary in living and (is_first or assignment.assignment_epoch > term)

    def _be_primary(self, assignment: RangeAssignment, now_s: float) -> None:
        range_id, assignment_epoch = assignment.range_id, assignment.assignment_epoch
        if range_id in self.suspended:
            self.primaries[range_id] = self.suspended.pop(range_id)
            self._machine.resume(range_id)
        primary, replica = self.primaries.get(range_id), self.replicas.get(range_id)
        if primary is not None:
            if primary.observe(assignment):
                self.renewed.add(range_id)
            primary.take_advice(assignment, now_s)
            return
        # Else another may have been primary, whom the backups or a former replica here have heard.
        is_alone = not (assignment.backups or range_id in self._former or self._has_update_log)
        is_first = assignment_epoch in (assignment.placed_epoch, PLACED_EPOCH) or is_alone
        if replica is None and is_first and self._may_begin(assignment):
            self._had[range_id] = assignment_epoch
            log = self._log(assignment, written=0)
            self.primaries[range_id] = Primary(log, self._lease_s, heard_s=now_s)
            return
        replica = replica or self._begun(assignment)
        if replica is not None:  # else it is missing
            replica.promote(assignment_epoch, assignment.term)

    def serve(self, now_s: float) -> ClusterView:
        """Begin to serve promoted ranges whose old lease has run out, and go on with those that
        could not be handed over in time.

        Returns:
            The newest view, without a primary for ranges whose old lease may still hold.
        """
        view = self._view
        if view is None:
            raise InvariantViolation("RN-1", "there is no view to serve")
        for range_id in [r for r in self._stopped if self.primaries[r].is_late(now_s)]:
            self.primaries[range_id].go_on()
            self._machine.resume(range_id)
            self._stopped.discard(range_id)
        ranges = []
        for assignment in view.ranges:
            range_id, replica = assignment.range_id, self.replicas.get(assignment.range_id)
            if assignment.primary == self._node_id:
                if replica is not None and now_s >= replica.serves_s:
                    del self.replicas[range_id]
                    self.primaries[range_id] = self._succeed(assignment, replica, now_s)
                    self._machine.adopt(range_id, replica.copies, now_s)
                elif replica is not None or range_id not in self.primaries.keys() - self._stopped:
                    # It waits for the lease, or must not begin anew, without the training.
                    assignment = replace(assignment, primary=None)
            ranges.append(assignment)
        return replace(view, ranges=tuple(ranges))

    def _succeed(self, assignment: RangeAssignment, replica: Replica, now_s: float) -> Primary:
        """The primary that a promoted backup becomes."""
        log = self._log(assignment, replica.number, written=self._logged(replica))
        if not replica.is_handed_over:
            log.inherit()
            return Primary(log, self._lease_s)
        log.term = replica.term
        primary = Primary(log, self._lease_s, heard_s=now_s)
        primary.await_grants()
        return primary

    @property
    def missing(self) -> tuple[RangeId, ...]:
        """Ranges that the newest view gives this server, and of which it has nothing."""
        return tuple(assignment.range_id for assignment in self._missing)

    @property
    def _missing(self) -> list[RangeAssignment]:
        ranges = () if self._view is None else self._view.ranges
        own = (assignment for assignment in ranges if assignment.primary == self._node_id)
        held = self.primaries.keys() | self.replicas.keys()
        return [assignment for assignment in own if assignment.range_id not in held]

    def _logged(self, replica: Replica) -> int:
        """The newest record of the replica that the update log has; -1: none."""
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
        """True while an old lease keeps this server from serving a range."""
        return any(replica.is_promoted for replica in self.replicas.values())

    def serves_within(self, now_s: float) -> float:
        """Seconds until the next old lease ends; infinite if there is none."""
        times_s = (r.serves_s for r in self.replicas.values() if r.is_promoted)
        return min(times_s, default=math.inf) - now_s

    @property
    def has_unconfirmed(self) -> bool:
        """True if others may be made primary of some range with what was before this server was."""
        return any(not primary.log.is_confirmed for primary in self.primaries.values())

    # --- a primary

    def decides_alone(self, range_id: RangeId) -> bool:
        """True if a decision in the range needs no record; it is then noted as decided alone."""
        primary = self.primaries.get(range_id)
        if primary is None or not primary.is_alone:
            return False
        primary.log.decide_alone()
        return True

    @property
    def all_holders(self) -> set[NodeId]:
        """Servers that get log records of some range."""
        return {node_id for primary in self.primaries.values() for node_id in primary.holders}

    def release(self, now_s: float, range_ids: Iterable[RangeId]) -> list[object]:
        """Effects that may be carried out now, range by range."""
        found: list[object] = []
        for range_id in range_ids:
            primary = self.primaries.get(range_id)
            if primary is not None:
                found += primary.log.release(now_s)
        return found

    def acked(self, backup: NodeId, ack: Ack, now_s: float) -> None:
        """A backup, or a server that is catching up, has taken log records."""
        primary = self.primaries.get(ack.range_id)
        if primary is not None and primary.acked(backup, ack, now_s):
            self._advanced.add(backup)

    def granted(self, backup: NodeId, grant: Grant, now_s: float) -> set[RangeId]:
        """A backup has answered a beat. Returns the ranges for which it has done so for the first
        time since they were handed over: their records are to be sent to it again.
        """
        first: set[RangeId] = set()
        for range_id in grant.range_ids:
            primary = self.primaries.get(range_id)
            if primary is not None and primary.granted(backup, grant.sent_s, now_s):
                first.add(range_id)
        return first

    def lost(self, node_id: NodeId) -> None:
        """Messages on their way to the server are lost; see `Primary.lost`."""
        for primary in self.primaries.values():
            primary.lost(node_id)

    def sending(self, busy: AbstractSet[NodeId], moving: AbstractSet[NodeId], now_s: float) -> None:
        """Messages wait for the streams to `busy` servers; those to `moving` servers have taken
        some since the last call. An acknowledgement says as much: a stream may take nothing until
        half of its window has been consumed. See `Primary.sending`.
        """
        moving, self._advanced = moving | self._advanced, set()
        for node_id in busy & moving:
            for primary in self.primaries.values():
                primary.sending(node_id, now_s)

    def beats(self, now_s: float) -> dict[NodeId, Beat]:
        """Beats for all backups."""
        asked: dict[NodeId, list[tuple[RangeId, AssignmentEpoch]]] = {}
        for range_id, primary in self.primaries.items():
            for backup in primary.followers:
                asked.setdefault(backup, []).append((range_id, primary.log.assignment_epoch))
        return {backup: Beat(now_s, tuple(ranges)) for backup, ranges in asked.items()}

    def resends(self, peers: Container[NodeId]) -> Iterator[tuple[NodeId, LogRecord]]:
        """Log records that these servers have not acknowledged."""
        for primary in self.primaries.values():
            yield from primary.resends(peers)

    def copies(
        self, now_s: float, has_space: Callable[[NodeId], bool]
    ) -> Iterator[tuple[NodeId, Work[Snapshot]]]:
        """Snapshots for servers that are catching up and have space. Each is to be made, and sent
        with the values of that moment, before the next is asked for.
        """
        awaiting = self.awaiting_values if self._with_catching_up else set()
        for assignment in self._with_catching_up:
            primary = self.primaries.get(assignment.range_id)
            if primary is not None and assignment.range_id not in awaiting:
                for node_id in assignment.catching_up:
                    if primary.begins_copy(node_id, now_s, has_space):
                        yield node_id, self._copying(primary.log)

    def _copying(self, log: RangeLog) -> Work[Snapshot]:
        copies = {}
        for (table_id, at), shard in self._machine.shards.items():
            if at == log.range_id:
                copies[table_id] = yield from copying(shard.state)
        held = tuple(effect for effect in log.held if isinstance(effect, Mutation))
        number = log.begin_snapshot()
        return Snapshot(log.range_id, log.assignment_epoch, log.term, number, copies, held)

    def snapshotting_for_log(self, range_id: RangeId) -> Work[Snapshot]:
        """Snapshot for the update log, to be written with its values before later records."""
        log = self.primaries[range_id].log
        snapshot = yield from self._copying(log)
        log.begin_logged_snapshot()
        return snapshot

    def may_load(self, range_id: RangeId) -> bool:
        """False while the update log must have first what a range has that was taken over."""
        primary = self.primaries.get(range_id)
        return primary is None or not primary.log.must_be_known

    def close_only(self, range_ids: Container[RangeId]) -> None:
        """Values of these ranges, and of no others, are about to come without a record."""
        for range_id, primary in self.primaries.items():
            if range_id in range_ids:
                primary.close()
            else:
                primary.reopen()

    @property
    def awaiting_values(self) -> set[RangeId]:
        """Ranges to which values are about to come, though they may not be closed yet: they were
        added a moment ago.
        """
        shards = self._machine.shards.items()
        return {range_id for (_, range_id), shard in shards if shard.state.awaits_checkpoint}

    def backup_requests(self, now_s: float) -> list[BackupRequest]:
        """Requests to the scheduler for backups, and for other primaries of missing ranges."""
        before_s, self._looked_s = self._looked_s, now_s
        paused_s = 0.0 if before_s is None else now_s - before_s
        if paused_s > _PAUSE_LEASES * self._lease_s:
            for primary in self.primaries.values():
                primary.forgive(paused_s, now_s)
        found = (primary.backup_request(now_s) for primary in self.primaries.values())
        missing = ((each.range_id, each.assignment_epoch) for each in self._missing)
        return [
            *(BackupRequest(*place, frozenset(), True) for place in missing),
            *(backup_request for backup_request in found if backup_request is not None),
        ]

    # --- a backup

    def take(
        self, log_record: LogRecord, fresh: Callable[[], ShardCopy | None]
    ) -> tuple[bool, Ack | None]:
        """Take a record. Returns whether its changes are to be made now, and the answer.

        Raises:
            InvalidKeys: it contradicts the replica, which is of no use any more.
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
        """A snapshot without removed tables, of whose removal its primary had not heard."""
        gone = {table_id for table_id in snapshot.copies if self._is_removed(table_id)}
        if not gone:
            return snapshot
        copies = {t: copy for t, copy in snapshot.copies.items() if t not in gone}
        held = tuple(each for each in snapshot.held if each.record.table_id not in gone)
        return snapshot._replace(copies=copies, held=held)

    def leave(self, range_id: RangeId) -> None:
        """Drop a replica that is of no use: this server counts as dead there, and joins anew."""
        self.replicas.pop(range_id, None)

    def knows(self, snapshot: Snapshot) -> bool:
        """True if the newest view is not older than the assignment of a snapshot, nor than its
        tables.
        """
        assignment = self._assignment(snapshot.range_id)
        return (
            assignment is not None
            and assignment.assignment_epoch >= snapshot.assignment_epoch
            and self._knows_tables(snapshot)
        )

    def _knows_tables(self, snapshot: Snapshot) -> bool:
        view = self._view
        return view is not None and not any(map(view.is_to_come, snapshot.copies))

    def _assignment(self, range_id: RangeId) -> RangeAssignment | None:
        ranges = () if self._view is None else self._view.ranges
        return ranges[range_id] if range_id < len(ranges) else None

    def join(self, snapshot: Snapshot) -> Ack | None:
        """Take a snapshot, if the newest view has this server catching up with its range, and the
        snapshot's tables.
        """
        range_id = snapshot.range_id
        assignment = self._assignment(range_id)
        if assignment is None or self._node_id not in assignment.catching_up:
            return None
        if not self._knows_tables(snapshot):
            return None
        if snapshot.assignment_epoch < assignment.assignment_epoch or range_id in self.primaries:
            return None
        replica = self.replicas.get(range_id)
        if replica is not None and replica.term > snapshot.term:
            return None  # the view may be older than the replica
        is_known = replica is not None and replica.term == snapshot.term
        if replica is not None and is_known and replica.number >= snapshot.number:
            replica.follow(snapshot.assignment_epoch)  # it was late, or came twice
            return _ack(replica)
        self._had[range_id] = snapshot.assignment_epoch
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
        """Grant the lease of ranges that this server backs up."""
        granted = tuple(
            range_id
            for range_id, assignment_epoch in beat.epochs
            if range_id in self.replicas and self.replicas[range_id].beat(assignment_epoch, now_s)
        )
        return Grant(beat.sent_s, granted)


def table_of(held: object) -> TableId | None:
    """Table of something that a range's log holds: an effect, a change, or a mark."""
    record, place = getattr(held, "record", None), getattr(held, "place", None)
    if record is not None:
        return TableId(record.table_id)
    found = getattr(held, "table_id", None) if place is None else place[0]
    return None if found is None else TableId(found)


def _ack(replica: Replica) -> Ack:
    return Ack(replica.range_id, replica.number, replica.assignment_epoch)
