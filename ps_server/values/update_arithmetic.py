"""The arithmetic of an update: contributions summed, averaged, scaled, and run through the
optimizer.

Invariants:
    SUM-1  An accumulator is of one update: once it was applied or released it is nobody's.
    STO-3  An update that something was accumulated for has contributors.
    STO-5  A table has a custom update exactly if it names one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from ps_core.errors import InvalidConfig, check
from ps_core.tables import (
    Codec,
    Hyperparameters,
    OptimizerKind,
    Reduction,
    Table,
    presence_bytes,
)
from ps_core.work import Work
from ps_server.values import contributions
from ps_server.values.block_values import encoded
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.contributions import Contribution
from ps_server.values.custom_updates import CheckedUpdate, CustomOptimizer
from ps_server.values.mutations import SentAccumulator
from ps_server.values.optimizers import BlockState, Optimizer

_KEPT_SUM_COUNT = 2
"""Kept sums of an AGGREGATE table: a worker that has sealed clock c may still ask for c - 1."""

_WITHOUT_ARITHMETIC = (
    OptimizerKind.AGGREGATE,
    OptimizerKind.ASSIGN,
    OptimizerKind.ADD,
    OptimizerKind.CUSTOM,
)
"""Optimizers that are no kernel of `ps_server.values.optimizers`."""


@dataclass(slots=True, eq=False)
class Accumulator:
    """The accumulator of one update: its sums, block by block.

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
        """Add a contribution, which is taken over."""
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
        """Returns the sum of squares of each of `blocks`, in float64; absent values count as 0."""
        parts, found = self.parts, []
        for block in blocks:
            part = parts.get(block)
            found.append(0.0 if part is None else contributions.square_sum(part, pool))
            yield
        return tuple(found)

    def release(self, pool: BufferPool) -> None:
        """Drop the sums."""
        for part in (*self.parts.values(), *self.means.values()):
            contributions.release(part, pool)
        self.parts.clear()
        self.means.clear()

    def sent(self) -> SentAccumulator:
        """The sums for another server, blocks ascending.

        Shapes:
            payload: a view of the sum's memory, without padding; what is absent may be anything.
        """
        blocks = [contributions.elements(self.parts[block]) for block in sorted(self.parts)]
        means = [contributions.elements(self.means[block]) for block in sorted(self.means)]
        return SentAccumulator(tuple(blocks), self.is_reduced, tuple(means))

    def copied(self) -> SentAccumulator:
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
        self._sums: dict[int, Accumulator] = {}

    @property
    def byte_count(self) -> int:
        """Bytes of the sums."""
        return sum(part.byte_count for kept in self._sums.values() for part in kept.parts.values())

    def keep(self, clock: int, accumulator: Accumulator) -> None:
        """Keep the sum of `clock` as the newest, and drop those before its predecessor."""
        self._sums[clock] = accumulator
        for old in [kept for kept in self._sums if kept <= clock - _KEPT_SUM_COUNT]:
            self._sums.pop(old).release(self._pool)

    @property
    def all(self) -> Mapping[int, Accumulator]:
        return MappingProxyType(self._sums)

    def restore(self, sums: Mapping[int, Accumulator]) -> None:
        for accumulator in self._sums.values():
            accumulator.release(self._pool)
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


