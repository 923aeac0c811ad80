"""The primary's end of a range's replication: what is decided, held, committed (SEMANTICS S8).

    decided --numbered, sent--> held by every in-sync backup --released--> applied, answered

A decision changes what the machines know at once, and nothing that anyone can see: sums that become
values, answers, reads all wait until every in-sync backup has the decision, in the order in which
they came about. So what a failover takes back was never seen.

Rules:
    - Records are numbered from 1 without gap, over all tables of the range. A backup that is behind
      gets everything after what it has once more.
    - The right to serve comes from the backups: the primary releases nothing unless each of them
      has granted a beat that was sent less than `lease_s` ago. Without backups nobody else can be
      made primary, and it needs no lease.
    - A promoted primary has as candidates the former primary and its other backups: they may be a
      record behind or ahead. While there are any, each of them can be made primary in its place, so
      it releases nothing; it asks the scheduler to leave them out, and they join anew. They are
      told nothing, and do not count.
    - One that was deposed and is primary again goes on with all that it decided, under another
      term, and has as candidates whoever could have been primary in its place.
    - Where fewer than `min_in_sync` servers hold the range, nothing more is committed; who joins
      does not count before the scheduler has configured it. Reads of what is committed go on.
    - Where this server keeps an update log, that has to have what is committed too (SEMANTICS S13):
      it is a backup that grants no lease and counts as no replica.

Invariants:
    LOG-1  Nothing is released that the update log does not have, if there is one.
    RL-1  Nothing is released before what was decided before it.
    RL-2  Nothing is released that an in-sync backup does not have, nor while there are candidates.

What it deliberately does not do: look at effects, or know the network or the scheduler.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ps_core.errors import check
from ps_core.keys import AssignmentEpoch, NodeId, RangeId, TableId
from ps_server.ranges.range_copy import Delta
from ps_server.replication.messages import LogRecord


@dataclass(slots=True)
class _Entry:
    """Effects that wait for a number; its record, unless they only follow it."""

    number: int
    record: LogRecord | None
    effects: Sequence[object]


class RangeLog:
    """The log of one range, at its primary.

    Args:
        range_id: the range.
        assignment_epoch: under which this server is primary.
        backups: the in-sync ones; all have everything up to `number`.
        lease_s: for how long a granted beat counts, from when it was sent.
        number: of the newest record that there is.
        min_in_sync: servers, this one included, that must have what is committed.

    Attributes:
        range_id: the range.
        assignment_epoch: the newest.
        term: the first since this server is primary, or is again.
        number: of the newest record.
        candidates: who held the range under the primary before, and is not left out yet.
        is_written: whether records go to the update log: it has, or is being given, what they
            follow.
    """

    def __init__(
        self,
        range_id: RangeId,
        assignment_epoch: AssignmentEpoch,
        backups: Iterable[NodeId],
        lease_s: float,
        number: int = 0,
        min_in_sync: int = 1,
    ) -> None:
        self.assignment_epoch = self.term = assignment_epoch
        self.number = number
        self.range_id = range_id
        self._lease_s = lease_s
        self._min_in_sync = min_in_sync
        self._entries: deque[_Entry] = deque()
        self._acked = dict.fromkeys(backups, number)
        self._configured_count = len(self._acked)
        self._released = number
        self._is_past = False
        self._anew = 0  # what nobody was told is in no copy before that number
        self._granted_s: dict[NodeId, float] = {}
        self.candidates: frozenset[NodeId] = frozenset()
        self._written: int | None = None
        self.is_written = False

    def inherit(self) -> None:
        """The backups were those of the primary before."""
        self.candidates = frozenset(self._acked)
        self._configured_count = 0

    def stand_again(self, assignment_epoch: AssignmentEpoch, candidates: Iterable[NodeId]) -> None:
        """This server was deposed, perhaps without hearing of it, and is primary again: nobody else
        was seen to serve meanwhile. What it has decided waits for that to be settled.
        """
        self.assignment_epoch = self.term = assignment_epoch
        self._acked = dict.fromkeys(candidates, self.number)
        self._granted_s.clear()
        self.inherit()
        self.lose_logged_snapshot()  # what the update log has is of the term before
        for entry in self._entries:
            if entry.record is not None:
                entry.record = entry.record._replace(term=assignment_epoch)

    def take_out(self, is_out: Callable[[object], bool]) -> list[object]:
        """Effects that wait and will not be released, of which `is_out` is true."""
        found = list(filter(is_out, self.held))
        for entry in self._entries if found else ():
            entry.effects = [effect for effect in entry.effects if not is_out(effect)]
        return found

    @property
    def backups(self) -> tuple[NodeId, ...]:
        """Those whose word counts."""
        return tuple(self._acked)

    @property
    def committed(self) -> int:
        """Every in-sync backup and the update log have all up to it, and there are enough of
        them.
        """
        if self.is_short:
            return self._released
        held = min(self._acked.values(), default=self.number)
        return held if self._written is None else min(held, self._written)

    @property
    def is_short(self) -> bool:
        """Whether too few servers hold the range for anything to be committed."""
        return self._configured_count + 1 < self._min_in_sync

    @property
    def is_alone(self) -> bool:
        """Whether nobody else has a word, and nothing waits: what is decided is committed."""
        is_only_here = not self._acked and self._written is None
        return is_only_here and not self._entries and not self.is_short

    @property
    def released(self) -> int:
        """What was decided up to it has been done, and may have been seen."""
        return self._released

    @property
    def shown(self) -> int:
        """Whoever has everything up to it has all that anybody may have seen."""
        return max(self._released, self._anew)

    @property
    def is_settled(self) -> bool:
        """Whether all that was decided has been released."""
        return not self._entries

    # --- what was decided

    def decide(
        self,
        table_id: TableId,
        delta: Delta,
        changes: Sequence[object],
        effects: Sequence[object],
    ) -> LogRecord:
        """An event decided something: the record to send to every backup. Its effects wait."""
        self.number += 1
        record = LogRecord(
            self.range_id,
            self.term,
            self.assignment_epoch,
            self.number,
            table_id,
            delta,
            tuple(changes),
        )
        self._entries.append(_Entry(self.number, record, effects))
        return record

    def follow(self, effects: Sequence[object]) -> None:
        """Effects that decide nothing, and show what was decided: reads."""
        if effects:
            self._entries.append(_Entry(self.number, None, effects))

    def release(self, now_s: float) -> list[object]:
        """What may be done now, in order (RL-1, RL-2)."""
        out: list[object] = []
        if not self._entries or self.candidates or not self.may_serve(now_s):
            return out
        committed = self.committed
        while self._entries and self._entries[0].number <= committed:
            entry = self._entries.popleft()
            self._released = entry.number
            out += entry.effects
        return out

    @property
    def held(self) -> list[object]:
        """The effects that have not been released."""
        return [effect for entry in self._entries for effect in entry.effects]

    @property
    def held_count(self) -> int:
        """How much waits to be released."""
        return len(self._entries)

    # --- alone

    def decide_alone(self) -> None:
        """Something was decided, and done, of which nobody else was told."""
        self._is_past = True

    def begin_snapshot(self) -> int:
        """The number of what is so now: another one if anything was decided alone, which whoever
        has the newest record does not have.
        """
        if self._is_past:
            self.begin_anew()
            self.lose_logged_snapshot()
        return self.number

    def begin_anew(self) -> None:
        """The values are other ones, which whoever has the newest record does not have. What waits
        goes on waiting, until some were given all of the range.
        """
        self.number += 1
        self._anew = self.number
        self._is_past = False
        if not self._entries:
            self._released = self.number

    # --- the update log

    def keep_log(self, written: int) -> None:
        """There is an update log, which has everything up to that record; -1: nothing of the
        range. Before anything is decided.
        """
        self._written, self.is_written = written, written >= 0

    @property
    def needs_snapshot(self) -> bool:
        """Whether the update log lacks what records would follow: all of the range."""
        return self._written is not None and not self.is_written

    def begin_logged_snapshot(self) -> None:
        """All of the range is on its way to the update log, as of `begin_snapshot`; records follow
        it.
        """
        self.is_written = True

    def lose_logged_snapshot(self) -> None:
        """What is in the update log is not what is here any more."""
        if self._written is not None:
            self._written, self.is_written = -1, False

    def written(self, number: int) -> None:
        """The update log has everything up to `number`; going back does nothing."""
        if self._written is not None and self.is_written:
            check(number <= self.number, "LOG-1", f"{number} is in the log: not decided yet")
            self._written = max(self._written, number)

    # --- what backups say

    def acked(self, backup: NodeId, number: int) -> None:
        """The backup has everything up to `number`; going back does nothing."""
        if backup in self._acked:
            check(number <= self.number, "RL-2", f"{backup} acknowledges {number}: not decided yet")
            self._acked[backup] = max(self._acked[backup], number)

    def acked_by(self, backup: NodeId) -> int:
        """Up to where the backup, whose word counts, has everything."""
        return self._acked[backup]

    def unacked(self, backup: NodeId) -> list[LogRecord]:
        """What the backup is not known to have, to be sent again."""
        return self.after(self._acked.get(backup, self.number))

    def after(self, number: int) -> list[LogRecord]:
        """The records after `number` that are kept: all that are not committed."""
        return [e.record for e in self._entries if e.record is not None and e.number > number]

    def granted(self, backup: NodeId, sent_s: float) -> None:
        """The backup answered the beat that was sent then."""
        if backup in self._acked:
            self._granted_s[backup] = max(sent_s, self._granted_s.get(backup, -math.inf))

    def may_serve(self, now_s: float) -> bool:
        """Whether the lease holds."""
        since_s = min((self._granted_s.get(b, -math.inf) for b in self._acked), default=math.inf)
        return now_s < since_s + self._lease_s

    # --- other configurations

    def reconfigure(self, assignment_epoch: AssignmentEpoch, backups: Iterable[NodeId]) -> None:
        """The scheduler committed this set, which this primary had asked for: who is new in it was
        included before.
        """
        self.assignment_epoch = assignment_epoch
        wanted = set(backups)
        self.candidates &= wanted
        self._configured_count = len(wanted - self.candidates)
        check(wanted <= self._acked.keys(), "RL-2", f"{wanted} were not all asked for")
        for backup in [b for b in self._acked if b not in wanted]:
            del self._acked[backup]
            self._granted_s.pop(backup, None)

    def include(self, backup: NodeId, number: int) -> None:
        """The scheduler may be asked for this backup too, which has everything up to `number`: from
        now on its word counts as well. Nothing more is released without it, so that it catches up.
        """
        self._acked.setdefault(backup, number)

    def exclude(self, backup: NodeId) -> None:
        """One that was included, and of which the scheduler has not been told."""
        self._acked.pop(backup, None)
        self._granted_s.pop(backup, None)
