"""All stores of one server: what the machines decide is carried out on them.

Values that sessions on this host read lie in `ps_server.lane.value_segments`.

Invariants:
    SH-1  Each accumulated or assigned block has its payload.
    SH-2  A block that is shared changes only while its sequence lock is odd.
    SH-3  A range has one store of a table, from when it is added until it is removed.

Everything belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ps_core import limits
from ps_core.cluster_view import ClusterView
from ps_core.errors import InvalidKeys, InvariantViolation, Recovering, UpdateFailed
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.sliced_work import Work, at_once, pieces_of
from ps_core.tables.elements import Codec
from ps_core.tables.table import Table
from ps_runtime.system.turns import Turns
from ps_server.lane.lane_socket import SharedLanes
from ps_server.lane.value_segments import SharedValues, ValueSegments, held_ranges
from ps_server.ranges.events import (
    Accumulate,
    AssignValues,
    Forget,
    Place,
    Record,
    Sender,
)
from ps_server.ranges.server_machine import ShardAdded
from ps_server.replication.messages import RangeCopy, Snapshot
from ps_server.rows.row_arrays import MemoryUse
from ps_server.rows.row_memory import RowMemory
from ps_server.values import contributions
from ps_server.values.block_values import ReadyBlock, ready_block
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.contributions import Contribution
from ps_server.values.copy_on_write import RangeSnapshots
from ps_server.values.custom_updates import CheckedUpdate
from ps_server.values.mutations import (
    Assigned,
    Dropped,
    KeptSum,
    Mutation,
    Put,
    SentAccumulator,
    fixed_elements,
)
from ps_server.values.optimizer_arrays import check_array
from ps_server.values.row_gradients import RowGradients
from ps_server.values.row_layout import RowLayout
from ps_server.values.row_store import RowStore, Store
from ps_server.values.shard_store import ChangeHooks, ShardStore, nobody
from ps_server.values.update_arithmetic import Accumulator, Terms
from pushpull.v1 import parameters_pb2

_Key = tuple[TableId, RangeId]

_AGAIN_MS = 100
_FREEZE_COUNT = 1024
"""Blocks made between two freezes of the garbage collector, which would otherwise look at them
again and again: a tenth of a second for those of a large table.
"""


class Shards:
    """All stores of one server.

    Attributes:
        received_bytes: payload bytes that came, in messages or in shared memory.
        sent_bytes: those of answers to pulls.
        unchanged_bytes: those that answers left out, since the caller had them.
        watched: the shards of whose changes `on_change` hears.
        on_change: called with blocks of a watched shard before they change, or go.
        snapshots: blocks to write for a checkpoint before they change, if any.
        pool: the working memory of all stores.
        row_memory: of the rows of all tables.
        has_rows: a table of rows is here, or was.
    """

    def __init__(
        self,
        lanes: SharedLanes,
        updates: Mapping[str, CheckedUpdate],
        row_memory: RowMemory | None = None,
    ) -> None:
        self.row_memory = row_memory or RowMemory()
        self.has_rows = False
        self.stores: dict[_Key, Store] = {}
        self.received_bytes = 0
        self.sent_bytes = 0
        self.unchanged_bytes = 0
        self._ready: dict[_Key, tuple[SharedValues | None, Store]] = {}  # not here yet
        self.watched: Container[_Key] = ()
        self.on_change: Callable[[_Key, Collection[int]], None]
        self.snapshots: RangeSnapshots | None = None
        self.lanes = lanes
        self._updates = updates
        self.pool = BufferPool()
        self.segments = ValueSegments(lanes)

    def clear(self) -> None:
        """Let go of all values, and of the memory for work on them."""
        self.stores.clear()
        self._ready.clear()
        self.snapshots = None
        self.pool = BufferPool()
        self.segments = ValueSegments(self.lanes)

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters and optimizer state."""
        return sum(store.state_bytes for store in self.stores.values())

    @property
    def memory_use(self) -> MemoryUse:
        """The memory of all tables."""
        return functools.reduce(
            MemoryUse.plus,
            (
                each.memory_use if isinstance(each, RowStore) else MemoryUse(each.state_bytes)
                for each in self.stores.values()
            ),
            MemoryUse(),
        )

    def look_at_memory(self) -> None:
        """Measure what tables take, for new rows; try the disk of rows again, if it failed."""
        self.row_memory.measured(self.memory_use)
        tier = self.row_memory.tier
        if tier is not None and tier.failure is not None:
            any(each.try_disk() for each in self.stores.values() if isinstance(each, RowStore))

    @property
    def row_count(self) -> int:
        """The rows of all tables."""
        return sum(each.row_count for each in self.stores.values() if isinstance(each, RowStore))

    @property
    def candidate_count(self) -> int:
        """The candidates of all tables of rows."""
        stores = (each for each in self.stores.values() if isinstance(each, RowStore))
        return sum(each.candidate_count for each in stores)

    def add(self, parts: Sequence[ShardAdded]) -> None:
        """Add shards of one table, shared if this server shares any; existing ones stay (SH-3)."""
        table = parts[0].table
        parts = [part for part in parts if (table.table_id, part.range_id) not in self.stores]
        if not parts:
            return
        segments = self.segments.add(parts)
        for part in parts:
            key = table.table_id, part.range_id
            shared, ready = segments[part.range_id], self._ready.pop(key, None)
            if ready is not None and ready[0] is shared:
                self.stores[key] = ready[1]
            else:
                self.stores[key] = self._store_of(table, part.blocks, shared)

    def _store_of(
        self,
        table: Table,
        blocks: Sequence[int],
        shared: SharedValues | None,
        ready: Mapping[int, ReadyBlock] | None = None,
    ) -> Store:
        if table.spec.rows is not None:
            self.has_rows = True
            return RowStore(table, blocks, self.row_memory)
        update = self._updates.get(table.spec.optimizer.custom_update)
        home = None if shared is None else shared.values
        return ShardStore(table, blocks, self.pool, home, update, ready)

    async def prepare(
        self,
        view: ClusterView,
        node_id: NodeId,
        turns: Turns,
        on_ready: Callable[[ShardAdded], None],
    ) -> None:
        """Prepare stores for a view that is about to be observed: a table of many blocks takes
        seconds, in which others have their turns. `on_ready` is called with each shard.
        """
        lacking = await self._lacking(view, node_id, turns)
        specs = {part.table.table_id: part.table.spec for part in lacking}
        for spec in specs.values():
            if spec.rows is not None:
                await asyncio.to_thread(RowLayout(spec).load)
        await self.segments.reserve(view, node_id, turns)
        expected = {(part.table.table_id, part.range_id) for part in lacking}
        self._ready = {key: ready for key, ready in self._ready.items() if key in expected}
        made_count = 0
        for part in lacking:
            key = part.table.table_id, part.range_id
            if key in self.stores or key in self._ready:
                continue
            shared = self.segments.spare(key)
            home = None if shared is None else shared.values
            made: dict[int, ReadyBlock] = {}
            for block in () if part.table.spec.rows else part.blocks:
                made[block] = ready_block(part.table, block, home)
                made_count += 1
                if not made_count % limits.SLICE_BLOCK_COUNT:
                    await turns.breathe()
                if not made_count % _FREEZE_COUNT:
                    gc.freeze()
            self._ready[key] = shared, self._store_of(part.table, part.blocks, shared, made)
            on_ready(part)

    async def _lacking(self, view: ClusterView, node_id: NodeId, turns: Turns) -> list[ShardAdded]:
        """Shards that the server has by a view, and has no store for."""
        held, range_count = held_ranges(view, node_id), len(view.ranges)
        found = []
        for table in view.tables:
            if table.block_count > limits.SLICE_BLOCK_COUNT and not table.knows_ranges(range_count):
                await asyncio.to_thread(table.blocks_by_range, range_count)
            for range_id, blocks in table.blocks_by_range(range_count).items():
                if range_id in held and (table.table_id, range_id) not in self.stores:
                    found.append(ShardAdded(table, range_id, blocks))
            await turns.breathe()
        return found

    def remove(self, range_id: RangeId) -> None:
        """`removing`, at once."""
        at_once(self.removing((range_id,)))

    def removing(self, range_ids: Collection[RangeId]) -> Work[None]:
        """Remove ranges, of all tables."""
        yield from self._removing([key for key in self.stores if key[1] in range_ids])
        yield from self.segments.removing(range_ids)

    def removing_tables(self, table_ids: Collection[TableId]) -> Work[None]:
        """Remove tables, in all ranges."""
        yield from self._removing([key for key in self.stores if key[0] in table_ids])
        self._ready = {key: each for key, each in self._ready.items() if key[0] not in table_ids}
        self.segments.remove_tables(table_ids)

    def _removing(self, keys: Iterable[_Key]) -> Work[None]:
        for key in keys:
            if key in self.watched:
                self.on_change(key, self.stores[key].blocks)
            del self.stores[key]
            yield

    def custom_state(self, name: str) -> tuple[str, ...]:
        """Names of a custom update's state; none if the update is not here."""
        update = self._updates.get(name)
        return () if update is None else tuple(update.slots)

    # --- received payloads

    def decode(
        self, place: Place, block: int, codec: Codec, payload: memoryview, presence: bytes
    ) -> Contribution | RowGradients:
        """As `parameter_wire.Decoder`; the machine answers for a place that is not here."""
        store = self._store_at(place)
        self.received_bytes += len(payload)
        return store.decode(block, codec, payload, presence)

    def decode_shared(
        self, place: Place, sender: Sender, message: parameters_pb2.BlockPush, codec: Codec
    ) -> Contribution | RowGradients:
        """As `parameter_wire.Decoder`."""
        store = self._store_at(place)
        payload = self.lanes.payload(sender.incarnation, message.shared_payload)
        self.received_bytes += len(payload)
        return store.decode(message.block, codec, payload, message.presence, is_shared=True)

    def check_space(self, place: Place, found: Contribution | RowGradients) -> None:
        """As `parameter_wire.Decoder`."""
        if isinstance(found, RowGradients):
            store = self._store_at(place)
            if isinstance(store, RowStore):
                store.check_space(found)

    def _store_at(self, place: Place) -> Store:
        """The store of an entry, which may reach a machine that has come meanwhile: that its
        payload was not decoded is no fault of its sender.
        """
        store = self.stores.get((place.table_id, place.range_id))
        if store is None:
            raise Recovering(
                f"range {place.range_id} was not here when the push came", retry_after_ms=_AGAIN_MS
            )
        return store

    def _store(self, table_id: TableId, range_id: RangeId) -> Store:
        store = self.stores.get((table_id, range_id))
        if store is None:
            raise InvalidKeys(f"range {range_id} holds no block of table {table_id}")
        return store

    # --- effects

    def accumulate(self, effect: Accumulate) -> None:
        """Add one worker's step to the accumulator of its clock."""
        store = self.stores[effect.table_id, effect.range_id]
        parts = _contributions(effect.parts)
        store.accumulate(effect.clock, parts, effect.scale, effect.compensation)

    def reducing(self, record: Record) -> Work[tuple[float, ...]]:
        """Reduce the sum of the record's clock, as `ShardStore.reducing`."""
        store = self.stores[record.table_id, record.range_id]
        return store.reducing(record.clock, record.contributor_count)

    def take(self, record: Record) -> Accumulator:
        """Take the accumulator of the record's clock; its later steps go into another one."""
        return self.stores[record.table_id, record.range_id].take(record.clock)

    def kept(self, record: Record) -> Accumulator:
        """The reduced accumulator of the record's clock; it stays where it is."""
        return self.stores[record.table_id, record.range_id].kept_accumulator(record.clock)

    def applying(
        self, record: Record, accumulator: Accumulator | None = None
    ) -> Work[UpdateFailed | None]:
        """Apply a record. Returns the error if the update could not be computed; nothing has
        changed then. The accumulator is used up; None means what was accumulated for its clock.
        """
        if accumulator is None and self.is_brief(record):
            self.apply_brief(record)
            return None
        key = record.table_id, record.range_id
        store = self.stores[key]
        if accumulator is None:
            accumulator = store.take(record.clock)
        try:
            yield from store.applying(accumulator, _terms(record), self._changes(key))
        except UpdateFailed as error:  # a new one: this one's frames hold the gradients
            return UpdateFailed(f"{error.message} (range {record.range_id})")
        return None

    def is_brief(self, record: Record) -> bool:
        store = self.stores[record.table_id, record.range_id]
        return store.is_brief(record.clock, len(record.blocks))

    def apply_brief(self, record: Record) -> None:
        """As `applying`, for an update that `is_brief`."""
        key = record.table_id, record.range_id
        store = self.stores[key]
        store.apply_brief(store.take(record.clock), _terms(record), self._changes(key))

    def assigning(self, effect: AssignValues) -> Work[None]:
        """Put initial values, or an edit's, in place."""
        key = effect.record.table_id, effect.record.range_id
        changes = self._changes(key)
        for some in pieces_of(effect.parts):
            blocks = [block for block, _ in some]
            changes.begin(blocks)
            record = effect.record
            self.stores[key].assign(_contributions(some), record.array, record.edit)
            changes.end(blocks)
            yield

    def _changes(self, key: _Key) -> ChangeHooks:
        shared = self.segments.find(key)
        if shared is None:
            return ChangeHooks(partial(self._before_change, key), nobody)

        def begin(blocks: Sequence[int]) -> None:
            self._before_change(key, blocks)
            shared.begin_change(blocks)

        return ChangeHooks(begin, shared.end_change)

    def _before_change(self, key: _Key, blocks: Sequence[int]) -> None:
        if key in self.watched:
            self.on_change(key, blocks)
        if self.snapshots is not None:
            self.snapshots.before_change(key, blocks)

    def drop(self, record: Record) -> None:
        self.stores[record.table_id, record.range_id].drop(record.clock)

    def make(self, change: Mutation) -> UpdateFailed | None:
        """`making`, at once."""
        return at_once(self.making(change))

    def making(self, change: Mutation) -> Work[UpdateFailed | None]:
        """Do a primary's mutation at a backup, as the primary does it. Returns as `applying`;
        InvalidKeys or InvalidTensor: the primary's blocks or lengths are not those here.
        """
        record = change.record
        store = self._store(record.table_id, record.range_id)
        match change:
            case Put():
                if change.accumulator is None:
                    return (yield from self.applying(record))
                accumulator = yield from _receiving(store, record, change.accumulator)
                store.drop(record.clock)  # a primary that took over sends sums that were kept here
                return (yield from self.applying(record, accumulator))
            case KeptSum():
                sent = change.accumulator._replace(is_reduced=True)
                store.put_accumulator(record.clock, (yield from _receiving(store, record, sent)))
            case Dropped():
                store.drop(record.clock)
            case Assigned():
                if record.array:
                    check_array(store.table, record.array)
                values = yield from _receiving(store, record, SentAccumulator(change.parts))
                yield from self.assigning(AssignValues(record, tuple(values.parts.items())))
        return None

    # --- for servers that join

    def copying(self, snapshot: Snapshot) -> Work[RangeCopy]:
        """Copy the values of a range beside `snapshot`; the copy shares nothing with them."""
        range_id = snapshot.range_id
        held, stores = [], {}
        for change in snapshot.held:
            held.append(fixed_for_backup(change))
            yield
        for table_id in snapshot.copies:
            stores[table_id] = yield from self.stores[table_id, range_id].copying()
        return RangeCopy(snapshot._replace(held=tuple(held)), stores)

    def restore(self, copy: RangeCopy) -> None:
        """`restoring`, at once."""
        at_once(self.restoring(copy))

    def restoring(self, copy: RangeCopy) -> Work[None]:
        """Restore the stores of a range, which exist, from the copy; errors as of `making`."""
        range_id = copy.snapshot.range_id
        for table_id, each in copy.stores.items():
            yield from self._store(table_id, range_id).checking(each)
        for table_id, each in copy.stores.items():
            key = table_id, range_id
            yield from self.stores[key].restoring(each, self._changes(key))
        for change in copy.snapshot.held:
            yield from self.making(change)

    def forget(self, effect: Forget) -> None:
        self.stores[effect.table_id, effect.range_id].forget(effect.reader)

    def forget_undecided(self, range_ids: Collection[RangeId]) -> None:
        """Drop what only a range's primary has: sums of which nothing was decided, and values that
        are kept for readers.
        """
        for (_, range_id), store in self.stores.items():
            if range_id in range_ids:
                store.abandon(keeps_reduced=True)

    def abandon(self, table_id: TableId) -> None:
        """Drop what a failed table has in accumulators."""
        for (owner, _), store in self.stores.items():
            if owner == table_id:
                store.abandon()


