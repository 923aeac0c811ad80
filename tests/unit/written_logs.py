"""Update logs as servers write them, made by hand: what is in them is known, frame by frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np

from ps_core.consistency import Consistency, Mode
from ps_core.keys import AssignmentEpoch, Incarnation, RangeId
from ps_core.ledger import Ending, Outcome
from ps_core.rows import partition_of
from ps_core.sliced_work import at_once
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_runtime.cluster import wire
from ps_server.lane.lane_socket import SharedLanes
from ps_server.ranges.events import Contributor, Record
from ps_server.ranges.range_copy import RangeDelta, ShardCopy, WorkerFacts, fresh_copy
from ps_server.ranges.server_machine import ShardAdded
from ps_server.replication.messages import LogRecord, Snapshot
from ps_server.stores import Shards
from ps_server.update_log.directory import LogDirectory
from ps_server.update_log.format import MAGIC, FrameKind, Head, packed, padding
from ps_server.update_log.reader import FORMAT_VERSION
from ps_server.values.mutations import Assigned, Elements, KeptSum, Mutation, Put, SentAccumulator
from ps_server.values.row_gradients import payload_of
from ps_server.wire.replication_wire import log_record_messages
from ps_server.wire.snapshot_wire import snapshot_messages
from pushpull.v1 import replication_pb2, update_log_pb2
from tests.property.shard_twin import table

RANGE_COUNT = 2
LEFT, RIGHT = RangeId(0), RangeId(1)
MOMENTUM = OptimizerSpec(OptimizerKind.SGD, (("lr", 0.5), ("momentum", 0.9)))
MODEL = table([384], optimizer=MOMENTUM)
BLOCKS = MODEL.blocks_by_range(RANGE_COUNT)
ASP = replace(MODEL, spec=replace(MODEL.spec, consistency=Consistency(Mode.ASP)))
HEADER = update_log_pb2.UpdateLogHeader(
    format_version=FORMAT_VERSION, cluster_id="c", timeline=b"t" * 16, range_count=RANGE_COUNT
)


@dataclass
class Owner:
    """A server that has the values of a range: what it decides it makes, and writes."""

    range_id: RangeId
    of: Table = MODEL
    term: int = 2
    number: int = 0
    shards: Shards = field(default_factory=lambda: Shards(SharedLanes(), {}))
    held: tuple[Mutation, ...] = ()

    def __post_init__(self) -> None:
        self.blocks = self.of.blocks_by_range(RANGE_COUNT)[self.range_id]
        self.shards.add([ShardAdded(self.of, self.range_id, self.blocks)])
        self._done = dict.fromkeys(range(2), 0)
        self.copy: ShardCopy = fresh_copy(self.of, self.blocks)

    def twin(self) -> Self:
        """Another server that has the same."""
        found = type(self)(self.range_id, self.of, self.term, self.number)
        at_once(
            found.shards.stores[self.of.table_id, self.range_id].restoring(self._store.snapshot())
        )
        found.copy = self.copy.twin()
        return found

    @property
    def _store(self):  # type: ignore[no-untyped-def]
        return self.shards.stores[self.of.table_id, self.range_id]

    def values(self) -> dict[int, bytes]:
        return {b: bytes(self._store.read(b, None, None)[0]) for b in self.blocks}

    def update(
        self,
        clock: int,
        ranks: Sequence[int] = (0,),
        value: float = 1.0,
        skipped: Sequence[int] = (),
        staleness: int = 0,
    ) -> LogRecord:
        """An update of every block: `value`, summed over `ranks`."""
        record = self._record(clock, ranks, skipped)
        return self._decide(Put(record, self._total(value)), record, staleness)

    def kept(self, clock: int, ranks: Sequence[int], value: float) -> LogRecord:
        """A sum that waits for its scale."""
        record = self._record(clock, ranks)
        return self._decide(KeptSum(record, self._total(value)), record, is_counted=False)

    def scaled(self, clock: int, ranks: Sequence[int], scale: float) -> LogRecord:
        """The update that was kept, times a scale that rank 0 says."""
        record = self._record(clock, ranks)
        record = record._replace(
            contributors=record.contributors[:1],
            summed_by=record.contributors,
            update_scale=scale,
        )
        return self._decide(Put(record, None), record)

    def assigned(self, value: float, clock: int = 0) -> LogRecord:
        """Initial values from rank 0; with a clock, its edit."""
        record = self._record(clock, (0,))._replace(is_assign=True)
        return self._decide(Assigned(record, self._total(value).blocks), record, is_counted=False)

    def snapshot(self) -> list[bytes]:
        """All of the range as it is now."""
        snapshot = Snapshot(
            self.range_id,
            AssignmentEpoch(self.term),
            AssignmentEpoch(self.term),
            self.number,
            {self.of.table_id: self.copy},
        )
        return list(snapshot_messages(at_once(self.shards.copying(snapshot))))

    def _record(self, clock: int, ranks: Sequence[int], skipped: Sequence[int] = ()) -> Record:
        parts = [Contributor(r, Incarnation(10 + r), (clock * 10,), False) for r in ranks]
        parts += [Contributor(r, Incarnation(10 + r), (clock * 10,), True) for r in skipped]
        return Record(
            self.of.table_id, self.range_id, self.number + 1, clock, False,
            tuple(sorted(parts)), (), self.blocks,
        )  # fmt: skip

    def _total(self, value: float) -> SentAccumulator:
        rng = np.random.default_rng(int(value * 1000) + self.range_id)
        return SentAccumulator(
            tuple(
                Elements(b, b"", rng.normal(value, 1.0, 64).astype("<f4").tobytes())
                for b in self.blocks
            )
        )

    def _decide(
        self, change: Mutation, record: Record, staleness: int = 0, *, is_counted: bool = True
    ) -> LogRecord:
        is_bsp = self.of.spec.mode is Mode.BSP
        formed = record.clock if is_bsp and is_counted else self.copy.facts.clock
        if not is_bsp:
            self._done |= {c.rank: record.clock for c in record.contributors}
            formed = min(self._done.values())
        changed = record.clock if is_counted else self.copy.facts.changed_clock
        facts = self.copy.facts._replace(
            clock=formed, formed_clock=formed, changed_clock=changed, initialized=True
        )
        parts = record.summed_by or record.contributors
        workers = tuple(
            WorkerFacts(c.incarnation, c.rank, record.clock, record.clock, None, 0, 0)
            for c in parts
        )
        endings = tuple(
            (c.incarnation, record.clock * 10, Ending(Outcome.APPLIED, staleness=staleness))
            for c in parts
        )
        self.number += 1
        delta = RangeDelta(facts, workers, endings, (record,) if is_counted else ())
        log_record = LogRecord(
            self.range_id, AssignmentEpoch(self.term), AssignmentEpoch(self.term),
            self.number, self.of.table_id, delta, (change,),
        )  # fmt: skip
        assert self.shards.make(change) is None
        self.copy.take(delta)
        return log_record


class RowsOwner(Owner):
    """One of a table of rows; an update is of some rows of each partition, the most often of those
    with low ids.
    """

    def _total(self, value: float) -> SentAccumulator:
        rows = self.of.spec.rows
        assert rows is not None
        rng = np.random.default_rng(int(value * 1000) + self.range_id)
        ids = np.unique((rng.zipf(1.2, 60) % 200).astype(np.uint64))
        found = []
        for block in self.blocks:
            own = ids[[partition_of(int(each), rows) == block for each in ids]]
            shape = len(own), self.of.spec.element_count
            payload = payload_of(own, rng.normal(value, 1.0, shape).astype("<f4"))
            found.append(Elements(block, b"", payload))
        return SentAccumulator(tuple(found))

    def turn_round(self) -> None:
        """Have the rows and candidates in another order, as after a checkpoint or a copy."""
        copy = self._store.snapshot()
        blocks = []
        for each in copy.blocks:
            slots = dict(each.slots)
            (ids_name,) = {"ids", "candidate_ids"} & slots.keys()
            count = len(slots[ids_name]) // 8

            def turned(payload: bytes, count: int = count) -> bytes:
                return np.frombuffer(payload, np.uint8).reshape(count, -1)[::-1].tobytes()

            if count:
                slots = {name: turned(payload) for name, payload in slots.items()}
                values = turned(each.values) if each.values else b""
                each = each._replace(values=values, slots=tuple(slots.items()))
            blocks.append(each)
        at_once(self._store.restoring(copy._replace(blocks=tuple(blocks))))

    def rows(self) -> dict[str, dict[int, dict[str, bytes]]]:
        """Everything by id: of rows, and of candidates that count."""
        return by_id(self._store.saved(block).tensors for block in self.blocks)


def by_id(
    partitions: Iterable[Sequence[tuple[str, memoryview]]],
) -> dict[str, dict[int, dict[str, bytes]]]:
    """The arrays of each row, and of each candidate that counts, of some partitions."""
    found: dict[str, dict[int, dict[str, bytes]]] = {"ids": {}, "candidate_ids": {}}
    for named in partitions:
        tensors = {name: bytes(payload) for name, payload in named}
        for ids_name, own in found.items():
            ids = np.frombuffer(tensors.get(ids_name, b""), np.uint64).tolist()
            prefix = "candidate_" if ids_name != "ids" else ""
            arrays = {
                name: payload
                for name, payload in tensors.items()
                if name != ids_name and name.startswith("candidate_") == bool(prefix)
            }
            for at, row_id in enumerate(ids):
                width = {name: len(payload) // len(ids) for name, payload in arrays.items()}
                row = {n: p[at * width[n] : (at + 1) * width[n]] for n, p in arrays.items()}
                if row.get("candidate_update_count") != bytes(4):
                    assert row_id not in own
                    own[row_id] = row
    return found


class WrittenLog:
    """One server's log, with the id of its directory. `group` is that of the frames that come, and
    `kernels` made the segments that come.
    """

    is_synced = False
    groups_are_consecutive = True

    def __init__(
        self,
        path: Path,
        of: Table = MODEL,
        timeline: bytes = b"t" * 16,
        boot: str = "",
        after: int = 0,
    ) -> None:
        self.path = path
        self.now_s = 1000.0
        self.group = 1
        self.kernels = ""
        self._of = of
        self._timeline = timeline
        self._boot = boot
        self._number = after
        path.mkdir(parents=True, exist_ok=True)
        with LogDirectory(path) as directory:
            self._log_id = directory.log_id
            directory.has_begun()
        self.segment()

    @property
    def newest(self) -> Path:
        return self.path / f"{self._number:08d}.log"

    def segment(self) -> None:
        """Begin another."""
        self._number += 1
        self.newest.write_bytes(MAGIC)
        header = update_log_pb2.UpdateLogHeader()
        header.CopyFrom(HEADER)
        header.segment, header.timeline = self._number, self._timeline
        header.boot_id, header.is_synced = self._boot, self.is_synced
        header.log_id, header.kernel_fingerprint = self._log_id, self.kernels
        header.groups_are_consecutive = self.groups_are_consecutive
        self._write(FrameKind.HEADER, [header.SerializeToString()])
        self.table(self._of)

    def table(self, of: Table) -> None:
        """There is another table."""
        self._write(FrameKind.TABLE, [wire.table_to_proto(of).SerializeToString()])

    def go_on_after(self, number: int) -> None:
        """Begin another, with the number after that."""
        self._number = number
        self.segment()

    def begin(self, owner: Owner) -> None:
        self._mark(FrameKind.BEGIN, owner)

    def taken_over(self, owner: Owner) -> None:
        self._mark(FrameKind.TAKEN_OVER, owner)

    def end(self, range_id: RangeId) -> None:
        mark = update_log_pb2.UpdateLogRange(range_id=range_id)
        self._write(FrameKind.END, [mark.SerializeToString()], range_id)

    def record(self, log_record: LogRecord, time_s: float | None = None) -> None:
        self.now_s = self.now_s + 1 if time_s is None else time_s
        self._write(
            FrameKind.RECORD,
            log_record_messages(log_record),
            log_record.range_id,
            log_record.number,
        )

    def torn_record(self, log_record: LogRecord) -> None:
        """Its first block in a frame alone; the process died before the next."""
        request = replication_pb2.ReplicateRequest()
        request.batch.more_follow = True
        (change,) = log_record.changes
        assert isinstance(change, Put)
        block = change.accumulator.blocks[0]
        request.batch.blocks.add(block=block.block, payload=bytes(block.payload))
        raw = request.SerializeToString()
        self._write(FrameKind.RECORD, [raw], log_record.range_id, log_record.number, is_torn=True)

    def snapshot(self, owner: Owner) -> None:
        self._write(FrameKind.SNAPSHOT, owner.snapshot(), owner.range_id, owner.number)

    def _mark(self, kind: FrameKind, owner: Owner) -> None:
        mark = update_log_pb2.UpdateLogRange(
            range_id=owner.range_id, term=owner.term, assignment_epoch=owner.term,
            number=owner.number,
        )  # fmt: skip
        self._write(kind, [mark.SerializeToString()], owner.range_id, owner.number)

    def _write(
        self,
        kind: FrameKind,
        payloads: Sequence[bytes],
        range_id: RangeId = LEFT,
        number: int = 0,
        *,
        is_torn: bool = False,
    ) -> None:
        with self.newest.open("ab") as file:
            for index, payload in enumerate(payloads):
                is_last = index == len(payloads) - 1 and not is_torn
                head = Head(len(payload), kind, is_last, range_id, self.group, number, self.now_s)
                file.write(packed(head, payload) + payload + padding(len(payload)))


class SyncedLog(WrittenLog):
    """One that outlives a power cut, but for its last group."""

    is_synced = True


class OlderSyncedLog(SyncedLog):
    """One by a server that counted groups without frames, too."""

    groups_are_consecutive = False
