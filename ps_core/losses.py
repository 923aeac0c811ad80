"""Running sums of the losses that a worker's script reports.

The difference of two sums gives the mean of the losses between them and its error, however many
reports were lost on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LossTotals:
    """Sums over losses.

    Attributes:
        count: finite ones.
        square_total: the sum of their squares.
        non_finite_count: infinite or NaN ones, which are in no sum.
    """

    count: int = 0
    total: float = 0.0
    square_total: float = 0.0
    non_finite_count: int = 0

    def with_loss(self, loss: float) -> LossTotals:
        """The sums with one more loss."""
        square = loss * loss  # infinite for some finite losses, which would spoil the sums
        if not math.isfinite(square):
            return replace(self, non_finite_count=self.non_finite_count + 1)
        total, square_total = self.total + loss, self.square_total + square
        return replace(self, count=self.count + 1, total=total, square_total=square_total)

    def since(self, before: LossTotals) -> LossTotals:
        """Sums of the losses after `before`."""
        return LossTotals(
            self.count - before.count,
            self.total - before.total,
            self.square_total - before.square_total,
            self.non_finite_count - before.non_finite_count,
        )

    @classmethod
    def together(cls, parts: Iterable[LossTotals]) -> LossTotals:
        """Sums over several workers."""
        found = list(parts)
        return cls(
            sum(part.count for part in found),
            math.fsum(part.total for part in found),
            math.fsum(part.square_total for part in found),
            sum(part.non_finite_count for part in found),
        )

    @property
    def mean(self) -> float:
        """Mean of the finite losses; 0 without any."""
        return self.total / self.count if self.count else 0.0

    @property
    def error_square(self) -> float:
        """The square of the mean's standard error."""
        if not self.count:
            return 0.0
        variance = self.square_total / self.count - self.mean * self.mean
        return max(0.0, variance) / self.count


NO_LOSSES = LossTotals()
