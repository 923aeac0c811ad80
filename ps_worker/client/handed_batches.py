"""The batches of a training loop: handed to the script, and trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from ps_core.errors import InvalidConfig

BatchT = TypeVar("BatchT")


class HandedBatches:
    """Counts the batches of one loop, or their samples. A batch is trained on once its worker has
    taken a step after the script got it: batches that a loader fetched ahead, or that the script
    has in its hands, do not count.

    Args:
        mark: returns another value after each step.

    Attributes:
        count: of those that the script got; whoever counts samples corrects it where a batch was
            smaller.
    """

    def __init__(self, mark: Callable[[], object]) -> None:
        self.count = 0
        self._mark = mark
        self._trained_count, self._handed_mark = 0, mark()

    def hand(self, count: int = 1) -> None:
        """The script gets another batch, or so many samples."""
        self._trained_count, self._handed_mark = self.trained_count, self._mark()
        self.count += count

    @property
    def trained_count(self) -> int:
        return self.count if self._mark() != self._handed_mark else self._trained_count


class CountedBatches(Iterator[BatchT]):
    """The batches of `follow` and `over`, which count them as the script gets them. Who takes them
    ahead of the training (`prefetch`) refuses them.

    Args:
        batches: the batches.
        source: the call that returns them, as a script writes it.
    """

    def __init__(self, batches: Iterator[BatchT], source: str) -> None:
        self._batches = batches
        self.source = source

    def __next__(self) -> BatchT:
        return next(self._batches)


def check_order(loader: object) -> None:
    """InvalidConfig if a loader may give its batches in another order than it draws them: whoever
    counts them would take one for trained that is still being loaded.
    """
    if not getattr(loader, "in_order", True):
        raise InvalidConfig(
            "the loader gives its batches in the order in which they are loaded, and they are "
            "counted in the order in which they were drawn; expected in_order=True"
        )


def batch_size_of(loader: object, batch_size: int | None) -> int:
    """The samples of a loader's batches, unless given.

    Raises:
        InvalidConfig: neither says; or as `check_order`.
    """
    check_order(loader)
    size = batch_size or getattr(loader, "batch_size", None)
    size = size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not size:
        raise InvalidConfig("the loader has no batch_size; give batch_size=... with it")
    return int(size)
