"""Tables as the cluster knows them: blocks, and the layout of tensors.

Rules:
    - A dense table is a flat vector; its tensors follow each other without gap, C-contiguous.
    - Block b holds elements [b * block_elements, min((b + 1) * block_elements, element_count)).
    - A segment is the overlap of one tensor with one block; presence bits of a block number its
      segments, in layout order.

Invariants:
    TAB-1  The segments of all blocks cover every element exactly once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType

from ps_core.change import Join, TableChange, TableCut
from ps_core.consistency import Consistency, Mode
from ps_core.errors import InvalidKeys
from ps_core.keys import RangeId, TableId, range_of_slot, slot_of_ordinal
from ps_core.tables.optimizers import StepHyperparameters
from ps_core.tables.table_spec import TableSpec


@dataclass(frozen=True, slots=True)
class TensorSegment:
    """The overlap of one tensor with one block; `begin` and `end` count from the block's start."""

    tensor: int
    begin: int
    end: int


@dataclass(frozen=True)
class Table:
    """A table as the cluster knows it.

    Attributes:
        table_id: never given twice.
        first_ordinal: global ordinal of its first block.
        change: the newest committed change of its consistency.
        proposed: the change that the servers are asked to prepare.
        joins: the newest join of each rank.
        cut: the newest cut.
        restored_clock: the clock at which it was restored, if it was.
    """

    table_id: TableId
    first_ordinal: int
    spec: TableSpec
    change: TableChange | None = None
    proposed: TableChange | None = None
    joins: tuple[Join, ...] = ()
    cut: TableCut | None = None
    restored_clock: int | None = None
    run: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Run and name: unique in the cluster."""
        return self.run, self.spec.name

    @property
    def title(self) -> str:
        """Name, with the run if that has one."""
        return f"{self.run}:{self.spec.name}" if self.run else self.spec.name

    @property
    def consistency(self) -> Consistency:
        """The newest setting."""
        return self.spec.consistency if self.change is None else self.change.consistency

    def is_asp(self, clock: int) -> bool:
        """True if steps of `clock` are ASP. False if an earlier setting holds there, which the view
        does not have.
        """
        is_newest = self.change is None or clock > self.change.after_clock
        return is_newest and self.consistency.mode is Mode.ASP

    @property
    def cut_step(self) -> int | None:
        """Step of the cut; None if it is not cut, or each range was cut at its own moment."""
        if self.cut is None:
            return None
        after_clock = self.cut.after_clock
        return None if self.is_asp(after_clock) else after_clock

    @cached_property
    def block_count(self) -> int:
        rows = self.spec.rows
        if rows is not None:
            return rows.partition_count
        return -(-self.spec.element_count // self.spec.block_elements)

    def block_length(self, block: int) -> int:
        """Elements of a block, fewer in the last one; of rows: of one row. InvalidKeys if it does
        not exist.
        """
        if not 0 <= block < self.block_count:
            raise InvalidKeys(
                f"table '{self.spec.name}' has blocks 0 to {self.block_count - 1}; got {block}"
            )
        if self.spec.rows is not None:
            return self.spec.element_count
        size = self.spec.block_elements
        return min(size, self.spec.element_count - block * size)

    def range_of_block(self, block: int, range_count: int) -> RangeId:
        """The range that holds a block."""
        return range_of_slot(slot_of_ordinal(self.first_ordinal + block), range_count)

    def deciding_range(self, range_count: int) -> RangeId:
        """The table's first range, whose primary ends a decided change (SEMANTICS S6)."""
        return next(iter(self.blocks_by_range(range_count)))

    def blocks_by_range(self, range_count: int) -> Mapping[RangeId, tuple[int, ...]]:
        """Blocks by range, ascending, without empty ranges; at first half a microsecond a block."""
        found = self._by_range.get(range_count)
        if found is None:
            found = _blocks_by_range(self.first_ordinal, self.block_count, range_count)
            self._by_range[range_count] = found
        return found

    def knows_ranges(self, range_count: int) -> bool:
        """True if `blocks_by_range` takes no time."""
        return range_count in self._by_range

    @cached_property
    def _by_range(self) -> dict[int, Mapping[RangeId, tuple[int, ...]]]:
        return {}

    @cached_property
    def step_hyperparameters(self) -> StepHyperparameters:
        return StepHyperparameters(self.spec.optimizer, has_rows=self.spec.rows is not None)

    @cached_property
    def _tensor_ends(self) -> tuple[int, ...]:
        return tuple(t.offset + t.element_count for t in self.spec.tensors)

    def segments(self, block: int) -> tuple[TensorSegment, ...]:
        """Overlaps of tensors with a block, in layout order. An empty tensor overlaps no block."""
        if self.spec.rows is not None:
            return (TensorSegment(0, 0, self.spec.element_count),)
        begin = block * self.spec.block_elements
        end = begin + self.block_length(block)
        first = bisect_right(self._tensor_ends, begin)
        beyond = bisect_left(self.spec.tensors, end, key=lambda tensor: tensor.offset)
        found = []
        for index in range(first, beyond):
            low = max(self.spec.tensors[index].offset, begin)
            high = min(self._tensor_ends[index], end)
            if low < high:
                found.append(TensorSegment(index, low - begin, high - begin))
        return tuple(found)


@lru_cache(maxsize=64)
def _blocks_by_range(
    first_ordinal: int, block_count: int, range_count: int
) -> Mapping[RangeId, tuple[int, ...]]:
    """Blocks of a table by range, cached because a changed table has the same."""
    found: dict[RangeId, list[int]] = {}
    for block in range(block_count):
        range_id = range_of_slot(slot_of_ordinal(first_ordinal + block), range_count)
        found.setdefault(range_id, []).append(block)
    return MappingProxyType({range_id: tuple(found[range_id]) for range_id in sorted(found)})
