"""Segments of shared memory with the values of this server's tables, for sessions on this host.

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

Everything belongs to one event loop, but for the thread.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ps_core import sequence_locks
from ps_core.cluster_view import ClusterView, Session
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.sliced_work import Work
from ps_core.tables.elements import NATIVE_CODEC, Codec
from ps_core.tables.optimizers import OptimizerKind
from ps_core.tables.table import Table
from ps_runtime.cluster import wire
from ps_runtime.observe import logs
from ps_runtime.system.shared_memory import SharedSegment
from ps_runtime.system.turns import Turns
from ps_server.lane.answer_ring import CAN_SHARE, SharedPlace
from ps_server.lane.lane_socket import SharedLanes
from ps_server.ranges.events import (
    AnswerPull,
)
from ps_server.ranges.server_machine import ShardAdded
from ps_server.values.block_values import arithmetic_dtype
from ps_server.values.optimizers import padded_length
from pushpull.v1 import parameters_pb2

_Key = tuple[TableId, RangeId]

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
        self._templates = {block: self._template(block) for block in lengths}

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
        version = effect.versions[block]
        lock = sequence_locks.now(self._locks, self._numbers[block])
        value = parameters_pb2.SharedValue(stamp=lock)
        value.MergeFrom(self._templates[block])
        value.version = version
        value.peer_version = version - effect.own_updates.get(block, 0)
        value.clock = effect.range_clock
        value.edit_count = effect.edit_count or 0
        return value

    def _template(self, block: int) -> parameters_pb2.SharedValue:
        """The fields that are the same in all answers: a copy takes half the time."""
        place = self._places[block]
        return parameters_pb2.SharedValue(
            block=block,
            codec=wire.codec_to_proto(self.codec),
            segment_id=self.segment_id,
            offset_bytes=place.offset_bytes,
            byte_count=place.byte_count,
            stamp_offset_bytes=sequence_locks.offset_bytes(place.lock_number),
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
        is_any = False
        for segment in self._segments.get(table_id, ()):
            if segment.range_ids:
                is_any, shared = True, segment.values
                if shared is None or (codec or self._codecs[table_id]) is not shared.codec:
                    return False
                if not self._is_open_to(session, shared):
                    return False
        return is_any

    def shared_with(self, session: Session, key: _Key, codec: Codec) -> SharedValues | None:
        """The range's shared values, if the session reads them as `codec`."""
        shared = self._shared.get(key)
        if shared is None or codec is not shared.codec or not self._is_open_to(session, shared):
            return None
        return shared

    def _is_open_to(self, session: Session, shared: SharedValues) -> bool:
        has = self._lanes.shared_ids.get(session.incarnation, ())
        return shared.segment_id in has or self._lanes.share(
            session.incarnation, shared.segment_id, shared.segment
        )


def _close(reserving: asyncio.Future[SharedValues | None]) -> None:
    if not reserving.cancelled() and reserving.exception() is None:
        found = reserving.result()
        if found is not None:
            found.segment.close()
