"""All ranges of one server: those that it is primary of, those that it backs up, and between the
two (SEMANTICS S8, S9).

    nothing --joining: snapshot--> backup --promoted--> waits for the lease --> primary
       ^                                                                          |
       +---------------------------- another is primary --------------------------+

Rules:
    - What a server is for a range, the newest view says. What a deposed primary held is given up:
      it may have decided what nobody else has. It joins anew, from nothing.
    - A backup from which nothing came for a lease is asked to be left out, and so are those of the
      primary before.
    - The word of one that joins counts when it is nearly there, so that it can catch up while steps
      go on; the scheduler is asked for it when it has all that anybody may have seen.

Invariants:
    RN-1  A server serves what some view gives it.

What it deliberately does not do: carry messages or values (the edge does, in the order given).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ps_core.cluster_view import BackupWish, ClusterView, RangeAssignment
from ps_core.errors import InvariantViolation, NotOwner
from ps_core.keys import AssignmentEpoch, NodeId, RangeId, TableId
from ps_server.changes import Change
from ps_server.events import AnswerPull, Effect, RefusePull
from ps_server.part_copy import Delta, PartCopy, copy_of
from ps_server.range_log import Batch, RangeLog
from ps_server.replica import Replica
from ps_server.server_machine import ServerMachine

_NEAR_COUNT = 64
"""One that joins and misses so many batches at most is waited for, so that it catches up."""

_SNAPSHOT_LEASES = 5
"""So long may a range take to get there."""

PLACED_EPOCH = AssignmentEpoch(2)
"""Of a range that has just been placed: it holds nothing, so nobody has to be told what."""


class Ack(NamedTuple):
    """A backup has all batches of a range up to `number`."""

    range_id: RangeId
    number: int


class Beat(NamedTuple):
    """A primary asks its backup for the lease of these ranges."""

    sent_s: float
    epochs: tuple[tuple[RangeId, AssignmentEpoch], ...]


class Grant(NamedTuple):
    """The answer to a beat, for the ranges that it was granted for."""

    sent_s: float
    range_ids: tuple[RangeId, ...]


class Snapshot(NamedTuple):
    """All of a range as of batch `number`, for a server that joins it. The values come beside it,
    from the edge: those that were released, on which the changes of `held` are still to be made.
    """

    range_id: RangeId
    assignment_epoch: AssignmentEpoch
    tenure: AssignmentEpoch
    number: int
    copies: dict[TableId, PartCopy]
    held: tuple[Change, ...] = ()


@dataclass(slots=True)
class _Joining:
    """A server that is being brought up to date."""

    number: int
    since_s: float


class Replication:
    """The replication of one server.

    Args:
        node_id: the server's.
        machine: its machine.
        lease_s: of the cluster.
        min_in_sync: servers that must have what is committed.
    """

    def __init__(
        self, node_id: NodeId, machine: ServerMachine, lease_s: float, min_in_sync: int = 1
    ) -> None:
        self.logs: dict[RangeId, RangeLog] = {}
        self.replicas: dict[RangeId, Replica] = {}
        self._node_id = node_id
        self._machine = machine
        self._lease_s = lease_s
        self._min_in_sync = min_in_sync
        self._view: ClusterView | None = None
        self._with_joining: list[RangeAssignment] = []
        self._joining: dict[RangeId, dict[NodeId, _Joining]] = {}
        self._heard_s: dict[RangeId, dict[NodeId, float]] = {}
        self._configured: dict[RangeId, frozenset[NodeId]] = {}
        self._asked: dict[RangeId, frozenset[NodeId]] = {}

    # --- what the scheduler says

    def observe(self, view: ClusterView, now_s: float) -> tuple[list[RangeId], list[Effect]]:
        """A newer view: the ranges of which nothing is here any more, and what that means for those
        who wait. `serve` must follow.
        """
        lost: list[RangeId] = []
        effects: list[Effect] = []
        self._view = view
        self._with_joining = [assignment for assignment in view.ranges if assignment.joining]
        for assignment in view.ranges:
            range_id = assignment.range_id
            if assignment.primary == self._node_id:
                self._be_primary(assignment, now_s)
                continue
            log = self.logs.pop(range_id, None)
            if log is not None:
                effects += self._machine.give_up(range_id)
                effects += [self._refused(e) for e in log.held if isinstance(e, AnswerPull)]
                lost.append(range_id)
                self._forget(range_id)
            replica = self.replicas.get(range_id)
            if self._node_id in assignment.backups:
                assignment_epoch = assignment.assignment_epoch
                if replica is None and assignment_epoch == PLACED_EPOCH:
                    replica = Replica(range_id, assignment_epoch, self._lease_s, assignment_epoch)
                    self.replicas[range_id] = replica
                if replica is not None:  # else it is taken for dead, and joins anew
                    replica.follow(assignment_epoch)
            elif (  # of one that is told of a newer epoch its primary may count on what it has
                replica is not None
                and self._node_id not in assignment.joining
                and replica.assignment_epoch < assignment.assignment_epoch
            ):
                del self.replicas[range_id]
                lost.append(range_id)
        return lost, effects

    def _refused(self, held: AnswerPull) -> RefusePull:
        error = NotOwner(f"server {self._node_id} is not primary of range {held.range_id} any more")
        return RefusePull(held.waiter, held.table_id, held.range_id, error)

    def _be_primary(self, assignment: RangeAssignment, now_s: float) -> None:
        range_id, assignment_epoch = assignment.range_id, assignment.assignment_epoch
        log, replica = self.logs.get(range_id), self.replicas.get(range_id)
        self._configured[range_id] = frozenset(assignment.backups)
        if log is not None:
            if log.assignment_epoch < assignment_epoch:
                log.reconfigure(assignment_epoch, assignment.backups)
                if self._asked.pop(range_id, None) is None:  # some that joined may have given up
                    self._joining.pop(range_id, None)
            self._forget_joiners(assignment, log)
        elif replica is not None:
            replica.promote(assignment_epoch)
        elif assignment_epoch == PLACED_EPOCH:  # of any other it has nothing to serve
            self.logs[range_id] = self._log(assignment)
            self._heard_s[range_id] = dict.fromkeys(assignment.backups, now_s)

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
            if assignment.primary == self._node_id and replica is not None:
                if now_s < replica.serves_s:
                    assignment = replace(assignment, primary=None)
                else:
                    del self.replicas[range_id]
                    self.logs[range_id] = self._log(assignment, replica.number)
                    self.logs[range_id].inherit()
                    self._machine.adopt(range_id, replica.copies, now_s)
            ranges.append(assignment)
        return replace(view, ranges=tuple(ranges))

    def _log(self, assignment: RangeAssignment, number: int = 0) -> RangeLog:
        return RangeLog(
            assignment.range_id,
            assignment.assignment_epoch,
            assignment.backups,
            self._lease_s,
            number,
            self._min_in_sync,
        )

    @property
    def waits(self) -> bool:
        """Whether an old lease keeps this server from serving."""
        return any(replica.is_promoted for replica in self.replicas.values())

    # --- a primary

    def decides_alone(self, range_id: RangeId) -> bool:
        """Whether nobody else has to hear of what is decided in the range, which then is done."""
        log = self.logs.get(range_id)
        if log is None or not log.is_alone or self._joining.get(range_id):
            return False
        log.decide_alone()
        return True

    @property
    def all_holders(self) -> set[NodeId]:
        """Everybody who gets batches of some range."""
        return {node_id for range_id in self.logs for node_id in self.holders(range_id)}

    def decide(
        self,
        place: tuple[TableId, RangeId],
        delta: Delta,
        changes: Iterable[object],
        effects: list[object],
    ) -> Batch | None:
        """An event decided something; the batch for `holders`, None if the range was given up."""
        log = self.logs.get(place[1])
        return None if log is None else log.decide(place[0], delta, tuple(changes), effects)

    def holders(self, range_id: RangeId) -> tuple[NodeId, ...]:
        """Who gets the batches of a range."""
        # One that joins and was asked for is both.
        joiners = self._joining.get(range_id, ())
        return tuple(dict.fromkeys((*self.logs[range_id].backups, *joiners)))

    def release(self, now_s: float, range_ids: Iterable[RangeId]) -> list[object]:
        """What may be done now, range by range."""
        logs = self.logs
        return [
            e for range_id in range_ids if range_id in logs for e in logs[range_id].release(now_s)
        ]

    def acked(self, backup: NodeId, ack: Ack, now_s: float) -> None:
        """A backup, or one that joins, has taken batches."""
        log = self.logs.get(ack.range_id)
        if log is None:
            return
        self._heard(ack.range_id, backup, now_s)
        joining = self._joining.get(ack.range_id, {}).get(backup)
        if joining is not None and ack.number > joining.number:
            joining.number, joining.since_s = ack.number, now_s
        if ack.number <= log.number:
            log.acked(backup, ack.number)

    def lost(self, node_id: NodeId) -> None:
        """What was on its way to a server is lost: if it joins it is given all again."""
        for range_id, joiners in self._joining.items():
            if node_id in joiners and node_id not in self._asked.get(range_id, ()):
                self.logs[range_id].exclude(node_id)
                del joiners[node_id]

    def granted(self, backup: NodeId, grant: Grant, now_s: float) -> None:
        """A backup has answered a beat."""
        for range_id in grant.range_ids:
            if range_id in self.logs:
                self.logs[range_id].granted(backup, grant.sent_s)
                self._heard(range_id, backup, now_s)

    def _heard(self, range_id: RangeId, backup: NodeId, now_s: float) -> None:
        self._heard_s.setdefault(range_id, {})[backup] = now_s

    def beats(self, now_s: float) -> dict[NodeId, Beat]:
        """What to ask each backup for."""
        asked: dict[NodeId, list[tuple[RangeId, AssignmentEpoch]]] = {}
        for range_id, log in self.logs.items():
            for backup in log.backups:
                asked.setdefault(backup, []).append((range_id, log.assignment_epoch))
        return {backup: Beat(now_s, tuple(ranges)) for backup, ranges in asked.items()}

    def resends(self, peers: Container[NodeId]) -> Iterator[tuple[NodeId, Batch]]:
        """Batches that these have not acknowledged."""
        for log in self.logs.values():
            for backup in log.backups:
                if backup in peers:
                    for batch in log.unacked(backup):
                        yield backup, batch._replace(assignment_epoch=log.assignment_epoch)
        for range_id, joiners in self._joining.items():
            log = self.logs[range_id]
            for node_id, joining in joiners.items():
                if node_id in peers and node_id not in log.backups:
                    for batch in log.after(joining.number):
                        yield node_id, batch._replace(assignment_epoch=log.assignment_epoch)

    def snapshots(
        self, now_s: float, has_room: Callable[[NodeId], bool] = lambda _: True
    ) -> Iterator[tuple[NodeId, Snapshot]]:
        """For servers that shall join and have room for it: all of a range, as of its newest batch.
        Each is to be sent, with the values of that moment, before the next is asked for.
        """
        for assignment in self._with_joining:
            range_id, log = assignment.range_id, self.logs.get(assignment.range_id)
            if log is None:
                continue
            for node_id in assignment.joining:
                if not has_room(node_id):
                    continue
                joining = self._joining.get(range_id, {}).get(node_id)
                if joining is not None and (
                    joining.number == log.number or not self._stands(joining, now_s)
                ):
                    continue  # it has all, or is getting on
                if node_id in log.backups:
                    continue  # asked for already
                self._joining.setdefault(range_id, {})[node_id] = _Joining(-1, now_s)
                yield node_id, self._snapshot(range_id, log)

    def _snapshot(self, range_id: RangeId, log: RangeLog) -> Snapshot:
        copies = {
            table_id: copy_of(part.state)
            for (table_id, at), part in self._machine.parts.items()
            if at == range_id
        }
        held = tuple(effect for effect in log.held if isinstance(effect, Change))
        number = log.begin_snapshot()
        return Snapshot(range_id, log.assignment_epoch, log.tenure, number, copies, held)

    def wishes(self, now_s: float) -> list[BackupWish]:
        """What to ask the scheduler for: without those who are silent, with those who caught up.

        Until it has answered, with the set that it was asked for or with another, the word of both
        sets counts; so a set that is as it was is asked for too, if another was before.
        """
        found = []
        for range_id, log in self.logs.items():
            heard_s = self._heard_s.get(range_id, {})
            living = {n for n, at_s in heard_s.items() if now_s < at_s + self._lease_s}
            if range_id in self._asked:
                self._asked[range_id] &= living
            else:
                self._include(range_id, log, living, now_s)
                ready = {n for n in log.backups if log.acked_by(n) >= log.released}
                wanted = frozenset((self._configured[range_id] | ready) & living) - log.heirs
                if wanted == self._configured[range_id]:
                    continue
                self._asked[range_id] = wanted
            found.append(BackupWish(range_id, log.assignment_epoch, self._asked[range_id]))
        return found

    def _include(self, range_id: RangeId, log: RangeLog, living: set[NodeId], now_s: float) -> None:
        """Let the word of those count who join and are nearly there, while they live and get on:
        what was done already is not kept to be sent again.
        """
        joiners = self._joining.get(range_id, {})
        for node_id, joining in list(joiners.items()):
            lacks = joining.number < log.released
            if self._stands(joining, now_s) and (lacks or node_id not in living):
                log.exclude(node_id)
                del joiners[node_id]
            elif joining.number >= log.number - _NEAR_COUNT:
                log.include(node_id, joining.number)

    def _stands(self, joining: _Joining, now_s: float) -> bool:
        """Whether one that joins does not get on."""
        leases = _SNAPSHOT_LEASES if joining.number < 0 else 1
        return now_s >= joining.since_s + leases * self._lease_s

    def _forget_joiners(self, assignment: RangeAssignment, log: RangeLog) -> None:
        """Those whom the scheduler does not name any more."""
        range_id = assignment.range_id
        joiners = self._joining.get(range_id, {})
        for node_id in [n for n in joiners if n not in assignment.joining]:
            del joiners[node_id]
            if node_id not in (*assignment.backups, *self._asked.get(range_id, ())):
                log.exclude(node_id)

    def _forget(self, range_id: RangeId) -> None:
        """This server is primary of the range no more."""
        for kept in (self._joining, self._heard_s, self._asked, self._configured):
            kept.pop(range_id, None)

    # --- a backup

    def take(self, batch: Batch, fresh: Callable[[], PartCopy | None]) -> tuple[bool, Ack | None]:
        """A batch came: whether its changes are to be made now, and what to answer.

        Raises:
            InvalidKeys: it does not go with what is here, of which nothing is of use any more.
        """
        replica = self.replicas.get(batch.range_id)
        if replica is None or not replica.follows(batch):
            return False, None
        is_next = replica.take(batch, fresh)
        return is_next, Ack(batch.range_id, replica.number)

    def leave(self, range_id: RangeId) -> None:
        """What is here of the range is of no use: be taken for dead, and join anew."""
        self.replicas.pop(range_id, None)

    def join(self, snapshot: Snapshot) -> Ack | None:
        """All of a range came, which the newest view has this server join."""
        range_id = snapshot.range_id
        ranges = self._view.ranges if self._view is not None else ()
        assignment = ranges[range_id] if range_id < len(ranges) else None
        if assignment is None or self._node_id not in assignment.joining:
            return None
        if snapshot.assignment_epoch < assignment.assignment_epoch or range_id in self.logs:
            return None
        replica = self.replicas.get(range_id)
        is_known = replica is not None and replica.tenure == snapshot.tenure
        if replica is not None and is_known and replica.number >= snapshot.number:
            replica.follow(snapshot.assignment_epoch)  # it was late, or came twice
            return Ack(range_id, replica.number)
        self.replicas[range_id] = Replica(
            range_id,
            snapshot.assignment_epoch,
            self._lease_s,
            snapshot.tenure,
            snapshot.copies,
            snapshot.number,
        )
        return Ack(range_id, snapshot.number)

    def beat(self, beat: Beat, now_s: float) -> Grant:
        """A primary asks for the lease."""
        granted = tuple(
            range_id
            for range_id, assignment_epoch in beat.epochs
            if range_id in self.replicas and self.replicas[range_id].beat(assignment_epoch, now_s)
        )
        return Grant(beat.sent_s, granted)