def _contributions(parts: Sequence[tuple[int, object]]) -> list[tuple[int, Any]]:
    found = []
    for block, payload in parts:
        if not isinstance(payload, Contribution | RowGradients):
            raise InvariantViolation("SH-1", f"block {block} was accumulated without its payload")
        found.append((block, payload))
    return found


def _terms(record: Record) -> Terms:
    return Terms(
        record.clock, record.hyperparameters, record.contributor_count, record.update_scale
    )


def for_backup(change: Mutation) -> Mutation:
    """The mutation for backups, with views of its accumulator or values."""
    match change:
        case Put(record, Accumulator() as accumulator):
            return Put(record, accumulator.sent())
        case KeptSum(record, Accumulator() as accumulator):
            return KeptSum(record, accumulator.sent())
        case Assigned(record, parts):
            values = _contributions(parts)
            return Assigned(record, tuple(contributions.elements(part) for _, part in values))
    return change


def fixed_for_backup(change: Mutation) -> Mutation:
    """As `for_backup`, in memory of its own."""
    change = for_backup(change)
    if isinstance(change, Put | KeptSum) and change.accumulator is not None:
        return change._replace(accumulator=change.accumulator.fixed())
    if isinstance(change, Assigned):
        return change._replace(parts=fixed_elements(change.parts))
    return change


def _receiving(store: Store, record: Record, sent: SentAccumulator) -> Work[Accumulator]:
    accumulator = yield from store.receiving(sent)
    beyond = set(accumulator.blocks) - set(record.blocks)  # means are of some of these
    if beyond:
        raise InvalidKeys(
            f"a change of range {record.range_id} has blocks {sorted(beyond)}; expected some of "
            f"{list(record.blocks)}, its record's"
        )
    return accumulator
