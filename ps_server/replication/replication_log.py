"""The log of a range at its primary: decisions, held until they are committed (SEMANTICS S8).

    decided --numbered, sent--> held by every in-sync backup --released--> applied, answered

A decision changes at once what the machines know; changes of values, answers and reads wait, in
their order, until every in-sync backup has it. So nobody saw what a failover takes back.

Rules:
    - Records are numbered from 1 without gap, over all tables of the range.
    - The right to serve comes from the backups: the primary releases nothing without the `lease`.
    - A promoted primary has as candidates the former primary and its other backups, which may be a
      record behind or ahead, and be made primary in its place. While there are any it releases
      nothing; it asks the scheduler to leave them out, and they join anew.
    - If it was promoted alone, and keeps an update log, the range may go back to the former
      primary's log. It releases nothing until the scheduler knows that its own has the range.
    - A deposed primary that is primary again goes on with all its decisions, under another term;
      its candidates are the servers that could have been primary in its place.
    - A primary that hands the range over gives its lease up, and no grant gives it back before it
      has heard of a newer epoch. The new primary goes on with the numbers, under the same term.
    - While fewer than `min_in_sync` configured servers hold the range, nothing more is committed.
      Reads of committed values go on, if the update log has these.
    - An update log must have a decision, too (SEMANTICS S13): it is a backup that grants no lease
      and counts as no replica.

Invariants:
    LOG-1  Nothing is released that the update log does not have, if there is one.
    RL-1  Nothing is released before what was decided before it.
    RL-2  Nothing is released that an in-sync backup does not have, nor while there are candidates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ps_core.errors import check
from ps_core.keys import AssignmentEpoch, NodeId, RangeId, TableId
from ps_server.ranges.range_copy import RangeDelta
from ps_server.replication.lease import HeldLease
from ps_server.replication.messages import LogRecord


@dataclass(slots=True)
class _LogEntry:
    """Effects that wait for a record; `record` is None if they only follow it."""

    number: int
    record: LogRecord | None
    effects: Sequence[object]


class RangeLog:
    """The log of one range, at its primary.

    Args:
        backups: the in-sync ones; all have everything up to `number`.
        lease_s: time for which a granted beat counts, from when it was sent.
        min_in_sync: servers, this one included, that must have a committed record.

    Attributes:
        assignment_epoch: the newest.
        term: the epoch since which this server is primary, or is again.
        number: of the newest record.
        released: the number up to which everything was released, and may have been seen.
        candidates: servers that held the range under the former primary, and are not left out yet.
        may_go_back: True while the range may be given to the former primary's update log, though
            there are no candidates.
        is_written: True if records go to the update log, which has all before them.
        is_given_up: True if another may be primary with these records: nothing is released.
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
        self._lease = HeldLease(lease_s)
        self._min_in_sync = min_in_sync
        self._entries: deque[_LogEntry] = deque()
        self._acked = dict.fromkeys(backups, number)
        self._configured_count = len(self._acked)
        self.released = number
        self._is_past = False  # something was decided, and carried out, without a record
        self._anew = 0  # values that came without a record are in no copy of an earlier number
        self.candidates: frozenset[NodeId] = frozenset()
        self.may_go_back = False
        self._written: int | None = None
        self.is_written = False
        self.is_given_up = False

    def inherit(self) -> None:
        """Take the backups as candidates: they were the former primary's."""
        self.candidates = frozenset(self._acked)
        self.may_go_back = not self._acked and not self.is_logged
        self._configured_count = 0

    def resume(self, assignment_epoch: AssignmentEpoch, candidates: Iterable[NodeId]) -> None:
        """Be primary again after another was made one, which nobody saw serve meanwhile."""
        self.assignment_epoch = self.term = assignment_epoch
        self._acked = dict.fromkeys(candidates, self.number)
        self._lease.clear()
        self.lose_logged_snapshot()  # what the update log has is of the term before
        self.inherit()
        for entry in self._entries:
            if entry.record is not None:
                entry.record = entry.record._replace(term=assignment_epoch)

    def take_out(self, is_out: Callable[[object], bool]) -> list[object]:
        """Remove the held effects of which `is_out` is true, and return them."""
        found = list(filter(is_out, self.held))
        for entry in self._entries if found else ():
            entry.effects = [effect for effect in entry.effects if not is_out(effect)]
        return found

    @property
    def backups(self) -> tuple[NodeId, ...]:
        """Backups whose acknowledgements count."""
        return tuple(self._acked)

    @property
    def committed(self) -> int:
        """Number up to which enough in-sync backups, and the update log, have all records."""
        acked = min(self._acked.values(), default=self.number)
        held = self._before_held_records if self.is_short else acked
        return held if self._written is None else min(held, self._written)

    @property
    def _before_held_records(self) -> int:
        """Number before the first record that is held. It may be above `released`: what came, or
        was decided, without a record has a number too.
        """
        held = (e.record.number for e in self._entries if e.record is not None)
        return next(held, self.number + 1) - 1

    @property
    def is_short(self) -> bool:
        """True if too few servers hold the range for anything to be committed."""
        return self._configured_count + 1 < self._min_in_sync

    @property
    def is_confirmed(self) -> bool:
        """True if no other server can be made primary with what was decided before this one was."""
        return not self.candidates and not self.may_go_back

    @property
    def must_be_known(self) -> bool:
        """True if the scheduler must know first that the update log has the range."""
        return self._written is not None and not self.is_confirmed

    @property
    def is_alone(self) -> bool:
        """True if a decision is committed at once: nobody else counts, and nothing is held."""
        is_only_here = not self._acked and self._written is None
        return is_only_here and not self._entries and not self.is_short

    @property
    def shown(self) -> int:
        """A server that has everything up to this number has all that anybody may have seen."""
        return max(self.released, self._anew)

    @property
    def is_drained(self) -> bool:
        """True if every decision has been released."""
        return not self._entries

    @property
    def is_everywhere(self) -> bool:
        """True if every backup has all that was ever decided, and all of it has been released."""
        has_all = all(number == self.number for number in self._acked.values())
        return has_all and not (self._entries or self._is_past)

    # --- decisions

    def decide(
        self,
        table_id: TableId,
        delta: RangeDelta,
        changes: Sequence[object],
        effects: Sequence[object],
    ) -> LogRecord:
        """Hold the effects of a decision. Returns the record to send to every backup."""
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
        self._entries.append(_LogEntry(self.number, record, effects))
        return record

    def follow(self, effects: Sequence[object]) -> None:
        """Hold effects that decide nothing and show earlier decisions: reads."""
        if effects:
            self._entries.append(_LogEntry(self.number, None, effects))

    def release(self, now_s: float) -> list[object]:
        """Effects that may be carried out now, in order (RL-1, RL-2)."""
        out: list[object] = []
        if not self._entries or not self.is_confirmed or not self.may_serve(now_s):
            return out
        committed = self.committed
        while self._entries and self._entries[0].number <= committed:
            entry = self._entries.popleft()
            self.released = entry.number
            out += entry.effects
        return out

    @property
    def held(self) -> list[object]:
        """Effects that have not been released."""
        return [effect for entry in self._entries for effect in entry.effects]

    @property
    def held_count(self) -> int:
        return len(self._entries)

    # --- alone

    def decide_alone(self) -> None:
        self._is_past = True

    def begin_snapshot(self) -> int:
        """Number of a snapshot of this moment; a new one if anything was decided alone."""
        if self._is_past:
            self.begin_anew()
            self.lose_logged_snapshot()
        return self.number

    def begin_anew(self) -> None:
        """Count what came without a record: a server with the newest record does not have it. Held
        effects wait on, until others were given all of the range.
        """
        self.number += 1
        self._anew = self.number
        self._is_past = False
        if not self._entries:
            self.released = self.number

    # --- the update log

    def keep_log(self, written: int) -> None:
        """Keep an update log too, which has all up to record `written`; -1: nothing at all."""
        self._written, self.is_written = written, written >= 0

    @property
    def needs_snapshot(self) -> bool:
        """True if the update log must be given a snapshot before records."""
        return self._written is not None and not self.is_written

    @property
    def is_logged(self) -> bool:
        """True if the update log, if there is one, has all of the range up to some record."""
        return self._written is None or self._written >= 0

    def begin_logged_snapshot(self) -> None:
        """A snapshot is on its way to the update log; records follow."""
        self.is_written = True

    def lose_logged_snapshot(self) -> None:
        """The update log's copy of the range is out of date, and is to be replaced."""
        if self._written is not None:
            self._written, self.is_written = -1, False

    def written(self, number: int) -> None:
        """The update log has everything up to `number`, which may be old news."""
        if self._written is not None and self.is_written:
            check(number <= self.number, "LOG-1", f"{number} is in the log: not decided yet")
            self._written = max(self._written, number)

    # --- answers of backups

    def acked(self, backup: NodeId, number: int) -> None:
        """The backup has everything up to `number`, which may be old news."""
        if backup in self._acked:
            check(number <= self.number, "RL-2", f"{backup} acknowledges {number}: not decided yet")
            self._acked[backup] = max(self._acked[backup], number)

    def acked_by(self, backup: NodeId) -> int:
        """Number up to which a backup that counts has everything."""
        return self._acked[backup]

    def after(self, number: int) -> list[LogRecord]:
        """Held records after `number`."""
        return [e.record for e in self._entries if e.record is not None and e.number > number]

    def granted(self, backup: NodeId, sent_s: float) -> None:
        """The backup answered the beat that was sent at `sent_s`."""
        if backup in self._acked:
            self._lease.granted(backup, sent_s)

    def may_serve(self, now_s: float) -> bool:
        """True while the lease holds."""
        return not self.is_given_up and self._lease.holds(self._acked, now_s)

    def give_up(self) -> None:
        """Give the lease up: another may be primary, before this server hears of it."""
        self._lease.clear()
        self.is_given_up = True

    # --- other configurations

    def reconfigure(self, assignment_epoch: AssignmentEpoch, backups: Iterable[NodeId]) -> None:
        """The scheduler committed this set of backups; new ones were included before."""
        self.assignment_epoch = assignment_epoch
        wanted = set(backups)
        self.candidates &= wanted
        self.may_go_back = False
        self._configured_count = len(wanted - self.candidates)
        check(wanted <= self._acked.keys(), "RL-2", f"{wanted} were not all asked for")
        for backup in self._acked.keys() - wanted:
            self.exclude(backup)

    def include(self, backup: NodeId, number: int) -> None:
        """Count a backup that has all up to `number`: nothing more is released without it."""
        self._acked.setdefault(backup, number)

    def exclude(self, backup: NodeId) -> None:
        """Stop counting a backup."""
        self._acked.pop(backup, None)
        self._lease.exclude(backup)
