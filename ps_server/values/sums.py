"""The sums of one table in one range: those that updates are made of, and those that AGGREGATE
tables keep.

Invariants:
    SUM-1  A total is of one update: once it was applied or released it is nobody's.

What it deliberately does not do: know optimizers, or decide what takes part (see
`ps_server.ranges.range_machine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from ps_core.errors import InvalidConfig
from ps_core.tables import Codec, presence_bytes
from ps_core.work import Work
from ps_server.values import contributions
from ps_server.values.block_values import encoded
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.contributions import Contribution
from ps_server.values.mutations import SentTotal
from ps_server.values.optimizers import BlockState

_KEPT_SUM_COUNT = 2
"""AGGREGATE: a worker that has sealed clock c may still ask for the sum of c - 1."""


@dataclass(slots=True, eq=False)
class Total:
    """What was folded for one update, block by block.

    Attributes:
        parts: the sums.
        is_reduced: whether they are averaged already, and only a scale is missing.
        means: what the running mean of delay compensation is with the update in it, of the blocks
            that have one.
    """

    parts: dict[int, Contribution] = field(default_factory=dict)
    is_reduced: bool = False
    means: dict[int, Contribution] = field(default_factory=dict)

    def add(self, part: Contribution, pool: BufferPool) -> None:
        """One worker's part more; it is taken over."""
        sum_before = self.parts.get(part.block)
        self.parts[part.block] = (
            part if sum_before is None else contributions.added(sum_before, part, pool)
        )

    def averaging(self, contributor_count: int, pool: BufferPool) -> Work[None]:
        """Make a mean of every sum."""
        for block, part in self.parts.items():
            self.parts[block] = contributions.averaged(part, contributor_count, pool)
            yield

    def squaring(self, blocks: Iterable[int], pool: BufferPool) -> Work[tuple[float, ...]]:
        """Of each of `blocks`, the sum of the squares, in float64; what is absent counts as 0."""
        parts, found = self.parts, []
        for block in blocks:
            part = parts.get(block)
            found.append(0.0 if part is None else contributions.square_sum(part, pool))
            yield
        return tuple(found)

    def release(self, pool: BufferPool) -> None:
        """Nothing comes of it."""
        for part in (*self.parts.values(), *self.means.values()):
            contributions.release(part, pool)
        self.parts.clear()
        self.means.clear()

    def sent(self) -> SentTotal:
        """The sums as they go to another server, blocks ascending.

        Shapes:
            payload: a view of the sum's memory, without padding; what is absent may be anything.
        """
        blocks = [contributions.elements(self.parts[block]) for block in sorted(self.parts)]
        means = [contributions.elements(self.means[block]) for block in sorted(self.means)]
        return SentTotal(tuple(blocks), self.is_reduced, tuple(means))

    def copied(self) -> SentTotal:
        """As `sent`, sharing nothing."""
        return self.sent().fixed()


class KeptSums:
    """The newest reduced sums of an AGGREGATE table, by clock.

    Args:
        table: the table's name, for people.
        pool: where the sums' memory comes from.
    """

    __slots__ = ("_pool", "_sums", "_table")

    def __init__(self, table: str, pool: BufferPool) -> None:
        self._table = table
        self._pool = pool
        self._sums: dict[int, Total] = {}

    @property
    def byte_count(self) -> int:
        """Bytes of the sums."""
        return sum(part.byte_count for kept in self._sums.values() for part in kept.parts.values())

    def keep(self, clock: int, total: Total) -> None:
        """The sum of `clock` is the newest: the one before it stays, older ones go."""
        self._sums[clock] = total
        for old in [kept for kept in self._sums if kept <= clock - _KEPT_SUM_COUNT]:
            self._sums.pop(old).release(self._pool)

    @property
    def all(self) -> Mapping[int, Total]:
        """Those that are kept, by clock."""
        return MappingProxyType(self._sums)

    def restore(self, sums: Mapping[int, Total]) -> None:
        """Keep these instead."""
        for total in self._sums.values():
            total.release(self._pool)
        self._sums = dict(sums)

    def read(
        self, state: BlockState, block: int, codec: Codec, clock: int | None
    ) -> tuple[bytes | memoryview, bytes]:
        """The sum of `clock` in a block, as `ShardStore.read` gives it; None: the newest.

        Raises:
            InvalidConfig: it is not kept.
        """
        newest = max(self._sums, default=0)
        wanted = newest if clock is None else clock
        if wanted == 0 and newest < _KEPT_SUM_COUNT:
            return encoded(state.values, state.length, codec, self._pool), b""
        if wanted not in self._sums:
            kept = ", ".join(map(str, sorted(self._sums))) or "0"
            raise InvalidConfig(
                f"table '{self._table}' does not keep the sum of clock {wanted}; it keeps {kept}"
            )
        total = self._sums[wanted].parts.get(block)
        if total is None:
            nothing = bytes(presence_bytes(state.segment_count))
            return bytes(state.length * codec.element_bytes), nothing
        if total.present is None:
            return encoded(total.values, state.length, codec, self._pool), b""
        values = torch.zeros(state.length, dtype=state.values.dtype)
        contributions.copy_present(total, values)
        present = contributions.packed_presence(total.present)
        return encoded(values, state.length, codec, self._pool), present
