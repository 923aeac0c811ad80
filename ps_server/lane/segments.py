"""Segments of a server's ranges: the memory of values that it shares with sessions on this host.

    view with new ranges --reserve, a thread--> spare --add--> in use --remove--> freed with the
    rest

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
import platform
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ps_core import sequence_locks
from ps_core.cluster_view import ClusterView, Session
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.tables import NATIVE_CODEC, Codec, OptimizerKind, Table
from ps_core.work import Work, at_once
from ps_runtime.cluster import wire
from ps_runtime.observe import logs
from ps_runtime.system.shared_memory import SharedSegment
from ps_runtime.system.turns import Turns
from ps_server.lane.lane_socket import SharedLanes
from ps_server.ranges.events import AnswerPull
from ps_server.ranges.server_machine import ShardAdded
from ps_server.values.block_values import arithmetic_dtype
from ps_server.values.optimizers import padded_length
from pushpull.v1 import parameters_pb2

_Key = tuple[TableId, RangeId]

ALIGNMENT_BYTES = 64

CAN_SHARE = platform.machine() in ("x86_64", "AMD64")
"""True if this processor orders loads and stores as the sequence locks need it."""


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """A block's place in the segment, in bytes."""

    offset_bytes: int
    byte_count: int
    lock_number: int

    @property
    def lock_offset_bytes(self) -> int:
        """The place of its sequence lock."""
        return self.lock_number * sequence_locks.LOCK_BYTES


class SharedValues:
    """The values of some blocks of one table, in one shared segment.

    Args:
        table_id: the table's, for people.
        segment_id: the server's number for the segment.
        lengths: block -> its elements.
        dtype: of the values.

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
        self._ends: dict[int, int] = {}
        self._numbers = {block: number for number, block in enumerate(lengths)}  # of its lock
        for number, (block, length) in enumerate(lengths.items()):
            self._places[block] = SharedPlace(at, length * dtype.itemsize, number)
            self._ends[block] = at + padded_length(length) * dtype.itemsize
            at = _aligned(self._ends[block])
        self.segment = SharedSegment(f"pushpull-table-{table_id}", at)
        head = self.segment.array[: len(lengths) * sequence_locks.LOCK_BYTES]
        self._locks: sequence_locks.SequenceLocks = head.view(np.uint64)

    def values(self, block: int) -> Tensor:
        """The memory of a block's values, zeros at first; flat, of its padded length."""
        array = self.segment.array[self._places[block].offset_bytes : self._ends[block]]
        return torch.from_numpy(array).view(self._dtype)

    def place(self, block: int) -> tuple[SharedPlace, int]:
        """A block's place, and the value of its sequence lock.

        Blocks are read between changes only, so the value is even.
        """
        place = self._places[block]
        return place, sequence_locks.now(self._locks, place.lock_number)

    def shared_value(self, effect: AnswerPull, block: int) -> parameters_pb2.SharedValue:
        """A block of an answer: its place, and the value of its sequence lock."""
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
            stamp_offset_bytes=place.lock_offset_bytes,
            stamp=lock,
        )

    def begin_change(self, blocks: Iterable[int]) -> None:
        """Begin a change of `blocks`."""
        sequence_locks.begin(self._locks, map(self._numbers.__getitem__, blocks))

    def end_change(self, blocks: Iterable[int]) -> None:
        """End a change of `blocks`."""
        sequence_locks.end(self._locks, map(self._numbers.__getitem__, blocks))


def shared_values(table: Table, segment_id: int, blocks: Sequence[int]) -> SharedValues | None:
    """A segment for blocks of a table; None if they cannot be shared.

    Sums (AGGREGATE) are not shared: each is new memory.
    """
    if not CAN_SHARE or table.spec.optimizer.kind is OptimizerKind.AGGREGATE:
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
    """The segment of ranges of one table that were added together.

    Attributes:
        values: the memory; None: there is none to share, and each range has its own.
        spare: the ranges that it was reserved for, and that have not come.
        range_ids: those that are in it.
    """

    values: SharedValues | None
    spare: set[RangeId]
    range_ids: set[RangeId]

    @property
    def is_empty(self) -> bool:
        """True if it has no range, and is reserved for none."""
        return not (self.spare or self.range_ids)


