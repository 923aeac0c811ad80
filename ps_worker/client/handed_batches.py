"""The batches of a training loop: handed to the script, and trained on."""

from __future__ import annotations

from typing import Protocol

from ps_core.errors import InvalidConfig


class SealedSteps(Protocol):
    """The steps of a worker, over all tables."""

    @property
    def newest_clock(self) -> int: ...


class HandedBatches:
    """Counts the batches of one loop. A batch is trained on once its worker has sealed a step after
    the script got it: batches that a loader fetched ahead, or that the script has in its hands, do
    not count.
    """

    def __init__(self, steps: SealedSteps) -> None:
        self.count = 0
        self._steps = steps
        self._trained_count = self._clock = 0

    def hand(self) -> None:
        """The script gets another batch."""
        self._trained_count, self._clock = self.trained_count, self._steps.newest_clock
        self.count += 1

    @property
    def trained_count(self) -> int:
        is_sealed = self._steps.newest_clock > self._clock
        return self.count if is_sealed else self._trained_count


def batch_size_of(loader: object, batch_size: int | None) -> int:
    """The samples of a loader's batches, unless given; InvalidConfig if neither says."""
    size = batch_size or getattr(loader, "batch_size", None)
    size = size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not size:
        raise InvalidConfig("the loader has no batch_size; give batch_size=... with it")
    return int(size)
