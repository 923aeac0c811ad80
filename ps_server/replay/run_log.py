"""Reads the update logs of all servers of a run, which may be running (SEMANTICS S13).

    directories --scanned--> frames --whole--> events of each range --chained--> changes, merged

Rules:
    - Nothing is locked or written. A torn end ends a log.
    - The newest of several runs in one directory is read: one that no log goes on from to another.
      Of two such it is the one with the later frames, by the servers' clocks.
    - A range begins with the first BEGIN, or whole SNAPSHOT, that is left. It goes on from one term
      of a primary to the next, in whichever log that is.
    - A table that is not in the snapshot with which a range begins comes later, or was removed: of
      one that was there before, and of which nothing follows, the logs have nothing in that range.
    - A table that is restored while the run goes on begins with the next snapshot: its values have
      a number, and no record.
    - Nobody saw the records of a term beyond the snapshot of the next: they are left out.
    - A primary that was started again goes on from its own term: nobody saw what others have of
      terms between, which had been promoted, and had not served.
    - A range that was placed anew has nothing of what it had before: that was of a removed run, or
      nobody saw it.
    - Changes of one server are in the order of its log. Those of two are in the order of their
      frames' times, as far as VER-1 allows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError

from ps_core.consistency import Consistency, Mode
from ps_core.errors import InvalidUpdateLog, PushpullError
from ps_core.keys import Incarnation, RangeId, TableId
from ps_core.tables.table import Table
from ps_runtime.cluster import wire
from ps_server.ranges.events import Record
from ps_server.ranges.range_copy import RangeFacts
from ps_server.replay.versions import (
    Origin,
    Participant,
    Reached,
    ReplayedChange,
    ShardKey,
    UpdateDecision,
)
from ps_server.replication.messages import LogRecord, RangeCopy, Snapshot
from ps_server.update_log.directory import segments_in
from ps_server.update_log.format import FrameKind, frame_bytes
from ps_server.update_log.reader import LogContents, LogFrame, scan
from ps_server.values.mutations import Assigned, Put
from ps_server.wire.replication_reader import ReplicationReader
from pushpull.v1 import types_pb2, update_log_pb2

_ATTEMPT_COUNT = 5
"""A running server may remove its oldest segments while they are looked for."""

_NAMED_COUNT = 8

Progress = Callable[[int, int], object]
"""Called with the bytes that were read, and those of all logs."""

Done = tuple[tuple[Incarnation, int], ...]
"""Workers, and the clock up to which all steps of each are decided."""


def _nothing(done: int, total: int) -> None:
    del done, total


def _chosen(table: Table) -> bool:
    del table
    return True


class _Event(NamedTuple):
    """A mark, record or snapshot of one range in one log. `read` is the kind of a mark."""

    term: int
    log: int
    order: int
    number: int
    time_s: float
    frames: tuple[LogFrame, ...]
    read: _ReadRecord | _ReadSnapshot | FrameKind


class _ReadRecord(NamedTuple):
    table_id: TableId
    clock: int
    has_changes: bool
    decisions: tuple[UpdateDecision, ...]
    facts: RangeFacts
    done: Done


class _ReadSnapshot(NamedTuple):
    """Facts of a snapshot, and the progress of each worker, by table."""

    tables: dict[TableId, tuple[RangeFacts, Done]]


@dataclass(slots=True)
class ServerLog:
    """One server's log. `table_orders` are the positions of its tables in it."""

    path: Path
    contents: LogContents
    tables: dict[TableId, Table] = field(default_factory=dict)
    table_orders: dict[TableId, int] = field(default_factory=dict)


