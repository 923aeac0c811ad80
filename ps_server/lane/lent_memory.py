"""A table's values in memory that sessions on this host may read where they lie.

Beside the values there is one stamp for each block (see `ps_core.stamps`): a reader copies the
values and then looks whether the stamp is still the one that its answer named.

That order is the processor's on x86-64 only: there stores become visible in the order in which they
were made, and loads are made in theirs. Elsewhere values are not lent.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ps_core import stamps
from ps_core.keys import TableId
from ps_core.tables import Codec, OptimizerKind, Table
from ps_runtime.cluster import wire
from ps_runtime.observe import logs
from ps_runtime.system.shared_memory import Segment
from ps_server.ranges.events import AnswerPull
from ps_server.values.block_values import arithmetic_dtype
from ps_server.values.optimizers import padded_length
from pushpull.v1 import parameters_pb2

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
        self.segment = Segment(f"pushpull-table-{table_id}", at)
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