def held_ranges(view: ClusterView, node_id: NodeId) -> set[RangeId]:
    """Ranges that a server has or gets by a view."""
    return {
        each.range_id
        for each in view.ranges
        if node_id in (each.primary, *each.backups, *each.catching_up)
    }


class ValueSegments:
    """All segments of one server.

    Args:
        lanes: the sessions on this host.
    """

    def __init__(self, lanes: SharedLanes) -> None:
        self._lanes = lanes
        self._shared: dict[_Key, SharedValues] = {}
        self._segments: dict[TableId, list[_TableSegment]] = {}
        self._codecs: dict[TableId, Codec] = {}
        self._segment_ids = itertools.count(1)

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
        self._forget_spare(held)
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
                self._close_if_empty(segment)
                if segment.spare:
                    self._segments.setdefault(table.table_id, []).append(segment)

    async def _reserved(self, table: Table, blocks: Sequence[int]) -> SharedValues | None:
        number = next(self._segment_ids)
        loop = asyncio.get_running_loop()
        reserving = loop.run_in_executor(None, shared_values, table, number, blocks)
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError:  # the server ends, or begins anew
            reserving.add_done_callback(_close)
            raise

    def spare(self, key: _Key) -> SharedValues | None:
        """The memory that was reserved for a range."""
        segment = self._of(*key)
        return None if segment is None or key[1] not in segment.spare else segment.values

    def _forget_spare(self, held: Collection[RangeId]) -> None:
        for table_id, segments in list(self._segments.items()):
            if any(segment.spare for segment in segments):
                for segment in segments:
                    segment.spare.intersection_update(held)
                    self._close_if_empty(segment)
                self._keep(table_id, segments)

    def _close_if_empty(self, segment: _TableSegment) -> None:
        """Free a segment without ranges; sessions that have it mapped are told."""
        if segment.is_empty and segment.values is not None:
            segment.values.segment.close()
            self._lanes.withdraw(segment.values.segment_id)

    def _keep(self, table_id: TableId, segments: Sequence[_TableSegment]) -> None:
        """Keep the segments that have ranges, or are reserved."""
        kept = [segment for segment in segments if segment.range_ids or segment.spare]
        if kept:
            self._segments[table_id] = kept
        else:
            self._segments.pop(table_id, None)

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
            new = _TableSegment(self._made_now(missing), set(), set())
            self._segments.setdefault(table.table_id, []).append(new)
            segments |= {part.range_id: new for part in missing}
        for range_id, segment in segments.items():
            segment.spare.discard(range_id)
            segment.range_ids.add(range_id)
            if segment.values is not None:
                self._shared[table.table_id, range_id] = segment.values
        return {range_id: segment.values for range_id, segment in segments.items()}

    def _made_now(self, parts: Sequence[ShardAdded]) -> SharedValues | None:
        if not self._lanes.is_open:
            return None
        blocks = [block for part in parts for block in part.blocks]
        return shared_values(parts[0].table, next(self._segment_ids), blocks)

    def remove(self, range_id: RangeId) -> None:
        """`removing`, at once."""
        at_once(self.removing((range_id,)))

    def removing(self, range_ids: Collection[RangeId]) -> Work[None]:
        """Remove ranges, of all tables. Sessions keep what they have mapped until they unmap it."""
        for key in [key for key in self._shared if key[1] in range_ids]:
            del self._shared[key]
        for table_id, segments in list(self._segments.items()):
            for segment in segments:
                segment.range_ids.difference_update(range_ids)
                self._close_if_empty(segment)
            self._keep(table_id, segments)
            yield

    def remove_tables(self, table_ids: Collection[TableId]) -> None:
        """Remove tables, in all ranges; as `removing`."""
        for key in [key for key in self._shared if key[0] in table_ids]:
            del self._shared[key]
        for table_id in table_ids:
            for segment in self._segments.pop(table_id, ()):
                segment.range_ids.clear()
                segment.spare.clear()
                self._close_if_empty(segment)
            self._codecs.pop(table_id, None)

    def close(self) -> None:
        """Free all segments; sessions keep what they have mapped."""
        for segment in itertools.chain(*self._segments.values()):
            if segment.values is not None:
                segment.values.segment.close()

    # --- shared values

    def find(self, key: _Key) -> SharedValues | None:
        """The range's shared values, if it has any."""
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