@dataclass(slots=True)
class RunLog:
    """The logs of a run.

    Attributes:
        tables: by title.
        changes: of all tables, merged.
        reached: the end of each table shard of which the logs have everything.
        notes: remarks for people, on all tables; `notes_on` has those on some.
        unseen_count: records that were decided, and seen by nobody.
        lost_count: records that are in no log, between others that are.
    """

    logs: list[ServerLog]
    range_count: int
    tables: dict[str, Table] = field(default_factory=dict)
    changes: list[ReplayedChange] = field(default_factory=list)
    reached: dict[ShardKey, Reached] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kernel_fingerprints: set[str] = field(default_factory=set)
    unseen_count: int = 0
    lost_count: int = 0

    def notes_on(self, tables: Iterable[Table]) -> list[str]:
        """All remarks on a replay of these tables."""
        return [*self.notes, *filter(None, map(self._missing, tables))]

    def _missing(self, table: Table) -> str:
        ranges = table.blocks_by_range(self.range_count)
        missing = [each for each in ranges if (table.table_id, each) not in self.reached]
        if not missing:
            return ""
        named = ", ".join(map(str, missing[:_NAMED_COUNT]))
        more = ", ..." * (len(missing) > _NAMED_COUNT)
        return (
            f"table '{table.title}': no log has all of ranges {named}{more}; what is shown is of "
            "the others"
        )


def read_run(
    path: Path, progress: Progress = _nothing, is_chosen: Callable[[Table], bool] = _chosen
) -> RunLog:
    """Read the logs of a run, in `path` or in the directories in it. Of tables that are not chosen
    it has no changes by updates.

    Blocking: reads all logs.

    Raises:
        InvalidUpdateLog: there is no log, one cannot be read, or is damaged; the message names the
            file and byte.
    """
    try:
        return _run_in(path, progress, is_chosen)
    except OSError as error:
        where, reason = error.filename or path, error.strerror or error
        raise InvalidUpdateLog(f"{where}: an update log cannot be read: {reason}") from error


def _run_in(path: Path, progress: Progress, is_chosen: Callable[[Table], bool]) -> RunLog:
    inside = sorted(path.iterdir()) if path.is_dir() else []
    directories = [each for each in ([path] if segments_in(path) else inside) if segments_in(each)]
    if not directories:
        raise InvalidUpdateLog(f"{path} has no update log: no segment, and no server's directory")
    run = _newest_run([ServerLog(each, _scanned(each)) for each in directories], path)
    total = sum(log.contents.byte_count for log in run.logs)
    done = 0
    events: dict[RangeId, list[_Event]] = {}
    for index, log in enumerate(run.logs):
        for event_range, event, byte_count in _events(index, log, is_chosen):
            done += byte_count
            progress(done, total)
            if event is not None:
                events.setdefault(event_range, []).append(event)
        for table in log.tables.values():
            run.tables.setdefault(table.title, table)
    keyed: list[_Keyed] = []
    for range_id in sorted(events):
        keyed += _Chain(run, range_id).read(sorted(events.pop(range_id), key=lambda e: e[:3]))
        progress(done, total)
    run.changes = _merged(keyed)
    _note(run)
    return run


def _scanned(path: Path) -> LogContents:
    for _ in range(_ATTEMPT_COUNT):
        with contextlib.suppress(FileNotFoundError):
            return scan(segments_in(path))
    raise InvalidUpdateLog(f"{path}: its segments go while they are read")


def _newest_run(logs: Sequence[ServerLog], path: Path) -> RunLog:
    """The logs' segments of the newest timeline."""
    times_s: dict[bytes, float] = {}
    followed: set[bytes] = set()  # by another in the same log, whatever the clock said
    for log in logs:
        for segment in log.contents.segments.values():
            head = next(log.contents.frames(segment.number)).head
            timeline = segment.header.timeline
            times_s[timeline] = max(times_s.get(timeline, 0.0), head.time_s)
        timelines = [segment.header.timeline for segment in log.contents.segments.values()]
        followed |= set(timelines) - set(timelines[-1:])
    if not times_s:
        raise InvalidUpdateLog(f"{path} has no update log: its segments are still empty")
    newest = max(times_s.keys() - followed or times_s, key=lambda timeline: times_s[timeline])
    run = RunLog([], 0)
    for log in logs:
        segments = log.contents.segments
        ours = {n: s for n, s in segments.items() if s.header.timeline == newest}
        if ours:
            log.contents.segments = ours
            run.logs.append(log)
            run.range_count = next(iter(ours.values())).header.range_count
            run.kernel_fingerprints |= {s.header.kernel_fingerprint for s in ours.values()}
    if len(times_s) > 1:
        run.notes.append(f"{len(times_s) - 1} earlier runs in {path} are passed over")
    return run


# --- the frames of one log


