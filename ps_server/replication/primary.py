"""A range at its primary: who backs it up, who is to, and what the scheduler is asked for
(SEMANTICS S8, S9).

    not named --named as joining--> copied to --nearly there--> counted --has all--> asked for
       ^                               |                           |                    |
       +-------- does not get on ------+---------------------------+        in sync, or left out

Rules:
    - A backup of which nothing was heard for a lease, in which this server was not paused, is asked
      to be left out; so is one that does not get on with what it lacks, and so are those of the
      primary before.
    - The word of one that joins counts when it is nearly there, so that it can catch up while steps
      go on; the scheduler is asked for it when it has all that anybody may have seen.
    - Until the scheduler has answered, with the set that it was asked for or with another, the word
      of both sets counts.

Invariants:
    PR-1  Who was asked for counts until the epoch ends.
    PR-2  Values that no record has come to be only while nobody else has any.

What it deliberately does not do: hold what was decided (`RangeLog` does), or know other ranges.
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
"""One that joins and misses so many records at most is waited for, so that it catches up."""

_COPY_LEASES = 5
"""So long may it take until one that joins has all that was sent to it."""

_BEHIND_LEASES = 5
"""So long may a backup lack a record that was sent to it."""


@dataclass(slots=True)
class _Joining:
    """A server that is brought up to date since epoch `begun`; -1 while nothing is there."""

    number: int
    since_s: float
    begun: AssignmentEpoch


@dataclass(slots=True)
class _Behind:
    """What a backup had, and since when it has not got on."""

    number: int
    since_s: float


class Primary:
    """One range, at its primary.

    Args:
        log: of the range.
        lease_s: of the cluster.
        heard_s: when the backups count as heard at first; None if they never were.

    Attributes:
        log: what was decided.
    """

    def __init__(self, log: RangeLog, lease_s: float, heard_s: float | None = None) -> None:
        self.log = log
        self._lease_s = lease_s
        self._configured = frozenset(log.backups)
        self._heard_s = {} if heard_s is None else dict.fromkeys(log.backups, heard_s)
        self._behind: dict[NodeId, _Behind] = {}
        self._joining: dict[NodeId, _Joining] = {}
        self._is_closed = False
        self._asked: frozenset[NodeId] | None = None
        self._in_question: frozenset[NodeId] = frozenset()

    # --- what the scheduler says

    def observe(self, assignment: RangeAssignment) -> bool:
        """A newer view has this server as primary, still or again: whether under another epoch."""
        if assignment.term > self.log.term:
            self._stand_again(assignment)
            return True
        self._configured = frozenset(assignment.backups)
        is_renewed = self.log.assignment_epoch < assignment.assignment_epoch
        if is_renewed:
            self.log.reconfigure(assignment.assignment_epoch, assignment.backups)
            if self._asked is None:  # some that joined may have given up
                self._joining.clear()
            self._asked, self._in_question = None, frozenset()
        for node_id in [n for n in self._joining if n not in assignment.catching_up]:
            del self._joining[node_id]
            if node_id not in self._configured | self._in_question:
                self.log.exclude(node_id)
        return is_renewed

    def _stand_again(self, assignment: RangeAssignment) -> None:
        """Another was to be primary meanwhile: who joined has given up, or joined that one."""
        self.log.stand_again(assignment.assignment_epoch, assignment.backups)
        self._configured = frozenset(assignment.backups)
        self._heard_s.clear()
        self._behind.clear()
        self._joining.clear()
        self._asked, self._in_question = None, frozenset()

    # --- what other servers say

    def acked(self, backup: NodeId, ack: Ack, now_s: float) -> None:
        """A backup, or one that joins, has taken records."""
        self._heard_s[backup] = now_s
        joining = self._joining.get(backup)
        if joining is not None:
            if ack.assignment_epoch < joining.begun:
                return  # of what it had before, and has given up
            if ack.number > joining.number:
                joining.number, joining.since_s = ack.number, now_s
        if ack.number <= self.log.number:
            self.log.acked(backup, ack.number)

    def granted(self, backup: NodeId, sent_s: float, now_s: float) -> None:
        """A backup has answered the beat that was sent then."""
        self.log.granted(backup, sent_s)
        self._heard_s[backup] = now_s

    def lost(self, node_id: NodeId) -> None:
        """What was on its way to the server is lost: if it joins it is given all again."""
        if node_id in self._joining and node_id not in self._in_question:
            self.log.exclude(node_id)
            del self._joining[node_id]

    def sending(self, node_id: NodeId, now_s: float) -> None:
        """Something is on its way to the server still: it is not behind with that."""
        joining, behind = self._joining.get(node_id), self._behind.get(node_id)
        if joining is not None and joining.number < 0:
            joining.since_s = now_s
        if behind is not None:
            behind.since_s = now_s

    def forgive(self, paused_s: float, now_s: float) -> None:
        """This server was paused: who could not be heard is not silent."""
        for node_id, at_s in self._heard_s.items():
            self._heard_s[node_id] = min(at_s + paused_s, now_s)
        for behind in self._behind.values():
            behind.since_s = min(behind.since_s + paused_s, now_s)

    # --- values that come from elsewhere than the log

    def close(self) -> None:
        """Nobody backs the range up from now on: values come to be here that no record has. The
        scheduler is asked to leave the backups out; they join anew after `replaced`.
        """
        self._is_closed = True
        for node_id in list(self._joining):
            self.lost(node_id)

    @property
    def is_without_replicas(self) -> bool:
        """Whether nobody has a word in it, and all is done that was decided; but for what waits for
        more servers than this one: they join only afterwards.
        """
        is_done = self.log.is_settled or self.log.is_short
        return not self.log.backups and not self._joining and is_done

    def replaced(self, *, is_last: bool) -> None:
        """The values are other ones, while it `is_without_replicas`; whoever joins is given them.
        With `is_last` servers may join.
        """
        check(self.is_without_replicas, "PR-2", f"range {self.log.range_id} has {self.log.backups}")
        self.log.begin_anew()
        self.log.lose_logged_snapshot()
        self._is_closed = not is_last

    # --- who gets what

    @property
    def needs_snapshot(self) -> bool:
        """Whether the update log is to be given all of the range: not while values come."""
        return self.log.needs_snapshot and not self._is_closed

    @property
    def is_heard(self) -> bool:
        """Whether anybody is told what is decided: a server, or the update log, which may be the
        only one for long where there are too few servers: then reads would wait for what it is
        told.
        """
        return bool(self.holders) or (self.log.is_written and not self.log.is_short)

    @property
    def is_alone(self) -> bool:
        """Whether nobody else has to hear of what is decided, which then is done."""
        return self.log.is_alone and not self._joining

    @property
    def holders(self) -> tuple[NodeId, ...]:
        """Who gets the records."""
        followers = self.followers
        if not self._joining:
            return followers
        # One that joins and was asked for is both.
        return tuple(dict.fromkeys((*followers, *self._joining)))

    @property
    def followers(self) -> tuple[NodeId, ...]:
        """The backups that follow this server, whose grants it needs."""
        candidates = self.log.candidates
        return (
            tuple(n for n in self.log.backups if n not in candidates)
            if candidates
            else self.log.backups
        )

    def resends(self, peers: Container[NodeId]) -> Iterator[tuple[NodeId, LogRecord]]:
        """Records that these have not acknowledged."""
        if self.log.is_settled:
            return
        for node_id in self.holders:
            if node_id not in peers:
                continue
            if node_id in self.log.backups:
                lacking = self.log.unacked(node_id)
            else:
                lacking = self.log.after(self._joining[node_id].number)
            for record in lacking:
                yield node_id, record._replace(assignment_epoch=self.log.assignment_epoch)

    def begins_copy(
        self, node_id: NodeId, now_s: float, has_room: Callable[[NodeId], bool]
    ) -> bool:
        """Whether all of the range is to be sent to one that is named as joining."""
        if self._is_closed or not has_room(node_id):
            return False
        joining = self._joining.get(node_id)
        if joining is not None and (
            joining.number == self.log.number or not self._stands(joining, now_s)
        ):
            return False  # it has all, or is getting on
        if node_id in self.log.backups:
            return False  # asked for already
        self._joining[node_id] = _Joining(-1, now_s, self.log.assignment_epoch)
        return True

    # --- what to ask the scheduler for

    def backup_request(self, now_s: float) -> BackupRequest | None:
        """The backups that it should have, if it has others or was asked for others; to be called
        several times a lease.
        """
        living = {n for n, at_s in self._heard_s.items() if now_s < at_s + self._lease_s}
        living -= self._stuck(now_s)
        if self._asked is not None:
            self._asked &= living  # what was asked before may yet be granted
        else:
            self._include(living, now_s)
            log = self.log
            ready = {n for n in log.backups if log.acked_by(n) >= log.shown}
            wanted = ((self._configured | ready) & living) - log.candidates
            wanted = frozenset() if self._is_closed else wanted
            if wanted == self._configured:
                return None
            self._asked = self._in_question = wanted
        check(self._asked <= set(self.log.backups), "PR-1", f"{self._asked} do not count")
        return BackupRequest(self.log.range_id, self.log.assignment_epoch, self._asked)

    def _stuck(self, now_s: float) -> set[NodeId]:
        """Backups that lack something, and have not got on for long."""
        found = set()
        before, self._behind = self._behind, {}
        for node_id in self._configured & set(self.log.backups):
            number = self.log.acked_by(node_id)
            if number < self.log.number:
                was = before.get(node_id)
                now = was if was is not None and was.number == number else _Behind(number, now_s)
                self._behind[node_id] = now
                if now_s >= now.since_s + _BEHIND_LEASES * self._lease_s:
                    found.add(node_id)
        return found

    def _include(self, living: set[NodeId], now_s: float) -> None:
        """Let the word of those count who join and are nearly there, while they live and get on:
        what was done already is not kept to be sent again.
        """
        for node_id, joining in list(self._joining.items()):
            lacks = joining.number < self.log.shown
            if self._stands(joining, now_s) and (lacks or node_id not in living):
                self.log.exclude(node_id)
                del self._joining[node_id]
            elif joining.number >= max(0, self.log.number - _NEAR_COUNT):
                self.log.include(node_id, joining.number)

    def _stands(self, joining: _Joining, now_s: float) -> bool:
        """Whether one that joins does not get on."""
        leases = _COPY_LEASES if joining.number < 0 else 1
        return now_s >= joining.since_s + leases * self._lease_s
