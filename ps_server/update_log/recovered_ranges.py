"""Ranges recovered from an update log: a backup that reads its records from frames (SEMANTICS S13).

    frames --BEGIN | SNAPSHOT | RECORD--> replicas, and values in the stores

Rules:
    - A record that was torn at the end of a segment is dropped.

Invariants:
    LF-1  A range's records are taken in the order of their numbers, each once, none left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.message import DecodeError

from ps_core import limits
from ps_core.errors import InvalidUpdateLog, PushpullError
from ps_core.keys import AssignmentEpoch, RangeId, TableId
from ps_core.tables.table import Table
from ps_runtime.cluster import wire
from ps_server.ranges.range_copy import fresh_copy
from ps_server.ranges.server_machine import ShardAdded
from ps_server.replication.backup import Replica
from ps_server.replication.messages import LogRecord, RangeCopy
from ps_server.stores import Shards
from ps_server.update_log.format import FrameKind
from ps_server.update_log.reader import LogContents, LogFrame, RangeStart
from ps_server.wire.replication_reader import ReplicationReader
from pushpull.v1 import types_pb2, update_log_pb2


class _LogReplay:
    """The ranges of one log, as of the newest frame that was taken, as a backup knows them."""

    def __init__(
        self, shards: Shards, range_count: int, starts: Mapping[RangeId, RangeStart]
    ) -> None:
        self.replicas: dict[RangeId, Replica] = {}
        self._shards = shards
        self._range_count = range_count
        self._starts = starts
        self._tables: dict[TableId, Table] = {}
        self._blocks: dict[TableId, Mapping[RangeId, tuple[int, ...]]] = {}
        self._segment = 0
        self._reader = ReplicationReader(is_open=True)

    def take(self, frame: LogFrame) -> None:
        """Take the next frame; InvalidUpdateLog if it does not follow the frames before."""
        if frame.segment != self._segment:
            self._segment = frame.segment
            self._reader = ReplicationReader(is_open=True)
        try:
            self._take(frame)
        except (PushpullError, DecodeError) as error:
            raise InvalidUpdateLog(
                f"segment {frame.segment}, byte {frame.offset}: range {frame.head.range_id}, "
                f"number {frame.head.number}: {error}"
            ) from error

    def _take(self, frame: LogFrame) -> None:
        head = frame.head
        range_id = RangeId(head.range_id)
        if head.kind is FrameKind.TABLE:
            self._add_table(wire.table_from_proto(types_pb2.Table.FromString(bytes(frame.payload))))
        start = self._starts.get(range_id)
        is_of_range = head.kind not in (FrameKind.HEADER, FrameKind.TABLE)
        if not is_of_range or start is None or (frame.segment, frame.offset) < start:
            return
        match head.kind:
            case FrameKind.BEGIN | FrameKind.TAKEN_OVER:
                mark = update_log_pb2.UpdateLogRange.FromString(bytes(frame.payload))
                self._mark(mark, head.kind)
            case FrameKind.END:
                self.replicas.pop(range_id, None)
            case FrameKind.SNAPSHOT | FrameKind.RECORD:
                match self._reader.read(frame.payload):
                    case RangeCopy() as copy:
                        self._join(copy)
                    case LogRecord() as record:
                        self._follow(record)

    def _add_table(self, table: Table) -> None:
        if table.table_id in self._tables:
            return
        self._tables[table.table_id] = table
        by_range = self._blocks[table.table_id] = table.blocks_by_range(self._range_count)
        parts = [ShardAdded(table, r, held) for r, held in by_range.items() if r in self._starts]
        if parts:
            self._shards.add(parts)

    def _mark(self, mark: update_log_pb2.UpdateLogRange, kind: FrameKind) -> None:
        range_id = RangeId(mark.range_id)
        copies = {}
        if kind is FrameKind.TAKEN_OVER:
            before = self.replicas.get(range_id)
            if before is None or before.number != mark.number:
                has = "nothing" if before is None else f"record {before.number}"
                raise InvalidUpdateLog(f"it goes on from record {mark.number}; the log has {has}")
            copies = before.copies
        self.replicas[range_id] = Replica(
            range_id,
            AssignmentEpoch(mark.assignment_epoch),
            limits.LEASE_S,
            AssignmentEpoch(mark.term),
            copies,
            mark.number,
        )

    def _join(self, copy: RangeCopy) -> None:
        snapshot = copy.snapshot
        before = self.replicas.get(snapshot.range_id)
        newest = snapshot.term, snapshot.number
        if before is not None and (before.term, before.number) == newest:
            return
        self._shards.restore(copy)
        self.replicas[snapshot.range_id] = Replica(
            snapshot.range_id,
            snapshot.assignment_epoch,
            limits.LEASE_S,
            snapshot.term,
            snapshot.copies,
            snapshot.number,
        )

    def _follow(self, record: LogRecord) -> None:
        replica = self.replicas.get(record.range_id)
        if replica is None or not replica.follows(record):
            raise InvalidUpdateLog(f"a record of term {record.term} follows another term")
        table = self._tables.get(record.table_id)
        if table is None:
            raise InvalidUpdateLog(f"a record is of table {record.table_id}, which the log lacks")
        blocks = self._blocks[record.table_id].get(record.range_id, ())
        if not replica.take(record, lambda: fresh_copy(table, blocks)):
            raise InvalidUpdateLog(f"record {record.number} follows record {replica.number}")
        for change in record.changes:
            failure = self._shards.make(change)
            if failure is not None:
                raise failure


def replayed(contents: LogContents, shards: Shards) -> dict[RangeId, Replica]:
    """Replay all ranges of a log that have not ended; their values go to `shards`.

    Blocking: reads the log from the first segment that is needed.

    Raises:
        InvalidUpdateLog: the log is damaged.
    """
    newest, starts = contents.newest, contents.starts
    if newest is None or not starts:
        return {}
    replay = _LogReplay(shards, newest.header.range_count, starts)
    for frame in contents.frames(since=min(starts.values()).segment):
        replay.take(frame)
    return replay.replicas
