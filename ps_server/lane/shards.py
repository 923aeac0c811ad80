"""A server's values: the stores of its shards, and the segments that sessions on this host read.

    view with new ranges --reserve, a thread--> spare --add--> in use --remove--> freed with the
    rest of its segment

Reserving memory takes the system a second a GB, or several, in which the loop would answer nobody,
and send no heartbeat. So memory is reserved before the view that needs it is observed; a range that
is added without that reserves its memory at once.

Rules:
    - Ranges of a table that are added together lie in one segment.
    - Memory is zeros when a range gets it: it never holds another range's values.
    - Each block has a sequence lock beside the values (see `ps_core.sequence_locks`): a reader
      copies the values, then checks that the lock still has the value that its answer named.
    - x86-64 alone ensures that order: stores become visible in the order in which they are made,
      and loads are made in theirs. Elsewhere values are not shared.

Invariants:
    SH-1  Each accumulated or assigned block has its payload.
    SH-2  A block that is shared changes only while its sequence lock is odd.
    SH-3  A range has one store of a table, from when it is added until it is removed.

Everything belongs to one event loop, but for the thread.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from ps_core import limits, sequence_locks
from ps_core.cluster_view import ClusterView, Session
from ps_core.errors import InvalidKeys, InvariantViolation, Recovering, UpdateFailed
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.tables.elements import NATIVE_CODEC, Codec
from ps_core.tables.optimizers import OptimizerKind
from ps_core.tables.table import Table
from ps_core.work import Work, at_once, pieces_of
from ps_runtime.cluster import wire
from ps_runtime.observe import logs
from ps_runtime.system.shared_memory import SharedSegment
from ps_runtime.system.turns import Turns
from ps_server.lane.answer_ring import CAN_SHARE, SharedPlace
from ps_server.lane.lane_socket import SharedLanes
from ps_server.ranges.events import (
    Accumulate,
    AnswerPull,
    AssignValues,
    Forget,
    Place,
    Record,
    Sender,
)
from ps_server.ranges.server_machine import ShardAdded
from ps_server.replication.messages import RangeCopy, Snapshot
from ps_server.rows import row_kernels
from ps_server.rows.row_memory import RowMemory
from ps_server.values import contributions
from ps_server.values.block_values import ReadyBlock, arithmetic_dtype, ready_block
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
from ps_server.values.optimizers import padded_length
from ps_server.values.row_gradients import RowGradients
from ps_server.values.row_store import RowStore, Store
from ps_server.values.shard_store import ChangeHooks, ShardStore, nobody
from ps_server.values.update_arithmetic import Accumulator
from pushpull.v1 import parameters_pb2

_Key = tuple[TableId, RangeId]

_AGAIN_MS = 100
_HELD_COUNT = 32
"""Held answers of a range beyond which dead ones are looked for."""

_FREEZE_COUNT = 1024
"""Blocks made between two freezes of the garbage collector, which would otherwise look at them
again and again: a tenth of a second for those of a large table.
"""

ALIGNMENT_BYTES = 64


class SharedValues:
    """The values of some blocks of one table, in one shared segment.

    Args:
        lengths: block -> its elements.

    Raises:
        OSError: there is no memory for them, or this system cannot share any.
    """

    def __init__(
        self,
        table_id: TableId,
        segment_id: int,
        lengths: Mapping[int, int],
        dtype: torch.dtype,
    ) -> None:
        self.segment_id = segment_id
        self._dtype = dtype
        self.codec = Codec.FP64 if dtype is torch.float64 else Codec.FP32
        at = _aligned(len(lengths) * sequence_locks.LOCK_BYTES)
        self._places: dict[int, SharedPlace] = {}
        self._numbers = {block: number for number, block in enumerate(lengths)}  # of its lock
        for number, (block, length) in enumerate(lengths.items()):
            self._places[block] = SharedPlace(at, length * dtype.itemsize, number)
            at = _aligned(at + padded_length(length) * dtype.itemsize)
        self.segment = SharedSegment(f"pushpull-table-{table_id}", at)
        head = self.segment.array[: len(lengths) * sequence_locks.LOCK_BYTES]
        self._locks: sequence_locks.SequenceLocks = head.view(np.uint64)

    def values(self, block: int) -> Tensor:
        """The memory of a block's values, zeros at first; flat, of its padded length."""
        at, byte_count, _ = self._places[block]
        length = padded_length(byte_count // self._dtype.itemsize)
        array = self.segment.array[at : at + length * self._dtype.itemsize]
        return torch.from_numpy(array).view(self._dtype)

    def place(self, block: int) -> tuple[SharedPlace, int]:
        """A block's place, and its lock's value: even, since blocks are read between changes."""
        place = self._places[block]
        return place, sequence_locks.now(self._locks, place.lock_number)

    def shared_value(self, effect: AnswerPull, block: int) -> parameters_pb2.SharedValue:
        place, lock = self.place(block)
        version = effect.versions[block]
        return parameters_pb2.SharedValue(
            block=block,
            version=version,
            peer_version=version - effect.own_updates.get(block, 0),
            clock=effect.range_clock,
            codec=wire.codec_to_proto(self.codec),
            segment_id=self.segment_id,
            offset_bytes=place.offset_bytes,
            byte_count=place.byte_count,
            stamp_offset_bytes=sequence_locks.offset_bytes(place.lock_number),
            stamp=lock,
        )

    def begin_change(self, blocks: Iterable[int]) -> None:
        sequence_locks.begin(self._locks, map(self._numbers.__getitem__, blocks))

    def end_change(self, blocks: Iterable[int]) -> None:
        sequence_locks.end(self._locks, map(self._numbers.__getitem__, blocks))


def shared_values(table: Table, segment_id: int, blocks: Sequence[int]) -> SharedValues | None:
    """A segment for the blocks, or None if they cannot be shared: the sums of an AGGREGATE table
    are new memory each time, and rows have no fixed place.
    """
    is_sum = table.spec.optimizer.kind is OptimizerKind.AGGREGATE
    if not CAN_SHARE or is_sum or table.spec.rows is not None:
        return None
    lengths = {block: table.block_length(block) for block in sorted(blocks)}
    try:
        return SharedValues(table.table_id, segment_id, lengths, arithmetic_dtype(table))
    except OSError as error:
        logs.warning("values_not_shared", table=table.spec.name, error=str(error))
        return None


def _aligned(byte_count: int) -> int:
    return -(-byte_count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(slots=True, eq=False)
class _TableSegment:
    """The segment of ranges of one table that were added together."""

    values: SharedValues | None  # None: there is none to share, and each range has its own
    spare: set[RangeId]  # reserved for these, which have not come
    range_ids: set[RangeId]


def held_ranges(view: ClusterView, node_id: NodeId) -> set[RangeId]:
    """Ranges that a server has or gets by a view."""
    return {
        each.range_id
        for each in view.ranges
        if node_id in (each.primary, *each.backups, *each.catching_up)
    }


class ValueSegments:
    """All segments of one server."""

    def __init__(self, lanes: SharedLanes) -> None:
        self._lanes = lanes
        self._shared: dict[_Key, SharedValues] = {}
        self._segments: dict[TableId, list[_TableSegment]] = {}
        self._codecs: dict[TableId, Codec] = {}

    def _of(self, table_id: TableId, range_id: RangeId) -> _TableSegment | None:
        """The segment in which the range is, or which was reserved for it."""
        for segment in self._segments.get(table_id, ()):
            if range_id in segment.range_ids or range_id in segment.spare:
                return segment
        return None

    # --- memory reserved in advance

    async def reserve(self, view: ClusterView, node_id: NodeId, turns: Turns) -> None:
        """Reserve memory for the ranges of a view that is about to be observed."""
        held = held_ranges(view, node_id)
        for table_id, segments in list(self._segments.items()):
            for segment in segments:
                segment.spare.intersection_update(held)
            self._free_empty(table_id)
        if not self._lanes.is_open:
            return
        for table in view.tables:
            await turns.breathe()
            blocks = {
                range_id: blocks
                for range_id, blocks in table.blocks_by_range(len(view.ranges)).items()
                if range_id in held and self._of(table.table_id, range_id) is None
            }
            if blocks:
                found = await self._reserved(table, list(itertools.chain(*blocks.values())))
                here = {r for r in blocks if self._of(table.table_id, r) is not None}
                segment = _TableSegment(found, blocks.keys() - here, set())
                self._segments.setdefault(table.table_id, []).append(segment)
                self._free_empty(table.table_id)

    async def _reserved(self, table: Table, blocks: Sequence[int]) -> SharedValues | None:
        number = self._lanes.next_segment_id()
        loop = asyncio.get_running_loop()
        reserving = loop.run_in_executor(None, shared_values, table, number, blocks)
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError:  # the server ends, or begins anew
            reserving.add_done_callback(_close)
            raise

    def spare(self, key: _Key) -> SharedValues | None:
        segment = self._of(*key)
        return None if segment is None or key[1] not in segment.spare else segment.values

    def _free_empty(self, table_id: TableId) -> None:
        """Free a table's segments without ranges; sessions that have them mapped are told."""
        for segment in self._segments.pop(table_id, ()):
            if segment.spare or segment.range_ids:
                self._segments.setdefault(table_id, []).append(segment)
            elif segment.values is not None:
                segment.values.segment.close()
                self._lanes.withdraw(segment.values.segment_id)

    # --- ranges added and removed

    def add(self, parts: Sequence[ShardAdded]) -> dict[RangeId, SharedValues | None]:
        """The segments of shards of one table that are added together; None: nothing is shared."""
        table = parts[0].table
        self._codecs[table.table_id] = NATIVE_CODEC[table.spec.dtype]
        segments: dict[RangeId, _TableSegment] = {}
        missing = []
        for part in parts:
            segment = self._of(table.table_id, part.range_id)
            if segment is None:
                missing.append(part)
            else:
                segments[part.range_id] = segment
        if missing:
            made = None
            if self._lanes.is_open:
                blocks = [block for part in missing for block in part.blocks]
                made = shared_values(table, self._lanes.next_segment_id(), blocks)
            new = _TableSegment(made, set(), set())
            self._segments.setdefault(table.table_id, []).append(new)
            segments |= {part.range_id: new for part in missing}
        for range_id, segment in segments.items():
            segment.spare.discard(range_id)
            segment.range_ids.add(range_id)
            if segment.values is not None:
                self._shared[table.table_id, range_id] = segment.values
        return {range_id: segment.values for range_id, segment in segments.items()}

    def removing(self, range_ids: Collection[RangeId]) -> Work[None]:
        """Remove ranges, of all tables. Sessions keep what they have mapped until they unmap it."""
        for key in [key for key in self._shared if key[1] in range_ids]:
            del self._shared[key]
        for table_id, segments in list(self._segments.items()):
            for segment in segments:
                segment.range_ids.difference_update(range_ids)
            self._free_empty(table_id)
            yield

    def remove_tables(self, table_ids: Collection[TableId]) -> None:
        for key in [key for key in self._shared if key[0] in table_ids]:
            del self._shared[key]
        for table_id in table_ids:
            for segment in self._segments.get(table_id, ()):
                segment.range_ids.clear()
                segment.spare.clear()
            self._free_empty(table_id)
            self._codecs.pop(table_id, None)

    def close(self) -> None:
        """Free all segments; sessions keep what they have mapped."""
        for segment in itertools.chain(*self._segments.values()):
            if segment.values is not None:
                segment.values.segment.close()

    # --- shared values

    def find(self, key: _Key) -> SharedValues | None:
        return self._shared.get(key)

    def shares(self, session: Session, table_id: TableId, codec: Codec | None) -> bool:
        """True if the session reads all of the table's values, as `codec`, from shared memory."""
        segments = [segment for segment in self._segments.get(table_id, ()) if segment.range_ids]
        if not segments:
            return False
        codec = codec or self._codecs[table_id]
        return all(
            segment.values is not None
            and codec is segment.values.codec
            and self._is_open_to(session, segment.values)
            for segment in segments
        )

    def shared_with(self, session: Session, key: _Key, codec: Codec) -> SharedValues | None:
        """The range's shared values, if the session reads them as `codec`."""
        shared = self._shared.get(key)
        if shared is None or codec is not shared.codec or not self._is_open_to(session, shared):
            return None
        return shared

    def _is_open_to(self, session: Session, shared: SharedValues) -> bool:
        return self._lanes.share(session.incarnation, shared.segment_id, shared.segment)


def _close(reserving: asyncio.Future[SharedValues | None]) -> None:
    if not reserving.cancelled() and reserving.exception() is None:
        found = reserving.result()
        if found is not None:
            found.segment.close()


class HeldAnswer(Protocol):
    """An answer that is made piece by piece."""

    def keep(self, blocks: Collection[int]) -> None:
        """Copy these blocks, which are about to change."""


class Shards:
    """All stores of one server.

    Attributes:
        received_bytes: payload bytes that came, in messages or in shared memory.
        sent_bytes: those of answers to pulls.
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
        self._ready: dict[_Key, tuple[SharedValues | None, Store]] = {}  # not here yet
        self._held: dict[_Key, list[ref[HeldAnswer]]] = {}
        self.snapshots: RangeSnapshots | None = None
        self.lanes = lanes
        self._updates = updates
        self.pool = BufferPool()
        self.segments = ValueSegments(lanes)

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters and optimizer state."""
        return sum(store.state_bytes for store in self.stores.values())

    @property
    def memory_bytes(self) -> int:
        """As `state_bytes`, without rows that are on disk alone."""
        return sum(
            each.memory_bytes if isinstance(each, RowStore) else each.state_bytes
            for each in self.stores.values()
        )

    @property
    def frame_bytes(self) -> int:
        """Of these, those of rows that could be on disk alone."""
        return sum(s.frame_bytes for s in self.stores.values() if isinstance(s, RowStore))

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
        if any(part.table.spec.rows is not None for part in lacking):
            await asyncio.to_thread(row_kernels.load)
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
            self._keep_held(key, self.stores[key].blocks)
            del self.stores[key]
            self._held.pop(key, None)
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
            yield from store.applying(
                record.clock,
                accumulator,
                record.hyperparameters,
                record.contributor_count,
                record.update_scale,
                self._changes(key),
            )
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
        accumulator = store.take(record.clock)
        terms = record.hyperparameters, record.contributor_count, record.update_scale
        store.apply_brief(record.clock, accumulator, *terms, self._changes(key))

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
        if key in self._held:
            self._keep_held(key, blocks)
        if self.snapshots is not None:
            self.snapshots.before_change(key, blocks)

    def hold(self, key: _Key, answer: HeldAnswer) -> None:
        """Hold an unfinished answer: it is told before the range changes."""
        held = self._held.setdefault(key, [])
        if len(held) >= _HELD_COUNT:  # most of them have been made since
            held[:] = [each for each in held if each() is not None]
        held.append(ref(answer))

    def _keep_held(self, key: _Key, blocks: Collection[int]) -> None:
        held = self._held.pop(key, ())
        for each in held:
            answer = each()
            if answer is not None:
                answer.keep(blocks)
                self._held.setdefault(key, []).append(each)

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
