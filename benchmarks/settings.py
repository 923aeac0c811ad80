"""What a caller chooses about a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ROUND_COUNT = 5
QUICK_ROUND_COUNT = 2


def _nobody(number: int) -> None:
    """The default listener: nobody watches the rounds."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Settings of one run.

    Attributes:
        quick: small sizes and two rounds: whether it runs, not how fast.
        size_mb: size of the table in MiB; 0 means the benchmark's own. `dense` only.
        on_round: hears the number of each round, 0 for the warm-up.
    """

    quick: bool = False
    size_mb: int = 0
    on_round: Callable[[int], None] = _nobody

    @property
    def round_count(self) -> int:
        """Rounds that count, after the warm-up."""
        return QUICK_ROUND_COUNT if self.quick else ROUND_COUNT