class UpdateArithmetic:
    """The arithmetic of one table's updates.

    Args:
        table: the table.
        pool: working memory.
        update: CUSTOM: what the table's optimizer names.

    Attributes:
        is_aggregate: whether the sums themselves are what is read; they are left to the caller.
    """

    __slots__ = ("_adds", "_custom", "_is_mean", "_optimizer", "_pool", "_table", "is_aggregate")

    def __init__(self, table: Table, pool: BufferPool, update: CheckedUpdate | None) -> None:
        spec = table.spec
        self._table = table
        self._pool = pool
        self._is_mean = spec.reduction is Reduction.MEAN
        self.is_aggregate = spec.optimizer.kind is OptimizerKind.AGGREGATE
        self._adds = spec.optimizer.kind is OptimizerKind.ADD
        self._custom = _custom_optimizer(table, update)
        has_kernel = spec.optimizer.kind not in _WITHOUT_ARITHMETIC
        self._optimizer = Optimizer(spec.optimizer, pool) if has_kernel else None

    def merged(self, hyperparameters: Hyperparameters) -> dict[str, float]:
        """The optimizer's hyperparameters: these over the table's own.

        Raises:
            InvalidConfig: one that the optimizer does not have or cannot use.
        """
        return dict(self._table.step_hyperparameters.merged(hyperparameters))

    def reducing(self, accumulator: Accumulator, contributor_count: int) -> Work[None]:
        """Reduce the sums, so that only a scale is missing."""
        check(
            contributor_count >= 1 or not accumulator.parts, "STO-3", "a sum without contributors"
        )
        if self._is_mean:
            yield from accumulator.averaging(contributor_count, self._pool)
        accumulator.is_reduced = True

    @property
    def is_whole(self) -> bool:
        """True if an update is of all its blocks at once, or of none."""
        return self._custom is not None

    def apply(
        self,
        states: Mapping[int, BlockState],
        blocks: Sequence[int],
        accumulator: Accumulator,
        hyperparameters: dict[str, float],
        contributor_count: int,
        update_scale: float,
    ) -> None:
        """Update some of the accumulator's blocks, and use up their sums."""
        parts = accumulator.parts
        check(contributor_count >= 1 or not parts, "STO-3", "a sum without contributors")
        for block in blocks:
            part = self._scaled(parts[block], accumulator, contributor_count, update_scale)
            if self.is_aggregate:
                parts[block] = part
            else:
                del parts[block]
                self._apply_block(states[block], part, hyperparameters)

    def apply_whole(
        self,
        states: Mapping[int, BlockState],
        clock: int,
        accumulator: Accumulator,
        hyperparameters: dict[str, float],
        contributor_count: int,
        update_scale: float,
    ) -> None:
        """Update all of the accumulator's blocks, where `is_whole`, and use it up.

        Raises:
            UpdateFailed: the custom update failed; values and state are as they were.
        """
        parts = accumulator.parts
        check(contributor_count >= 1 or not parts, "STO-3", "a sum without contributors")
        blocks = sorted(parts)
        try:
            for block in blocks:
                parts[block] = self._scaled(
                    parts[block], accumulator, contributor_count, update_scale
                )
            if self._custom is not None:
                changed = [(states[block], parts[block]) for block in blocks]
                self._custom.apply(clock, changed, hyperparameters)
        finally:
            accumulator.release(self._pool)

    def _scaled(
        self,
        part: Contribution,
        accumulator: Accumulator,
        contributor_count: int,
        update_scale: float,
    ) -> Contribution:
        if self._is_mean and not accumulator.is_reduced:
            part = contributions.averaged(part, contributor_count, self._pool)
        return contributions.scaled(part, update_scale, self._pool)

    def _apply_block(
        self, state: BlockState, total: Contribution, hyperparameters: dict[str, float]
    ) -> None:
        if self._adds:
            contributions.add_present(total, state.values)
        elif self._optimizer is None:
            contributions.copy_present(total, state.values)
        else:
            total = contributions.padded(total, self._pool)
            self._optimizer.apply(state, total.values, total.present, hyperparameters)
        contributions.release(total, self._pool)


def _custom_optimizer(table: Table, update: CheckedUpdate | None) -> CustomOptimizer | None:
    spec = table.spec
    expected = spec.optimizer.custom_update
    check(expected == ("" if update is None else update.name), "STO-5", f"'{expected}' is not here")
    if update is None:
        return None
    return CustomOptimizer(update, spec.name, allow_non_finite=spec.allow_non_finite)
