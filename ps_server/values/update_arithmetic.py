"""What an update makes of the blocks of one table: averaged, scaled, and through the optimizer.

Invariants:
    STO-3  An update that something was folded for has contributors.
    STO-5  A table has a custom update exactly if it names one.

What it deliberately does not do: form sums (`ps_server.values.sums`), or hold blocks
(`ps_server.values.shard_store`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ps_core.errors import check
from ps_core.tables import Hyperparameters, OptimizerKind, Reduction, Table
from ps_core.work import Work
from ps_server.values import contributions
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.contributions import Contribution
from ps_server.values.custom_updates import CheckedUpdate, CustomOptimizer
from ps_server.values.optimizers import BlockState, Optimizer
from ps_server.values.sums import Total

_WITHOUT_ARITHMETIC = (
    OptimizerKind.AGGREGATE,
    OptimizerKind.ASSIGN,
    OptimizerKind.ADD,
    OptimizerKind.CUSTOM,
)
"""Optimizers that are no kernels of `ps_server.values.optimizers`."""


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

    def numbers(self, hyperparameters: Hyperparameters) -> dict[str, float]:
        """What the optimizer is run with: these over the table's own.

        Raises:
            InvalidConfig: one that the optimizer does not have or cannot use.
        """
        return dict(self._table.numbers.merged(hyperparameters))

    def reducing(self, total: Total, contributor_count: int) -> Work[None]:
        """Make of the sums what is only to be scaled."""
        check(contributor_count >= 1 or not total.parts, "STO-3", "a sum without contributors")
        if self._is_mean:
            yield from total.averaging(contributor_count, self._pool)
        total.is_reduced = True

    @property
    def is_whole(self) -> bool:
        """Whether an update is of all its blocks at once, or of none."""
        return self._custom is not None

    def apply(
        self,
        states: Mapping[int, BlockState],
        blocks: Sequence[int],
        total: Total,
        numbers: dict[str, float],
        contributor_count: int,
        update_scale: float,
    ) -> None:
        """Update some of the total's blocks, and use up their sums."""
        parts = total.parts
        check(contributor_count >= 1 or not parts, "STO-3", "a sum without contributors")
        for block in blocks:
            part = self._scaled(parts[block], total, contributor_count, update_scale)
            if self.is_aggregate:
                parts[block] = part
            else:
                del parts[block]
                self._apply_block(states[block], part, numbers)

    def apply_whole(
        self,
        states: Mapping[int, BlockState],
        clock: int,
        total: Total,
        numbers: dict[str, float],
        contributor_count: int,
        update_scale: float,
    ) -> None:
        """Update all of the total's blocks, where `is_whole`, and use it up.

        Raises:
            UpdateFailed: the custom update failed; values and state are as they were.
        """
        parts = total.parts
        check(contributor_count >= 1 or not parts, "STO-3", "a sum without contributors")
        blocks = sorted(parts)
        try:
            for block in blocks:
                parts[block] = self._scaled(parts[block], total, contributor_count, update_scale)
            if self._custom is not None:
                changed = [(states[block], parts[block]) for block in blocks]
                self._custom.apply(clock, changed, numbers)
        finally:
            total.release(self._pool)

    def _scaled(
        self, part: Contribution, total: Total, contributor_count: int, update_scale: float
    ) -> Contribution:
        if self._is_mean and not total.is_reduced:
            part = contributions.averaged(part, contributor_count, self._pool)
        return contributions.scaled(part, update_scale, self._pool)

    def _apply_block(
        self, state: BlockState, total: Contribution, numbers: dict[str, float]
    ) -> None:
        if self._adds:
            contributions.add_present(total, state.values)
        elif self._optimizer is None:
            contributions.copy_present(total, state.values)
        else:
            total = contributions.padded(total, self._pool)
            self._optimizer.apply(state, total.values, total.present, numbers)
        contributions.release(total, self._pool)


def _custom_optimizer(table: Table, update: CheckedUpdate | None) -> CustomOptimizer | None:
    spec = table.spec
    expected = spec.optimizer.custom_update
    check(expected == ("" if update is None else update.name), "STO-5", f"'{expected}' is not here")
    if update is None:
        return None
    return CustomOptimizer(update, spec.name, allow_non_finite=spec.allow_non_finite)
