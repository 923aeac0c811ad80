"""Decides what a server's update log gets of each range, and releases what it has (S13).

    range placed       --> BEGIN, records
    range taken over   --> SNAPSHOT, records        nothing of it is seen before the log has that
    log taken over     --> TAKEN_OVER, records
    range lost         --> END; also if it was placed anew, before its BEGIN
    range withheld     --> END, once it stands elsewhere

Rules:
    - A snapshot is taken between two events, like the copy for a backup that joins. None is taken
      of a range to which values of a checkpoint are about to come. They come to a range that was
      taken over only when the scheduler knows that the log has it.

Invariants:
    LOG-2  A range that is not given back to a server is ended in its log, and not gone on with. One
           that was not asked for is ended only when a view shows who has it, or that it is empty.
    LOG-4  A range's BEGIN, TAKEN_OVER or SNAPSHOT is in the log before its records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ps_core.keys import AssignmentEpoch, RangeId
from ps_core.sliced_work import Work
from ps_server.replication.messages import LogRecord, Snapshot
from ps_server.replication.output_commit import OutputCommit
from ps_server.replication.range_roles import Replication
from ps_server.replication.replication_log import RangeLog

RangeNumbers = Mapping[tuple[RangeId, AssignmentEpoch], int]
"""The newest record that the log has, by range and term."""


class LogWriter(Protocol):
    """Writes in the order of the calls."""

    @property
    def is_busy(self) -> bool:
        """True while too much waits to be written for a snapshot, and none is due."""

    @property
    def lagging(self) -> Sequence[RangeId]:
        """Ranges that need a snapshot before old segments can go."""

    def begin(self, log: RangeLog) -> None:
        """The range has nothing yet."""

    def take_over(self, log: RangeLog) -> None:
        """This server goes on with the range from where the log is."""

    def write_snapshot(self, snapshot: Snapshot) -> Work[None]:
        """All of the range, with the values of this moment."""

    def write_record(self, record: LogRecord) -> None: ...

    def end(self, range_id: RangeId) -> None:
        """The range is another server's, or was placed anew: what the log has of it is history."""


class LoggedRanges:
    """The logged ranges of one server."""

    def __init__(self, writer: LogWriter, replication: Replication, output: OutputCommit) -> None:
        self._writer = writer
        self._replication = replication
        self._output = output
        self._recovered: set[RangeId] = set()
        self._withheld: set[RangeId] = set()
        self._terms: dict[RangeId, AssignmentEpoch] = {}  # of the ranges that are in the log

    def recover(self, range_ids: Iterable[RangeId], withheld: Iterable[RangeId] = ()) -> None:
        """The log has these ranges; nobody was asked for the `withheld` ones."""
        self._recovered, self._withheld = set(range_ids), set(withheld)

    def observe(self, lost: Iterable[RangeId]) -> None:
        """A newer view was observed, by which these ranges are lost here."""
        for range_id in lost:
            was_here = self._terms.pop(range_id, None) is not None
            if was_here or range_id in self._recovered:
                self._recovered.discard(range_id)
                self._writer.end(range_id)
        for range_id in sorted(filter(self._replication.stands_elsewhere, self._withheld)):
            self._withheld.discard(range_id)
            self._writer.end(range_id)

    def looking(self) -> Work[None]:
        """Begin the ranges that are served now, and take the snapshots that the log needs. To be
        called when more is served, when something was written, and now and then.
        """
        primaries = self._replication.primaries
        for each in primaries.values():
            if each.log.is_written:
                self._begin(each.log)
        needing = [range_id for range_id, each in primaries.items() if each.needs_snapshot]
        lacking = needing or self._writer.lagging
        awaiting = self._replication.awaiting_values if lacking else set()
        for range_id in lacking:
            if self._writer.is_busy:
                return
            primary = primaries.get(range_id)
            if primary is None or primary.is_closed:
                continue
            if range_id not in awaiting or primary.log.must_be_known:
                snapshot = yield from self._output.snapshotting_for_log(range_id)
                self._terms[range_id] = snapshot.term
                yield from self._writer.write_snapshot(snapshot)

    def write(self, record: LogRecord) -> None:
        """Write a record that was decided (LOG-4)."""
        self._begin(self._replication.primaries[record.range_id].log)
        self._writer.write_record(record)

    def _begin(self, log: RangeLog) -> None:
        if self._terms.get(log.range_id) == log.term:
            return
        self._terms[log.range_id] = log.term
        if log.range_id in self._recovered:
            self._recovered.discard(log.range_id)
            self._writer.take_over(log)
        else:
            self._writer.begin(log)

    def written(self, numbers: RangeNumbers) -> list[RangeId]:
        """The log has these records. Returns the ranges of which more may be released."""
        more = []
        for (range_id, term), number in numbers.items():
            primary = self._replication.primaries.get(range_id)
            if primary is not None and primary.log.term == term:
                primary.log.written(number)
                more.append(range_id)
        return more