def _events(
    index: int, log: ServerLog, is_chosen: Callable[[Table], bool]
) -> Iterator[tuple[RangeId, _Event | None, int]]:
    """Ranges, their events, and the bytes that were read, frame by frame."""
    reader, segment, time_s = ReplicationReader(is_open=True), 0, 0.0
    frames: list[LogFrame] = []
    left_out: set[TableId] = set()
    for order, frame in enumerate(log.contents.frames()):
        head = frame.head
        byte_count = frame_bytes(head.length)
        time_s = max(time_s, head.time_s)  # the clock of a machine may be put back
        if frame.segment != segment:
            reader, segment, frames = ReplicationReader(is_open=True), frame.segment, []
        event = None
        try:
            if head.kind in (FrameKind.SNAPSHOT, FrameKind.RECORD):
                frames.append(frame)
                came = reader.read(frame.payload)
                whole = came.snapshot if isinstance(came, RangeCopy) else came
                if isinstance(whole, LogRecord | Snapshot):
                    at = whole.term, index, order, whole.number, time_s
                    if isinstance(whole, LogRecord) and whole.table_id in left_out:
                        del frames[1:]
                        whole = _progress_of(whole)
                    event = _Event(*at, tuple(frames), _read(whole))
                if head.is_last:
                    frames = []
            elif head.kind is FrameKind.TABLE:
                table = wire.table_from_proto(types_pb2.Table.FromString(bytes(frame.payload)))
                log.tables.setdefault(table.table_id, table)
                log.table_orders.setdefault(table.table_id, order)
                if not is_chosen(table):
                    left_out.add(table.table_id)
            elif head.kind in (FrameKind.BEGIN, FrameKind.TAKEN_OVER):
                mark = update_log_pb2.UpdateLogRange.FromString(bytes(frame.payload))
                event = _Event(mark.term, index, order, mark.number, time_s, (frame,), head.kind)
        except (PushpullError, DecodeError) as error:
            path = log.contents.segments[frame.segment].path
            raise InvalidUpdateLog(f"{path}: at byte {frame.offset}: {error}") from error
        yield RangeId(head.range_id), event, byte_count


def _progress_of(record: LogRecord) -> LogRecord:
    """The record without what it changed."""
    return record._replace(changes=(), delta=record.delta._replace(workers=(), endings=()))


def _read(whole: LogRecord | Snapshot) -> _ReadRecord | _ReadSnapshot:
    if isinstance(whole, Snapshot):
        tables = {}
        for table_id, shard in whole.copies.items():
            facts = [worker.facts for worker in shard.workers.values()]
            done = tuple((each.incarnation, each.done_clock) for each in facts)
            tables[table_id] = shard.facts, done
        return _ReadSnapshot(tables)
    changes, delta = whole.changes, whole.delta
    decided = [change.record for change in changes if isinstance(change, Put | Assigned)]
    return _ReadRecord(
        whole.table_id,
        max((change.record.clock for change in changes), default=0),
        bool(changes),
        tuple(_decision(record, whole) for record in decided),
        delta.facts,
        tuple((worker.incarnation, worker.done_clock) for worker in delta.workers),
    )


def _decision(record: Record, log_record: LogRecord) -> UpdateDecision:
    contributors = record.summed_by or record.contributors
    sequences = {(c.incarnation, s) for c in contributors for s in c.sequences}
    found = [
        ending.staleness
        for incarnation, sequence, ending in log_record.delta.endings
        if (incarnation, sequence) in sequences
    ]
    participants = tuple(Participant(c.rank, c.incarnation, c.skip) for c in contributors)
    is_bsp = False  # `_Chain` knows
    return UpdateDecision(
        record.clock, is_bsp, participants, record.gone_count, max(found, default=0)
    )


def _is_bsp(settings: Mapping[int, Consistency], clock: int) -> bool:
    """As `Schedule.is_bsp`."""
    after = max((after for after in settings if clock > after), default=min(settings))
    return settings[after].mode is Mode.BSP


# --- the terms of one range


class _PassedOver(NamedTuple):
    """Terms between two of this log, the second of which goes on from the first."""

    log: int
    low: int
    high: int

    def has(self, event: _Event) -> bool:
        return event.log != self.log and self.low < event.term < self.high


