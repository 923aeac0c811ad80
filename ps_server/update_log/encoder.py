"""Records and snapshots become the messages that a backup would get (SEMANTICS S13)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ps_core.keys import RangeId, TableId
from ps_core.sliced_work import Work
from ps_core.tables.table import Table
from ps_runtime.cluster import wire
from ps_server.replication.messages import LogRecord, Snapshot
from ps_server.replication.replication_log import RangeLog
from ps_server.stores import Shards
from ps_server.update_log.format import FrameKind
from ps_server.update_log.writer import LogItem, UpdateLog
from ps_server.wire.replication_wire import Pieces
from ps_server.wire.snapshot_wire import snapshot_messages
from pushpull.v1 import update_log_pb2

_BUSY_BYTES = 8 * 1024 * 1024
"""No snapshot is taken that is not due while more bytes than these wait to be written."""


class EncodedLog:
    """A `LogWriter` that encodes for an `UpdateLog`. `messages` encodes a record as backups get it,
    in pieces that do not change until all of them are written.
    """

    def __init__(
        self, log: UpdateLog, shards: Shards, messages: Callable[[LogRecord], Sequence[Pieces]]
    ) -> None:
        self._log = log
        self._shards = shards
        self._messages = messages
        self._tables: set[TableId] = set()

    def observe_tables(self, tables: Mapping[TableId, Table]) -> None:
        """Write new tables before anything of them."""
        for table_id, table in tables.items():
            if table_id not in self._tables:
                self._log.add_table(table_id, wire.table_to_proto(table).SerializeToString())
        self._tables = set(tables)

    def forget_tables(self, removed: Collection[TableId]) -> None:
        """Forget removed tables, whose stores are still here."""
        counts = dict.fromkeys(self._tables.intersection(removed), 0)
        for (table_id, _), store in self._shards.stores.items():
            if table_id in counts:
                counts[table_id] += store.state_bytes
        for table_id, state_bytes in counts.items():
            self._log.forget_table(table_id, state_bytes)
        self._tables -= counts.keys()

    @property
    def is_busy(self) -> bool:
        is_due = self._log.segments.snapshot_is_due
        return self._log.queued_bytes > _BUSY_BYTES and not is_due

    @property
    def lagging(self) -> Sequence[RangeId]:
        return self._log.segments.lagging

    def begin(self, log: RangeLog) -> None:
        self._mark(FrameKind.BEGIN, log)

    def take_over(self, log: RangeLog) -> None:
        self._mark(FrameKind.TAKEN_OVER, log)

    def write_snapshot(self, snapshot: Snapshot) -> Work[None]:
        messages = []
        for each in snapshot_messages((yield from self._shards.copying(snapshot))):
            messages.append((each,))
            yield
        range_id, number = snapshot.range_id, snapshot.number
        self._log.append(LogItem(FrameKind.SNAPSHOT, messages, range_id, number, snapshot.term))

    def write_record(self, record: LogRecord) -> None:
        place = record.range_id, record.number, record.term
        self._log.append(LogItem(FrameKind.RECORD, self._messages(record), *place))

    def end(self, range_id: RangeId) -> None:
        mark = update_log_pb2.UpdateLogRange(range_id=range_id)
        self._log.append(LogItem(FrameKind.END, ((mark.SerializeToString(),),), range_id))

    def _mark(self, kind: FrameKind, log: RangeLog) -> None:
        """Mark the range's first moment under this primary: nothing is released yet."""
        mark = update_log_pb2.UpdateLogRange(
            range_id=log.range_id,
            term=log.term,
            assignment_epoch=log.assignment_epoch,
            number=log.released,
        )
        messages = ((mark.SerializeToString(),),)
        self._log.append(LogItem(kind, messages, log.range_id, log.released, log.term))
