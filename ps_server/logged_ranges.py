"""What of a server's ranges goes to its update log, and what follows when it is there (S13).

    range placed       --> BEGUN, batches
    range taken over   --> a base, batches          nothing of it is seen before the base is there
    log taken over     --> TAKEN_OVER, batches
    range lost         --> ENDED

Rules:
    - A base is taken between two events, like the copy for a backup that joins.
    - Where much waits to be written, bases that nobody waits for wait too.

Everything belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ps_core.cluster_view import ClusterView
from ps_core.keys import AssignmentEpoch, RangeId, TableId
from ps_runtime import logs, wire
from ps_server.output_commit import OutputCommit
from ps_server.range_log import RangeLog
from ps_server.replication import Replication
from ps_server.replication_messages import Batch
from ps_server.shards import Shards
from ps_server.snapshot_wire import snapshot_messages
from ps_server.update_log import Item, UpdateLog, Written
from ps_server.update_log_frames import FrameKind
from pushpull.v1 import update_log_pb2

_ROOM_BYTES = 8 * 1024 * 1024
"""No base is taken while so much waits to be written."""


class LoggedRanges:
    """The logged ranges of one server.

    Args:
        log: the log.
        replication: of the server.
        output: of the same.
        shards: its values.

    Attributes:
        released: called with ranges of which more is written.
    """

    def __init__(
        self,
        log: UpdateLog,
        replication: Replication,
        output: OutputCommit,
        shards: Shards,
    ) -> None:
        self.log = log
        self.released: Callable[[Iterable[RangeId]], None] = _nothing
        self._replication = replication
        self._output = output
        self._shards = shards
        self._recovered: dict[RangeId, int] = {}
        self._tables: set[TableId] = set()
        self._tenures: dict[RangeId, AssignmentEpoch] = {}  # of the ranges that are in the log
        log.on_written = self._written

    def recover(self, segments: Mapping[RangeId, int]) -> None:
        """These ranges were read from the log; each begins in that segment."""
        self._recovered = dict(segments)

    # --- what happens

    def observe(self, view: ClusterView, lost: Iterable[RangeId]) -> None:
        """A newer view, which replication has observed: nothing of `lost` is here any more."""
        for table in view.tables:
            if table.table_id not in self._tables:
                self._tables.add(table.table_id)
                self.log.add_table(wire.table_to_proto(table).SerializeToString())
        for range_id in lost:
            was_here = self._tenures.pop(range_id, None) is not None
            if self._recovered.pop(range_id, None) is not None or was_here:
                self._mark(FrameKind.ENDED, range_id)

    def look(self) -> None:
        """What is served now is in the log, or gets there; to be called when more is served, and
        now and then.
        """
        if self.log.failure is not None:
            raise self.log.failure
        for range_id, primary in self._replication.primaries.items():
            if self._tenures.get(range_id) != primary.log.tenure and primary.log.is_written:
                self._begin(range_id, primary.log)
        needing = [r for r, p in self._replication.primaries.items() if p.needs_base]
        for range_id in needing or self.log.lagging:
            if self.log.queued_bytes > _ROOM_BYTES:
                return
            if range_id in self._replication.primaries:
                self._base(range_id)
        self.log.turn(self._shards.state_bytes)

    def write(self, batch: Batch, messages: Sequence[bytes]) -> None:
        """A batch was decided."""
        self.look_at(batch.range_id)
        item = Item(FrameKind.BATCH, messages, batch.range_id, batch.number, batch.tenure)
        self.log.append(item)

    def look_at(self, range_id: RangeId) -> None:
        """What a batch of the range follows is in the log before it."""
        log = self._replication.primaries[range_id].log
        if self._tenures.get(range_id) != log.tenure:
            self._begin(range_id, log)

    def _begin(self, range_id: RangeId, log: RangeLog) -> None:
        segment = self._recovered.pop(range_id, None)
        self._tenures[range_id] = log.tenure
        if segment is None:
            self._mark(FrameKind.BEGUN, range_id, log)
        else:
            self.log.goes_on(range_id, segment)
            self._mark(FrameKind.TAKEN_OVER, range_id, log)

    def _base(self, range_id: RangeId) -> None:
        snapshot = self._output.base(range_id)
        messages = list(snapshot_messages(self._shards.copy(snapshot)))
        self._tenures[range_id] = snapshot.tenure
        self.log.append(Item(FrameKind.BASE, messages, range_id, snapshot.number, snapshot.tenure))

    def _mark(self, kind: FrameKind, range_id: RangeId, log: RangeLog | None = None) -> None:
        mark = update_log_pb2.UpdateLogRange(range_id=range_id)
        if log is not None:
            mark.tenure, mark.assignment_epoch = log.tenure, log.assignment_epoch
            mark.number = log.released
        number = mark.number
        self.log.append(Item(kind, (mark.SerializeToString(),), range_id, number))

    # --- what is written

    def _written(self, written: Written) -> None:
        more = []
        for (range_id, tenure), number in written.numbers.items():
            primary = self._replication.primaries.get(range_id)
            if primary is not None and primary.log.tenure == tenure:
                primary.log.written(number)
                more.append(range_id)
        self.released(more)
        if written.starts:
            logs.debug("update_log_based", ranges=len(written.starts))
            self.look()

    async def close(self) -> None:
        """End it, with all that was decided in it."""
        await self.log.close()


def _nothing(range_ids: Iterable[RangeId]) -> None:
    del range_ids
