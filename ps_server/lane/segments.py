"""Where the values of a server's ranges lie: memory that it lends to sessions on this host.

    view with new ranges --reserve, a thread--> spare --add--> in use --remove--> gone with the rest

Reserving memory takes the system a second a GB, or several: a loop that did it would answer nobody
meanwhile, no heartbeat either. So it is reserved before the view is observed that needs it. What is
added without that is reserved then and there.

Rules:
    - Ranges of a table that come together lie in one segment.
    - Memory is zeros when a range gets it: what one range had is never another's.
    - Beside the values there is one stamp for each block (see `ps_core.stamps`): a reader copies
      the values and then looks whether the stamp is still the one that its answer named.
    - That order is the processor's on x86-64 only: there stores become visible in the order in
      which they were made, and loads are made in theirs. Elsewhere values are not lent.

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

from ps_core import stamps
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

CAN_LEND = platform.machine() in ("x86_64", "AMD64")
"""Whether this processor orders loads and stores as the stamps need it."""


@dataclass(frozen=True, slots=True)
class LentPlace:
    """Where a block lies in the segment, in bytes."""

    offset_bytes: int
    byte_count: int
    stamp_number: int

    @property
    def stamp_offset_bytes(self) -> int:
        """Where its stamp lies."""
        return self.stamp_number * stamps.STAMP_BYTES


class LentValues:
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
        at = _aligned(len(lengths) * stamps.STAMP_BYTES)
        self._places: dict[int, LentPlace] = {}
        self._ends: dict[int, int] = {}
        self._numbers = {block: number for number, block in enumerate(lengths)}  # of its stamp
        for number, (block, length) in enumerate(lengths.items()):
            self._places[block] = LentPlace(at, length * dtype.itemsize, number)
            self._ends[block] = at + padded_length(length) * dtype.itemsize
            at = _aligned(self._ends[block])
        self.segment = SharedSegment(f"pushpull-table-{table_id}", at)
        head = self.segment.array[: len(lengths) * stamps.STAMP_BYTES]
        self._stamps: stamps.Stamps = head.view(np.uint64)

    def values(self, block: int) -> Tensor:
        """The memory of a block's values, zeros at first; flat, of its padded length."""
        array = self.segment.array[self._places[block].offset_bytes : self._ends[block]]
        return torch.from_numpy(array).view(self._dtype)

    def place(self, block: int) -> tuple[LentPlace, int]:
        """Where a block lies, and its stamp now.

        Blocks are read between changes only, so the stamp is even.
        """
        place = self._places[block]
        return place, stamps.now(self._stamps, place.stamp_number)

    def shared_value(self, effect: AnswerPull, block: int) -> parameters_pb2.SharedValue:
        """A block's part of the answer: where it lies, and its stamp now."""
        place, stamp = self.place(block)
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
            stamp_offset_bytes=place.stamp_offset_bytes,
            stamp=stamp,
        )

    def begin_change(self, blocks: Iterable[int]) -> None:
        """The values of `blocks` are about to change."""
        stamps.begin(self._stamps, map(self._numbers.__getitem__, blocks))

    def end_change(self, blocks: Iterable[int]) -> None:
        """They are at rest again."""
        stamps.end(self._stamps, map(self._numbers.__getitem__, blocks))


def lent_values(table: Table, segment_id: int, blocks: Sequence[int]) -> LentValues | None:
    """A home for blocks of a table where they can be lent; None if they cannot.

    Sums (AGGREGATE) are not lent: each is new memory.
    """
    if not CAN_LEND or table.spec.optimizer.kind is OptimizerKind.AGGREGATE:
        return None
    lengths = {block: table.block_length(block) for block in sorted(blocks)}
    try:
        return LentValues(table.table_id, segment_id, lengths, arithmetic_dtype(table))
    except OSError as error:
        logs.warning("values_not_lent", table=table.spec.name, error=str(error))
        return None


