"""A whole range, to messages of `pushpull.v1` and back: many small ones, each of bounded size.

    RangeSnapshot, SnapshotTable.., SnapshotLedger.., SnapshotBlock + elements.., SnapshotSum +
    elements.., SnapshotChange + elements.., SnapshotEnd

Rules:
    - Messages of one snapshot are written one by one, so that others may go in between.
    - A copy is returned only when it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ps_core import limits
from ps_core.errors import InvalidConfig
from ps_core.keys import AssignmentEpoch, Incarnation, TableId
from ps_core.ledger import Ending, Ledger
from ps_server.ranges.range_copy import ShardCopy, WorkerCopy, WorkerFacts
from ps_server.replication.messages import RangeCopy, Snapshot
from ps_server.values.mutations import Elements, Mutation, SentAccumulator
from ps_server.values.store_copy import BlockCopy, StoreCopy, SumCopy
from ps_server.wire.decision_wire import (
    RecordTable,
    check_lengths,
    endings_from_proto,
    endings_to_proto,
    facts_from_proto,
    facts_to_proto,
    record_from_proto,
    record_to_proto,
    workers_from_proto,
    workers_to_proto,
)
from ps_server.wire.replication_wire import (
    change_from_proto,
    change_to_proto,
    elements_message,
    range_id_from_proto,
)
from pushpull.v1 import replication_pb2
from pushpull.v1.replication_pb2 import ReplicateRequest

_PLAIN_ENDING_BYTES = 16
"""Most bytes of an outcome without an error: its numbers and its kind."""


# --- written


def snapshot_messages(copy: RangeCopy) -> Iterator[bytes]:
    """A range as serialized requests, in sending order, each within limits.MAX_MESSAGE_BYTES."""
    snapshot = copy.snapshot
    start = replication_pb2.RangeSnapshot(
        range_id=snapshot.range_id,
        assignment_epoch=snapshot.assignment_epoch,
        term=snapshot.term,
        number=snapshot.number,
    )
    yield ReplicateRequest(snapshot=start).SerializeToString()
    for table_id, part in snapshot.copies.items():
        yield from _part_messages(table_id, part)
    for table_id, store in copy.stores.items():
        yield from _store_messages(table_id, store)
    for change in snapshot.held:
        yield from _change_messages(change)
    end = replication_pb2.SnapshotEnd(range_id=snapshot.range_id)
    yield ReplicateRequest(snapshot_end=end).SerializeToString()


def _part_messages(table_id: TableId, part: ShardCopy) -> Iterator[bytes]:
    records = RecordTable()
    message = replication_pb2.SnapshotTable(
        table_id=table_id,
        facts=facts_to_proto(part.facts, records),
        workers=workers_to_proto([worker.facts for worker in part.workers.values()]),
        records=records.messages,
        blocks=part.versions.keys(),
        versions=part.versions.values(),
    )
    yield ReplicateRequest(snapshot_table=message).SerializeToString()
    for worker in part.workers.values():
        yield from _ledger_messages(table_id, worker)


def _ledger_messages(table_id: TableId, worker: WorkerCopy) -> Iterator[bytes]:
    own_updates = worker.own_updates
    incarnation, ledger = worker.facts.incarnation, worker.ledger
    for some in _cut(ledger.kept.items()):
        endings = [(incarnation, sequence, ending) for sequence, ending in some]
        message = replication_pb2.SnapshotLedger(
            table_id=table_id,
            incarnation=incarnation,
            low_water=ledger.low_water,
            confirmed_sequence=ledger.confirmed,
            endings=endings_to_proto(endings, named=False),
            own_blocks=own_updates.keys(),
            own_updates=own_updates.values(),
        )
        yield ReplicateRequest(snapshot_ledger=message).SerializeToString()
        own_updates = {}


def _cut(endings: Iterable[tuple[int, Ending]]) -> Iterator[list[tuple[int, Ending]]]:
    """Lists of bounded size; one, empty, for an empty list."""
    some: list[tuple[int, Ending]] = []
    size = 0
    for sequence, ending in endings:
        size += _PLAIN_ENDING_BYTES + 8 * len(ending.squares)
        size += limits.MAX_ERROR_MESSAGE_BYTES if ending.error is not None else 0
        if size > limits.REPLICATION_MESSAGE_BYTES and some:
            yield some
            some, size = [], 0
        some.append((sequence, ending))
    yield some


def _store_messages(table_id: TableId, store: StoreCopy) -> Iterator[bytes]:
    for block in store.blocks:
        message = replication_pb2.SnapshotBlock(
            table_id=table_id,
            block=block.block,
            version=block.version,
            steps=block.steps,
            slots=[name for name, _ in block.slots],
        )
        yield ReplicateRequest(snapshot_block=message).SerializeToString()
        for payload in (block.values, *(slot for _, slot in block.slots)):
            yield elements_message(Elements(block.block, b"", payload))
    for kept in store.sums:
        accumulator = replication_pb2.SnapshotSum(
            table_id=table_id,
            clock=kept.clock,
            waits=kept.waits,
            block_count=len(kept.accumulator.blocks),
        )
        yield ReplicateRequest(snapshot_sum=accumulator).SerializeToString()
        yield from map(elements_message, kept.accumulator.blocks)


def _change_messages(change: Mutation) -> Iterator[bytes]:
    message, blocks = change_to_proto(change, 0)
    held = replication_pb2.SnapshotChange(
        table_id=change.record.table_id, record=record_to_proto(change.record), change=message
    )
    yield ReplicateRequest(snapshot_change=held).SerializeToString()
    yield from map(elements_message, blocks)


# --- read


@dataclass(slots=True)
class _LedgerParts:
    facts: WorkerFacts
    low_water: int | None = None
    confirmed: int = 0
    kept: dict[int, Ending] = field(default_factory=dict)
    own_updates: dict[int, int] = field(default_factory=dict)
    copy: WorkerCopy | None = None  # once all parts have come

    def whole(self) -> WorkerCopy:
        if self.copy is not None:
            return self.copy
        if self.low_water is None:
            raise InvalidConfig(f"a snapshot has no ledger of worker {self.facts.incarnation}")
        ledger = Ledger.of(self.low_water, self.confirmed, self.kept)
        self.copy = WorkerCopy(self.facts, ledger, self.own_updates)
        return self.copy


@dataclass(slots=True)
class _TableParts:
    """Received parts of a table; `copy` has no workers yet."""

    copy: ShardCopy
    workers: dict[Incarnation, _LedgerParts]
    blocks: list[BlockCopy] = field(default_factory=list)
    sums: list[SumCopy] = field(default_factory=list)


class SnapshotReader:
    """Puts a snapshot together from its messages; InvalidConfig where one does not go on from the
    ones before, or is wrong in itself.
    """

    def __init__(self, start: replication_pb2.RangeSnapshot) -> None:
        self._range_id = range_id_from_proto(start.range_id)
        self._start = start
        self._tables: dict[TableId, _TableParts] = {}
        self._newest: _LedgerParts | None = None
        self._held: list[Mutation] = []
        self._wanted_count = 0
        self._elements: list[Elements] = []
        self._take: Callable[[tuple[Elements, ...]], None] = _nothing

    def read(self, kind: str, message: Any, blocks: tuple[Elements, ...]) -> RangeCopy | None:
        """Take the next message, as of `Request`; returns the copy after the last one."""
        if kind == "elements":
            self._add(*blocks)
            return None
        if self._wanted_count:
            raise InvalidConfig(
                f"a snapshot goes on with {kind}; expected {self._wanted_count} elements before"
            )
        match kind:
            case "snapshot_table":
                self._table(message)
            case "snapshot_ledger":
                self._ledger(message)
            case "snapshot_block":
                self._block(message)
            case "snapshot_sum":
                self._sum(message)
            case "snapshot_change":
                self._change(message)
            case "snapshot_end":
                return self._whole(message)
            case _:
                raise InvalidConfig(f"a snapshot does not go on with {kind}")
        return None

    def _expect(self, count: int, take: Callable[[tuple[Elements, ...]], None]) -> None:
        self._wanted_count, self._take = count, take
        if not count:
            take(())

    def _add(self, elements: Elements) -> None:
        if not self._wanted_count:
            raise InvalidConfig(f"elements of block {elements.block} come after nothing of theirs")
        self._elements.append(elements)
        self._wanted_count -= 1
        if not self._wanted_count:
            blocks = tuple(self._elements)
            self._elements.clear()
            self._take(blocks)

    def _of(self, table_id: int) -> _TableParts:
        found = self._tables.get(TableId(table_id))
        if found is None:
            raise InvalidConfig(f"a snapshot has something of table {table_id} before the table")
        return found

    def _table(self, message: replication_pb2.SnapshotTable) -> None:
        table_id = TableId(message.table_id)
        if table_id in self._tables:
            raise InvalidConfig(f"a snapshot has table {table_id} twice")
        records = [record_from_proto(each, table_id, self._range_id) for each in message.records]
        facts = facts_from_proto(message.facts, records)
        check_lengths("versions of blocks", message.blocks, message.versions)
        versions = dict(zip(message.blocks, message.versions, strict=True))
        workers = {
            worker.incarnation: _LedgerParts(worker)
            for worker in workers_from_proto(message.workers)
        }
        self._tables[table_id] = _TableParts(ShardCopy(facts, versions), workers)

    def _ledger(self, message: replication_pb2.SnapshotLedger) -> None:
        incarnation = Incarnation(message.incarnation)
        parts = self._of(message.table_id).workers.get(incarnation)
        if parts is None:
            raise InvalidConfig(
                f"a snapshot has a ledger of worker {incarnation}, who is not in it"
            )
        if self._newest is not parts:
            if self._newest is not None:  # not all at the end: each takes a third of a millisecond
                self._newest.whole()
            self._newest = parts
        if parts.copy is not None:
            raise InvalidConfig(
                f"a snapshot has more of the ledger of worker {incarnation} after another's"
            )
        parts.low_water, parts.confirmed = message.low_water, message.confirmed_sequence
        endings = endings_from_proto(message.endings, incarnation)
        parts.kept.update((sequence, ending) for _, sequence, ending in endings)
        check_lengths("updates of a worker", message.own_blocks, message.own_updates)
        parts.own_updates.update(zip(message.own_blocks, message.own_updates, strict=True))

    def _block(self, message: replication_pb2.SnapshotBlock) -> None:
        table, names = self._of(message.table_id), tuple(message.slots)

        def take(elements: tuple[Elements, ...]) -> None:
            values, *slots = (each.payload for each in elements)
            named, steps = tuple(zip(names, slots, strict=True)), tuple(message.steps)
            table.blocks.append(BlockCopy(message.block, message.version, steps, values, named))

        self._expect(1 + len(names), take)

    def _sum(self, message: replication_pb2.SnapshotSum) -> None:
        table = self._of(message.table_id)

        def take(elements: tuple[Elements, ...]) -> None:
            accumulator = SentAccumulator(elements, is_reduced=True)
            table.sums.append(SumCopy(message.clock, message.waits, accumulator))

        self._expect(message.block_count, take)

    def _change(self, message: replication_pb2.SnapshotChange) -> None:
        table_id = TableId(message.table_id)
        self._of(table_id)
        record = record_from_proto(message.record, table_id, self._range_id)

        def take(elements: tuple[Elements, ...]) -> None:
            self._held.append(change_from_proto(message.change, record, iter(elements)))

        self._expect(message.change.block_count + message.change.mean_count, take)

    def _whole(self, end: replication_pb2.SnapshotEnd) -> RangeCopy:
        if end.range_id != self._range_id:
            raise InvalidConfig(f"a snapshot of range {self._range_id} ends as {end.range_id}")
        copies, stores = {}, {}
        for table_id, parts in self._tables.items():
            parts.copy.workers = {who: each.whole() for who, each in parts.workers.items()}
            copies[table_id] = parts.copy
            stores[table_id] = StoreCopy(tuple(parts.blocks), tuple(parts.sums))
        snapshot = Snapshot(
            self._range_id,
            AssignmentEpoch(self._start.assignment_epoch),
            AssignmentEpoch(self._start.term),
            self._start.number,
            copies,
            tuple(self._held),
        )
        return RangeCopy(snapshot, stores)


def _nothing(_: tuple[Elements, ...]) -> None:
    """Refuse elements that nothing waits for."""
