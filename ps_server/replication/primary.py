"""A range at its primary: backups, those catching up, requests to the scheduler (SEMANTICS S8, S9).

    not named --named as catching up--> copied to --nearly there--> counted --has all--> asked for
       ^                                   |                           |                    |
       +----------- no progress -----------+---------------------------+        in sync, or left out

Rules:
    - The scheduler is asked to leave out a backup that was silent for a lease in which this server
      was not paused, one that makes no progress with unacknowledged records, whatever it grants,
      and the former primary's.
    - The former primary's are left out only when the update log, if there is one, has all of the
      range: until then the range comes back with the former primary's log. If there are none, the
      scheduler is asked all the same, so that it knows. Values that are about to
      come without a record are not waited for: they come only when no other server has any.
    - A server that is catching up counts when it is nearly there, so that it can catch up while
      steps go on; the scheduler is asked for it when it has all that anybody may have seen.
    - Until the scheduler has answered, with the requested set or another, both sets count.
    - A primary that is advised to hand its range over stops: it takes nothing and shows no reads.
      As soon as every backup has all that was decided, it gives its lease up and requests that the
      target is primary. From then on only a newer epoch ends that: the request may have been
      granted. If it cannot request it within a moment, it goes on, until it is advised anew.

Invariants:
    PR-1  A server that was asked for counts until the epoch ends.
    PR-2  Values come without a record only while no other server has any of the range.
    PR-3  Who hands a range over has decided nothing that a backup does not have, and releases
          nothing before a newer epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

from ps_core.cluster_view import BackupRequest, RangeAssignment
from ps_core.errors import check
from ps_core.keys import AssignmentEpoch, NodeId
from ps_server.replication.messages import Ack, LogRecord
from ps_server.replication.replication_log import RangeLog

_NEAR_COUNT = 64
"""A server that is catching up counts once it misses no more records than these."""

_COPY_LEASES = 5
"""Leases until a server that is catching up must have its snapshot."""

_LAG_LEASES = 5
"""Leases for which a backup may make no progress with records that were sent to it, and its stream
may take nothing. No fewer than `_COPY_LEASES`: records of all ranges wait behind a copy, which a
server takes in after its last byte, so that its stream stands, too."""

_DRAIN_S = 0.3
"""Seconds within which a primary that has stopped must be able to hand its range over: workers wait
meanwhile."""


@dataclass(slots=True)
class _Progress:
    """The newest record of a server, -1 while it has nothing, since when it makes no progress, the
    epoch since which it is catching up, and the number of its copy, or one before.
    """

    number: int
    since_s: float
    since: AssignmentEpoch
    least: int = 0


class Primary:
    """One range, at its primary.

    Args:
        heard_s: when the backups count as heard at first; None if they never were.
    """

    def __init__(self, log: RangeLog, lease_s: float, heard_s: float | None = None) -> None:
        self.log = log
        self._lease_s = lease_s
        self._configured = frozenset(log.backups)
        self._heard_s = {} if heard_s is None else dict.fromkeys(log.backups, heard_s)
        self._lagging: dict[NodeId, _Progress] = {}
        self._catching_up: dict[NodeId, _Progress] = {}
        self._is_closed = False
        self._asked: frozenset[NodeId] | None = None
        self._in_question: frozenset[NodeId] = frozenset()
        self._advised: tuple[AssignmentEpoch, NodeId] | None = None
        self._target: NodeId | None = None  # it has stopped, to hand the range over
        self._stopped_s = 0.0
        self._unheard: set[NodeId] = set()

    # --- views

    def observe(self, assignment: RangeAssignment) -> bool:
        """A newer view has this server as primary, still or again. True if under another epoch."""
        if assignment.term > self.log.term:
            self._resume(assignment)
            return True
        self._configured = frozenset(assignment.backups)
        is_renewed = self.log.assignment_epoch < assignment.assignment_epoch
        if is_renewed:
            self.go_on()
            self.log.reconfigure(assignment.assignment_epoch, assignment.backups)
            if self._asked is None:  # some may have given up catching up
                self._catching_up.clear()
            self._asked, self._in_question = None, frozenset()
        for node_id in [n for n in self._catching_up if n not in assignment.catching_up]:
            del self._catching_up[node_id]
            if node_id not in self._configured | self._in_question:
                self.log.exclude(node_id)
        present = {*self.log.backups, *self._catching_up}
        self._heard_s = {n: at_s for n, at_s in self._heard_s.items() if n in present}
        return is_renewed

    def _resume(self, assignment: RangeAssignment) -> None:
        """Another was to be primary meanwhile: servers that caught up gave up, or joined it."""
        self.go_on()
        self.log.resume(assignment.assignment_epoch, assignment.backups)
        self._configured = frozenset(assignment.backups)
        self._heard_s.clear()
        self._lagging.clear()
        self._catching_up.clear()
        self._asked, self._in_question = None, frozenset()

    # --- hand-over

    def take_advice(self, assignment: RangeAssignment, now_s: float) -> None:
        """Stop, if a view newly advises to hand the range over; go on if it does not any more."""
        target, before = assignment.hand_over_to, self._advised
        self._advised = None if target is None else (assignment.assignment_epoch, target)
        if self._advised == before or self.log.is_given_up:
            return
        self.go_on()
        if target in self._configured and self._may_stop:
            self._target, self._stopped_s = target, now_s

    @property
    def _may_stop(self) -> bool:
        """True if nobody joins, leaves or is to be given values that come without a record."""
        log = self.log
        is_same = self._configured == set(log.backups)
        is_open = self._asked is not None or self._catching_up or not log.is_confirmed
        return is_same and not (is_open or self._is_closed or log.is_short)

    @property
    def is_stopped(self) -> bool:
        """True while the range is about to be handed over, or may have been."""
        return self._target is not None

    @property
    def can_hand_over(self) -> bool:
        """True if it has stopped, every backup has everything, and it has not asked yet."""
        is_ready = self.is_stopped and self._may_stop and self.log.is_everywhere
        return is_ready and not self.log.is_given_up

    def is_late(self, now_s: float) -> bool:
        """True if it has stopped for too long, or for nothing, and is to `go_on`."""
        if not self.is_stopped or self.log.is_given_up:
            return False
        return self.stopped_for_s(now_s) >= _DRAIN_S or not self._may_stop

    def stopped_for_s(self, now_s: float) -> float:
        """Seconds since it has stopped."""
        return now_s - self._stopped_s

    def go_on(self) -> None:
        self._target, self.log.is_given_up = None, False

    def await_grants(self) -> None:
        """The range was handed over to this server: the others may not have heard of it."""
        self._unheard = set(self.log.backups)

    @property
    def awaits_grants(self) -> bool:
        """True if some backup has not granted the lease since the range was handed over."""
        return not self._unheard.isdisjoint(self.log.backups)

    # --- answers of other servers

    def acked(self, backup: NodeId, ack: Ack, now_s: float) -> bool:
        """A backup, or a server that is catching up, has taken records. True if it had not said so
        before.
        """
        self._heard_s[backup] = now_s
        progress = self._catching_up.get(backup)
        if progress is not None:
            if ack.assignment_epoch < progress.since or ack.number < progress.least:
                return False  # about an earlier copy, which it gave up, or another replaces
            is_news = ack.number > progress.number
            if is_news:
                progress.number, progress.since_s = ack.number, now_s
        else:
            is_news = backup in self.log.backups and ack.number > self.log.acked_by(backup)
        if ack.number <= self.log.number:
            self.log.acked(backup, ack.number)
        return is_news

    def granted(self, backup: NodeId, sent_s: float, now_s: float) -> bool:
        """A backup has answered the beat that was sent at `sent_s`. True if it is the first since
        the range was handed over: records that came before may have been refused.
        """
        self.log.granted(backup, sent_s)
        self._heard_s[backup] = now_s
        is_first = backup in self._unheard
        self._unheard.discard(backup)
        return is_first

    def lost(self, node_id: NodeId) -> None:
        """Messages on their way to the server are lost: if it is catching up, it begins again."""
        if node_id in self._catching_up and node_id not in self._in_question:
            self.log.exclude(node_id)
            del self._catching_up[node_id]

    def sending(self, node_id: NodeId, now_s: float) -> None:
        """Messages to the server are still on their way, and it takes some: it is not stuck."""
        progress, lagging = self._catching_up.get(node_id), self._lagging.get(node_id)
        if progress is not None and progress.number < 0:
            progress.since_s = now_s
        if lagging is not None:
            lagging.since_s = now_s

    def forgive(self, paused_s: float, now_s: float) -> None:
        """This server was paused: no backup counts as silent for that."""
        for node_id, at_s in self._heard_s.items():
            self._heard_s[node_id] = min(at_s + paused_s, now_s)
        for lagging in self._lagging.values():
            lagging.since_s = min(lagging.since_s + paused_s, now_s)

    # --- values that come without a record

    def close(self) -> None:
        """Ask for no backups: values are about to come without a record. See `replaced`."""
        self._is_closed = True
        for node_id in list(self._catching_up):
            self.lost(node_id)

    def reopen(self) -> None:
        """No more values are about to come: their tables failed, or the last ones came."""
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """True while values are about to come: whoever copied the range would not have them."""
        return self._is_closed

    @property
    def is_without_replicas(self) -> bool:
        """True if no other server counts, and no decision waits except for more servers, or for a
        snapshot of these values in the update log.
        """
        log = self.log
        is_done = log.is_drained or log.is_short or log.needs_snapshot
        return not log.backups and not self._catching_up and is_done and not log.must_be_known

    def replaced(self, *, is_last: bool) -> None:
        """Values came without a record: servers that join, after the last, are given them."""
        check(self.is_without_replicas, "PR-2", f"range {self.log.range_id} has {self.log.backups}")
        self.log.begin_anew()
        self.log.lose_logged_snapshot()
        self._is_closed = not is_last

    # --- receivers

    @property
    def needs_snapshot(self) -> bool:
        """True if the update log needs a snapshot, and no values are about to come."""
        return self.log.needs_snapshot and not self._is_closed

    @property
    def is_heard(self) -> bool:
        """True if a record has a receiver. With too few servers the update log does not count:
        reads would wait for the record, perhaps for long.
        """
        return bool(self.holders) or (self.log.is_written and not self.log.is_short)

    @property
    def is_alone(self) -> bool:
        """True if decisions need no record, and are carried out at once."""
        return self.log.is_alone and not self._catching_up

    @property
    def holders(self) -> tuple[NodeId, ...]:
        """Servers that get the records."""
        if not self._catching_up:
            return self.followers
        # A server that is catching up and was asked for is both.
        return tuple(dict.fromkeys((*self.followers, *self._catching_up)))

    @property
    def followers(self) -> tuple[NodeId, ...]:
        """Backups that follow this server, whose grants it needs."""
        backups, candidates = self.log.backups, self.log.candidates
        return tuple(n for n in backups if n not in candidates) if candidates else backups

    def resends(self, peers: Container[NodeId]) -> Iterator[tuple[NodeId, LogRecord]]:
        """Records that these servers have not acknowledged. None to a server whose copy is still on
        its way: it could take them for the next of an older copy, and lack what came without one.
        """
        if self.log.is_drained:
            return
        for node_id in [holder for holder in self.holders if holder in peers]:
            is_backup = node_id in self.log.backups
            number = self.log.acked_by(node_id) if is_backup else self._catching_up[node_id].number
            for record in self.log.after(number) if number >= 0 else ():
                yield node_id, record._replace(assignment_epoch=self.log.assignment_epoch)

    def begins_copy(
        self, node_id: NodeId, now_s: float, has_space: Callable[[NodeId], bool]
    ) -> bool:
        """True if a snapshot is to be sent to a server that the view names as catching up."""
        if self._is_closed or self.is_stopped or not has_space(node_id):
            return False
        progress = self._catching_up.get(node_id)
        has_all = progress is not None and progress.number == self.log.number
        moves = progress is not None and not self._is_stuck(progress, now_s)
        if has_all or moves or node_id in self.log.backups:  # the last: asked for already
            return False
        since, least = self.log.assignment_epoch, self.log.begin_snapshot()
        self._catching_up[node_id] = _Progress(-1, now_s, since, least)
        return True

    # --- requests to the scheduler

    def backup_request(self, now_s: float) -> BackupRequest | None:
        """Request for the backups that the range should have, if it has others, or others were
        asked for. To be called several times a lease.
        """
        living = {n for n, at_s in self._heard_s.items() if now_s < at_s + self._lease_s}
        living -= self._stuck(now_s)
        self._give_up(living, now_s)
        if self.log.is_given_up or self.can_hand_over:
            return self._hand_over_request()
        if self._asked is not None:
            self._asked &= living  # the earlier request may yet be granted
        else:
            self._include()
            log = self.log
            if not log.is_confirmed and not log.is_logged:
                return None
            ready = {n for n in log.backups if log.acked_by(n) >= log.shown}
            wanted = ((self._configured | ready) & living) - log.candidates
            wanted = frozenset() if self._is_closed else wanted
            if wanted == self._configured and not log.may_go_back:
                return None
            self._asked = self._in_question = wanted
        check(self._asked <= set(self.log.backups), "PR-1", f"{self._asked} do not count")
        return BackupRequest(self.log.range_id, self.log.assignment_epoch, self._asked)

    def _hand_over_request(self) -> BackupRequest:
        if not self.log.is_given_up:
            check(self.log.is_everywhere, "PR-3", f"range {self.log.range_id} is not drained")
            self.log.give_up()
        log = self.log
        return BackupRequest(
            log.range_id, log.assignment_epoch, self._configured, hand_over_to=self._target
        )

    def _stuck(self, now_s: float) -> set[NodeId]:
        """Backups with unacknowledged records that have made no progress for long."""
        found = set()
        before, self._lagging = self._lagging, {}
        for node_id in self._configured & set(self.log.backups):
            number = self.log.acked_by(node_id)
            if number < self.log.number:
                lagging = before.get(node_id)
                if lagging is None or lagging.number != number:
                    lagging = _Progress(number, now_s, self.log.assignment_epoch)
                self._lagging[node_id] = lagging
                if now_s >= lagging.since_s + _LAG_LEASES * self._lease_s:
                    found.add(node_id)
        return found

    def _give_up(self, living: set[NodeId], now_s: float) -> None:
        """Begin anew with servers that are stuck while they catch up: released records are not kept
        to be sent again. Who was asked for may yet be granted.
        """
        for node_id, progress in list(self._catching_up.items()):
            is_short = progress.number < self.log.shown
            is_useless = self._is_stuck(progress, now_s) and (is_short or node_id not in living)
            if is_useless and node_id not in self._in_question:
                self.log.exclude(node_id)
                del self._catching_up[node_id]

    def _include(self) -> None:
        """Count servers that are nearly caught up."""
        for node_id, progress in self._catching_up.items():
            if progress.number >= max(0, self.log.number - _NEAR_COUNT):
                self.log.include(node_id, progress.number)

    def _is_stuck(self, progress: _Progress, now_s: float) -> bool:
        leases = _COPY_LEASES if progress.number < 0 else 1
        return now_s >= progress.since_s + leases * self._lease_s