def _aligned(byte_count: int) -> int:
    return -(-byte_count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(slots=True, eq=False)
class _Home:
    """The memory of ranges of one table that came at once.

    Attributes:
        lent: the memory; None: there is none to lend, and each range has its own.
        spare: the ranges that it was reserved for, and that have not come.
        range_ids: those that are in it.
    """

    lent: LentValues | None
    spare: set[RangeId]
    range_ids: set[RangeId]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is or will be in it."""
        return not (self.spare or self.range_ids)


def held_ranges(view: ClusterView, node_id: NodeId) -> set[RangeId]:
    """The ranges of which a server has something by a view, or is about to."""
    return {
        each.range_id
        for each in view.ranges
        if node_id in (each.primary, *each.backups, *each.catching_up)
    }


class ValueHomes:
    """All memory of one server that is lent.

    Args:
        lanes: the sessions on this host.
    """

    def __init__(self, lanes: SharedLanes) -> None:
        self._lanes = lanes
        self._lent: dict[_Key, LentValues] = {}
        self._homes: dict[TableId, list[_Home]] = {}
        self._codecs: dict[TableId, Codec] = {}
        self._segment_ids = itertools.count(1)

    def _of(self, table_id: TableId, range_id: RangeId) -> _Home | None:
        """The home in which the range is, or which was reserved for it."""
        for home in self._homes.get(table_id, ()):
            if range_id in home.range_ids or range_id in home.spare:
                return home
        return None

    # --- memory that is about to be needed

    async def reserve(self, view: ClusterView, node_id: NodeId, turns: Turns) -> None:
        """Have memory for what this server holds by a view that it is about to observe."""
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
                home = _Home(found, blocks.keys() - here, set())
                self._close_if_empty(home)
                if home.spare:
                    self._homes.setdefault(table.table_id, []).append(home)

    async def _reserved(self, table: Table, blocks: Sequence[int]) -> LentValues | None:
        number = next(self._segment_ids)
        loop = asyncio.get_running_loop()
        reserving = loop.run_in_executor(None, lent_values, table, number, blocks)
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError:  # the server ends, or begins anew
            reserving.add_done_callback(_close)
            raise

    def spare(self, key: _Key) -> LentValues | None:
        """The memory that was reserved for a range."""
        home = self._of(*key)
        return None if home is None or key[1] not in home.spare else home.lent

    def _forget_spare(self, held: Collection[RangeId]) -> None:
        for table_id, homes in list(self._homes.items()):
            if any(home.spare for home in homes):
                for home in homes:
                    home.spare.intersection_update(held)
                    self._close_if_empty(home)
                self._keep(table_id, homes)

    def _close_if_empty(self, home: _Home) -> None:
        """Drop its memory when nothing is or will be in it; sessions that have it mapped let go."""
        if home.is_empty and home.lent is not None:
            home.lent.segment.close()
            self._lanes.withdraw(home.lent.segment_id)

    def _keep(self, table_id: TableId, homes: Sequence[_Home]) -> None:
        """Keep those in which something is, or will be."""
        kept = [home for home in homes if home.range_ids or home.spare]
        if kept:
            self._homes[table_id] = kept
        else:
            self._homes.pop(table_id, None)

    # --- ranges that come and go

    def add(self, parts: Sequence[ShardAdded]) -> dict[RangeId, LentValues | None]:
        """The memory of parts of one table that come together; None: nothing is lent."""
        table = parts[0].table
        self._codecs[table.table_id] = NATIVE_CODEC[table.spec.dtype]
        homes: dict[RangeId, _Home] = {}
        missing = []
        for part in parts:
            home = self._of(table.table_id, part.range_id)
            if home is None:
                missing.append(part)
            else:
                homes[part.range_id] = home
        if missing:
            new = _Home(self._lent_now(missing), set(), set())
            self._homes.setdefault(table.table_id, []).append(new)
            homes |= {part.range_id: new for part in missing}
        for range_id, home in homes.items():
            home.spare.discard(range_id)
            home.range_ids.add(range_id)
            if home.lent is not None:
                self._lent[table.table_id, range_id] = home.lent
        return {range_id: home.lent for range_id, home in homes.items()}

    def _lent_now(self, parts: Sequence[ShardAdded]) -> LentValues | None:
        if not self._lanes.is_open:
            return None
        blocks = [block for part in parts for block in part.blocks]
        return lent_values(parts[0].table, next(self._segment_ids), blocks)

    def remove(self, range_id: RangeId) -> None:
        """`removing`, at once."""
        at_once(self.removing((range_id,)))

    def removing(self, range_ids: Collection[RangeId]) -> Work[None]:
        """Nothing of these ranges is here any more, of any table. What sessions on this host have
        mapped stays readable for them until they have let it go.
        """
        for key in [key for key in self._lent if key[1] in range_ids]:
            del self._lent[key]
        for table_id, homes in list(self._homes.items()):
            for home in homes:
                home.range_ids.difference_update(range_ids)
                self._close_if_empty(home)
            self._keep(table_id, homes)
            yield

    def remove_tables(self, table_ids: Collection[TableId]) -> None:
        """Nothing of these tables is or will be here, in any range; as `removing`."""
        for key in [key for key in self._lent if key[0] in table_ids]:
            del self._lent[key]
        for table_id in table_ids:
            for home in self._homes.pop(table_id, ()):
                home.range_ids.clear()
                home.spare.clear()
                self._close_if_empty(home)
            self._codecs.pop(table_id, None)

    def close(self) -> None:
        """Nothing is lent from now on; what sessions have mapped stays readable for them."""
        for home in itertools.chain(*self._homes.values()):
            if home.lent is not None:
                home.lent.segment.close()

    # --- what is lent

    def find(self, key: _Key) -> LentValues | None:
        """Where the range's values lie, if that may be lent."""
        return self._lent.get(key)

    def lends(self, session: Session, table_id: TableId, codec: Codec | None) -> bool:
        """Whether the session takes all of the table's values, as `codec`, from where they lie."""
        homes = [home for home in self._homes.get(table_id, ()) if home.range_ids]
        if not homes:
            return False
        codec = codec or self._codecs[table_id]
        return all(
            home.lent is not None and codec is home.lent.codec and self._is_lent(session, home.lent)
            for home in homes
        )

    def lent_to(self, session: Session, key: _Key, codec: Codec) -> LentValues | None:
        """The range's values as `codec`, if the session takes them from where they lie."""
        lent = self._lent.get(key)
        if lent is None or codec is not lent.codec or not self._is_lent(session, lent):
            return None
        return lent

    def _is_lent(self, session: Session, lent: LentValues) -> bool:
        return self._lanes.lend(session.incarnation, lent.segment_id, lent.segment)


def _close(reserving: asyncio.Future[LentValues | None]) -> None:
    if not reserving.cancelled() and reserving.exception() is None:
        found = reserving.result()
        if found is not None:
            found.segment.close()