def _passed_over(events: Iterable[_Event]) -> list[_PassedOver]:
    """The terms of one range that were promoted beside its primary and had not served when that
    came back with its log.
    """
    found = []
    terms: dict[int, int] = {}  # the newest, by log
    for event in events:
        if event.read is FrameKind.TAKEN_OVER and event.log in terms:
            found.append(_PassedOver(event.log, terms[event.log], event.term))
        terms[event.log] = event.term
    return found


_Key = tuple[float, int, int]
"""Time of the write, index of the log, and position in it."""

_Keyed = tuple[_Key, ReplayedChange]


class _Chain:
    """The events of one range, from term to term."""

    def __init__(self, run: RunLog, range_id: RangeId) -> None:
        self._run = run
        self._range_id = range_id
        self._number: int | None = None  # of the newest log record; None before a beginning
        self._term = 0
        self._is_cut = False  # the term's begin is in no log
        self._logs: set[int] = set()  # that have had something of the range
        self._has_all = False  # the range's own begin is in a log
        self._settings: dict[ShardKey, dict[int, Consistency]] = {}  # as in `RangeFacts`
        self._first_orders: dict[int, int] = {}  # of the range's events, by log
        self._found: list[tuple[int, _Keyed]] = []  # by the number of their log record
        self._reached: dict[ShardKey, list[tuple[int, int, Done]]] = {}
        self._past_tables: set[TableId] = set()  # which it had before it was placed anew

    def read(self, events: Sequence[_Event]) -> list[_Keyed]:
        """Changes of the range in their order, with their keys."""
        passed_over = _passed_over(events)
        for event in events:
            if any(span.has(event) for span in passed_over):
                self._run.unseen_count += isinstance(event.read, _ReadRecord)
                continue
            if self._number is not None or not isinstance(event.read, _ReadRecord):
                first = event.order - len(event.frames) + 1
                self._first_orders.setdefault(event.log, first)
            match event.read:
                case _ReadSnapshot():
                    self._snapshot(event, event.read)
                case _ReadRecord():
                    self._log_record(event, event.read)
                case kind:
                    self._mark(event, kind)
            self._logs.add(event.log)
        if self._number is not None:
            self._reach()
        return [keyed for _, keyed in self._found]

    def _mark(self, event: _Event, kind: FrameKind) -> None:
        if kind is FrameKind.BEGIN and (self._number is None or event.number < self._number):
            self._begin(event)
        elif self._number is not None and self._number != event.number:
            if event.log in self._logs and not self._is_cut:
                self._refuse(
                    event, f"it goes on from log record {event.number}, after {self._number}"
                )
            self._term, self._is_cut = event.term, True
            return
        self._term, self._is_cut = event.term, False

    def _begin(self, event: _Event) -> None:
        """Begin the range, or begin it anew: whoever placed it again knew of nothing in it."""
        if self._number is not None:
            self._run.notes.append(
                f"range {self._range_id} was placed anew under epoch {event.term}: the "
                f"{self._number} records before that are left out; they are of tables that were "
                "removed, or nobody saw them"
            )
        self._past_tables.update(table_id for table_id, _ in self._reached)
        self._found, self._reached, self._settings = [], {}, {}
        self._number, self._has_all = event.number, True

    def _log_record(self, event: _Event, read: _ReadRecord) -> None:
        if self._number is None:
            return
        if event.term != self._term:  # a snapshot of that term follows, or nothing more
            self._is_cut = True
        if self._is_cut:
            return
        if event.number != self._number + 1:
            self._refuse(event, f"log record {event.number} follows log record {self._number}")
        self._number = event.number
        place = read.table_id, self._range_id
        self._reached.setdefault(place, []).append((event.number, read.facts.clock, read.done))
        # A setting whose last update this record has is not in its own facts.
        before, self._settings[place] = self._settings.get(place, {}), dict(read.facts.settings)
        settings = before | self._settings[place]
        decisions = [d._replace(is_bsp=_is_bsp(settings, d.clock)) for d in read.decisions]
        if read.has_changes:
            self._add(event, place, Origin.RECORD, read.clock, tuple(decisions))

    def _snapshot(self, event: _Event, read: _ReadSnapshot) -> None:
        before = self._number
        if before is not None and event.number < before:
            if event.term == self._term:
                self._refuse(
                    event, f"a snapshot as of log record {event.number} follows log record {before}"
                )
            self._run.unseen_count += before - event.number
            self._found = [each for each in self._found if each[0] <= event.number]
            for place, steps in self._reached.items():
                self._reached[place] = [each for each in steps if each[0] <= event.number]
            before = event.number
        origin = Origin.SAME if before == event.number else Origin.JUMP
        has_updates = any(d.clock for _, (_, change) in self._found for d in change.decisions)
        if before is None or (origin is Origin.JUMP and not has_updates):
            origin, self._found, self._has_all = Origin.BEGIN, [], False
        restored = self._restored(event, read) if origin is Origin.JUMP else set()
        if origin is Origin.JUMP and before is not None and not restored:
            self._run.lost_count += event.number - before
        self._number, self._term, self._is_cut = event.number, event.term, False
        for table_id, (facts, done) in read.tables.items():
            place = table_id, self._range_id
            clock = max(facts.clock, facts.changed_clock)
            self._reached.setdefault(place, []).append((event.number, facts.clock, done))
            self._settings[place] = dict(facts.settings)
            own_origin = Origin.BEGIN if table_id in restored else origin
            self._add(event, place, own_origin, clock, ())

    def _restored(self, event: _Event, read: _ReadSnapshot) -> set[TableId]:
        """Tables whose values have come from a checkpoint since the record before: that takes a
        number, and no record. Within a term a log has all records.
        """
        if self._is_cut or event.term != self._term:
            return set()
        tables = self._run.logs[event.log].tables
        return {
            table_id
            for table_id in read.tables
            if (table_id, self._range_id) not in self._reached
            and table_id in tables
            and tables[table_id].restored_clock is not None
        }

    def _add(
        self,
        event: _Event,
        place: ShardKey,
        origin: Origin,
        clock: int,
        decisions: tuple[UpdateDecision, ...],
    ) -> None:
        payloads = tuple(frame.payload for frame in event.frames)
        values = event.time_s, decisions, payloads, self._where(event)
        change = ReplayedChange(place, origin, clock, *values)
        key = event.time_s, event.log, event.order
        self._found.append((event.number, (key, change)))

    def _where(self, event: _Event) -> str:
        log, first = self._run.logs[event.log], event.frames[0]
        return f"{log.contents.segments[first.segment].path}: at byte {first.offset}"

    def _refuse(self, event: _Event, problem: str) -> None:
        raise InvalidUpdateLog(f"{self._where(event)}: range {self._range_id}: {problem}")

    def _reach(self) -> None:
        for table in self._run.tables.values():
            if self._range_id not in table.blocks_by_range(self._run.range_count):
                continue
            place = table.table_id, self._range_id
            if place not in self._reached and not self._comes_later(table.table_id):
                continue
            first_clock = table.restored_clock or 0
            reached = Reached(first_clock, first_clock)
            for _, clock, done in self._reached.get(place, ()):
                reached.clock = clock
                reached.done.update(done)
            self._run.reached[place] = reached

    def _comes_later(self, table_id: TableId) -> bool:
        """True if a table of which the range has nothing was made after the range began."""
        if table_id in self._past_tables:
            return False
        logs, firsts = self._run.logs, self._first_orders.items()
        return self._has_all or any(
            logs[log].table_orders.get(table_id, -1) > first for log, first in firsts
        )


def _merged(keyed: Iterable[_Keyed]) -> list[ReplayedChange]:
    """Changes by their keys; those of one table shard in the given order (VER-1)."""
    latest: dict[ShardKey, _Key] = {}
    ordered = []
    for index, (key, change) in enumerate(keyed):
        key = latest[change.place] = max(key, latest.get(change.place, key))
        ordered.append((key, index, change))
    return [change for _, _, change in sorted(ordered, key=lambda each: each[:2])]


def _note(run: RunLog) -> None:
    if run.unseen_count:
        run.notes.append(
            f"{run.unseen_count} records were decided by servers that were replaced, and seen by "
            "nobody: they are left out"
        )
    if run.lost_count:
        run.notes.append(
            f"{run.lost_count} records are in no log; the values after them come from a snapshot"
        )
