"""The arithmetic of an update: sums that are averaged, scaled, and run through the optimizer.

Invariants:
    SUM-1  An accumulator is of one update: once it was applied or released it is nobody's.
    STO-3  An update that something was accumulated for has contributors.
    STO-5  A table has a custom update exactly if it names one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ps_core.errors import InvalidConfig, check
from ps_core.sliced_work import Work
from ps_core.tables.elements import Codec, presence_bytes
from ps_core.tables.optimizers import Hyperparameters, OptimizerKind
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Reduction
from ps_server.values import contributions
from ps_server.values.block_values import encoded
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.contributions import Contribution
from ps_server.values.custom_updates import CheckedUpdate, CustomOptimizer
from ps_server.values.mutations import SentAccumulator
from ps_server.values.optimizers import KERNELS, BlockState, Optimizer

_KEPT_SUM_COUNT = 2
"""Kept sums of an AGGREGATE table: a worker that has sealed clock c may still ask for c - 1."""


class Terms(NamedTuple):
    """The terms of update `clock`. The hyperparameters are put over the table's own;
    `contributor_count` counts workers without gradients too.
    """

    clock: int
    hyperparameters: Hyperparameters
    contributor_count: int
    update_scale: float = 1.0


@dataclass(slots=True, eq=False)
class Accumulator:
    """The accumulator of one update: its sums, block by block.

    Attributes:
        is_reduced: they are averaged already, and only a scale is missing.
        means: running means of delay compensation, this update in them, of blocks that have one.
    """

    parts: dict[int, Contribution] = field(default_factory=dict)
    is_reduced: bool = False
    means: dict[int, Contribution] = field(default_factory=dict)

    def add(self, part: Contribution, pool: BufferPool) -> None:
        """Add a contribution, which is taken over."""
        if part.block in self.parts:
            part = contributions.added(self.parts[part.block], part, pool)
        self.parts[part.block] = part

    @property
    def blocks(self) -> Sequence[int]:
        """The blocks that it has sums of, ascending."""
        return sorted(self.parts)

    def release(self, pool: BufferPool) -> None:
        for part in (*self.parts.values(), *self.means.values()):
            contributions.release(part, pool)
        self.parts.clear()
        self.means.clear()

    def sent(self) -> SentAccumulator:
        """The sums for another server, blocks ascending: views; what is absent may be anything."""
        blocks = [contributions.elements(self.parts[block]) for block in sorted(self.parts)]
        means = [contributions.elements(self.means[block]) for block in sorted(self.means)]
        return SentAccumulator(tuple(blocks), self.is_reduced, tuple(means))


class KeptSums:
    """The newest reduced sums of an AGGREGATE table, by clock; `table` is its name."""

    def __init__(self, table: str, pool: BufferPool) -> None:
        self._table = table
        self._pool = pool
        self._sums: dict[int, Accumulator] = {}

    @property
    def byte_count(self) -> int:
        return sum(part.byte_count for kept in self._sums.values() for part in kept.parts.values())

    def keep(self, clock: int, accumulator: Accumulator) -> None:
        """Keep the sum of `clock` as the newest, and drop those before its predecessor."""
        self._sums[clock] = accumulator
        for old in [kept for kept in self._sums if kept <= clock - _KEPT_SUM_COUNT]:
            self._sums.pop(old).release(self._pool)

    @property
    def all(self) -> Mapping[int, Accumulator]:
        return self._sums

    def restore(self, sums: Mapping[int, Accumulator]) -> None:
        for accumulator in self._sums.values():
            accumulator.release(self._pool)
        self._sums = dict(sums)

    def read(
        self, state: BlockState, block: int, codec: Codec, clock: int | None
    ) -> tuple[bytes | memoryview, bytes]:
        """The sum of `clock` in a block, as `ShardStore.read`; InvalidConfig if it is not kept."""
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
            return bytes(codec.payload_bytes(state.length)), nothing
        if total.present is None:
            return encoded(total.values, state.length, codec, self._pool), b""
        values = torch.zeros(state.length, dtype=state.values.dtype)
        contributions.copy_present(total, values)
        present = contributions.packed_presence(total.present)
        return encoded(values, state.length, codec, self._pool), present


class UpdateArithmetic:
    """The arithmetic of one table's updates; for the arguments see `ShardStore`.

    Attributes:
        is_aggregate: the sums themselves are what is read; they are left to the caller.
        is_whole: an update is of all its blocks at once, or of none.
    """

    def __init__(self, table: Table, pool: BufferPool, update: CheckedUpdate | None) -> None:
        spec = table.spec
        self._table = table
        self._pool = pool
        self._is_mean = spec.reduction is Reduction.MEAN
        self.is_aggregate = spec.optimizer.kind is OptimizerKind.AGGREGATE
        self._adds = spec.optimizer.kind is OptimizerKind.ADD
        expected = spec.optimizer.custom_update
        named = "" if update is None else update.name
        check(expected == named, "STO-5", f"'{expected}' is not here")
        self._custom: CustomOptimizer | None = None
        if update is not None:
            may_be_any = spec.allow_non_finite
            self._custom = CustomOptimizer(update, spec.name, allow_non_finite=may_be_any)
        self.is_whole = self._custom is not None
        has_kernel = spec.optimizer.kind in KERNELS
        self._optimizer = Optimizer(spec.optimizer, pool) if has_kernel else None

    def merged(self, hyperparameters: Hyperparameters) -> dict[str, float]:
        """The optimizer's hyperparameters: these over the table's own. Raises InvalidConfig."""
        return dict(self._table.step_hyperparameters.merged(hyperparameters))

    def reducing(self, accumulator: Accumulator, contributor_count: int) -> Work[None]:
        """Reduce the sums, so that only a scale is missing."""
        parts = accumulator.parts
        check(contributor_count >= 1 or not parts, "STO-3", "a sum without contributors")
        if self._is_mean:
            for block, part in parts.items():
                parts[block] = contributions.averaged(part, contributor_count, self._pool)
                yield
        accumulator.is_reduced = True

    def apply(
        self,
        states: Mapping[int, BlockState],
        blocks: Sequence[int],
        accumulator: Accumulator,
        terms: Terms,
        numbers: dict[str, float],
    ) -> None:
        """Update some of the accumulator's blocks, or all where `is_whole`, and use up their sums;
        `numbers` are the merged hyperparameters. After UpdateFailed values and state are as they
        were.
        """
        parts, count = accumulator.parts, terms.contributor_count
        check(count >= 1 or not parts, "STO-3", "a sum without contributors")
        is_averaged = accumulator.is_reduced or not self._is_mean
        for block in blocks:
            part = parts[block]
            if not is_averaged:
                part = contributions.averaged(part, count, self._pool)
            parts[block] = part = contributions.scaled(part, terms.update_scale, self._pool)
            if not (self.is_aggregate or self.is_whole):
                del parts[block]
                self._apply_block(states[block], part, numbers)
        if self._custom is not None:
            changed = [(states[block], parts[block]) for block in blocks]
            try:
                self._custom.apply(terms.clock, changed, numbers)
            finally:
                accumulator.release(self._pool)

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
