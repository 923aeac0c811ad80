"""Differences between the rows of a partition in two checkpoints, by id: a row has no fixed place,
and an eviction moves many that stay the same.

Values are compared bit by bit: a NaN is equal to itself, and 0.0 differs from -0.0. Both versions
of one partition are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_core.errors import InvalidCheckpoint
from ps_core.rows import Ids
from ps_core.tables.table import Table
from ps_runtime.checkpoint.part_file import ELEMENT_BYTES, IDS, VALUES
from ps_runtime.checkpoint.reader import CheckpointReader

_PIECE_BYTES = 1024 * 1024
"""Rows that are compared or copied at once, about."""


@dataclass(frozen=True, slots=True)
class PartitionRows:
    """The rows of a partition, in any order.

    Shapes:
        ids: [rows]
        bits: [rows, elements], the values as whole numbers of the same bits.
    """

    ids: Ids
    bits: npt.NDArray[Any]

    @classmethod
    def none(cls, table: Table) -> PartitionRows:
        """A partition without rows."""
        empty = np.empty((0, table.spec.element_count), _bits_type(table))
        return cls(np.empty(0, np.uint64), empty)

    @classmethod
    def read(cls, reader: CheckpointReader, table: Table, partition: int) -> PartitionRows:
        """Read and check a partition; InvalidCheckpoint if it is damaged."""
        name = table.spec.name
        ids, values = (reader.read(name, partition, tensor) for tensor in (IDS, VALUES))
        count, rest = divmod(len(ids), ELEMENT_BYTES["U64"])
        length = table.spec.element_count
        if rest or len(values) != count * length * table.spec.accumulator_element_bytes:
            raise InvalidCheckpoint(
                f"{reader.directory.url}: partition {partition} of table '{name}' has "
                f"{len(ids)} bytes of ids and {len(values)} of values; expected "
                f"{table.spec.size_words}, and ids of 8 bytes"
            )
        bits = np.frombuffer(values, _bits_type(table)).reshape(count, length)
        return cls(np.frombuffer(ids, "<u8"), bits)

    def pieces(self, count: int) -> Iterator[slice]:
        """`count` of the rows, in slices that take little memory."""
        step = max(1, _PIECE_BYTES // (self.bits.shape[1] * self.bits.itemsize))
        return (slice(begin, begin + step) for begin in range(0, count, step))


@dataclass(frozen=True, slots=True)
class RowDifference:
    """The difference of a partition's later rows from its earlier ones.

    Shapes:
        changed: [rows], the places in the later ones of rows that are new or have other values.
        gone: [rows], the ids that are in the earlier ones only.
    """

    changed: npt.NDArray[np.int64]
    new_count: int
    gone: Ids


def compared(before: PartitionRows, after: PartitionRows) -> RowDifference:
    """Compare two versions of a partition."""
    order = np.argsort(before.ids)
    known = before.ids[order]
    places = np.searchsorted(known, after.ids)
    is_changed = np.ones(len(after.ids), bool)
    if len(known):
        is_changed = known[np.minimum(places, len(known) - 1)] != after.ids
    new_count = int(np.count_nonzero(is_changed))
    kept = np.flatnonzero(~is_changed)
    was = order[places[kept]]  # the places of the same ids in the earlier rows
    for some in after.pieces(len(kept)):
        differs = after.bits[kept[some]] != before.bits[was[some]]
        is_changed[kept[some]] = differs.any(axis=1)
    is_gone = np.ones(len(before.ids), bool)
    is_gone[was] = False
    return RowDifference(np.flatnonzero(is_changed), new_count, before.ids[is_gone])


def has_same_rows(
    one: CheckpointReader, other: CheckpointReader, table: str, partition: int
) -> bool:
    """True if a partition's ids and rows have the same checksums; nothing is read."""
    return all(
        one.fingerprint(table, partition, tensor) == other.fingerprint(table, partition, tensor)
        for tensor in (IDS, VALUES)
    )


def row_count(reader: CheckpointReader, table: Table) -> int:
    """The rows of a table; nothing is read. InvalidCheckpoint if a partition has no ids."""
    count, name = 0, table.spec.name
    for partition in range(table.block_count):
        stored = reader.tensor(name, partition, IDS)
        if stored is None:
            raise InvalidCheckpoint(
                f"{reader.directory.url}: partition {partition} of table '{name}' has no {IDS}"
            )
        count += stored.byte_count // ELEMENT_BYTES[stored.dtype]
    return count


@dataclass(slots=True)
class RowCounts:
    """Rows of a table in two checkpoints: those before and after, and of these the differing ones:
    with other values, new, and gone.
    """

    before: int
    after: int
    other: int = 0
    new: int = 0
    gone: int = 0

    def add(self, difference: RowDifference) -> None:
        """Count those of a partition."""
        self.new += difference.new_count
        self.other += len(difference.changed) - difference.new_count
        self.gone += len(difference.gone)


def _bits_type(table: Table) -> str:
    return f"<u{table.spec.accumulator_element_bytes}"
