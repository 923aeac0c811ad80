"""Each worker's samples of an epoch, and the samples that a restored run has left. Pure.

An epoch is an order of all samples. Its *places*, one for each worker that the cluster was started
for, take turns: place p has positions p, p + places, p + 2 * places, ... If a run goes on with
other workers, the samples that no worker had seen become the order of another *stage*, with as many
places as there are workers then.

Rules:
    - The order of a first stage, and the share of each place, are those of
      `torch.utils.data.DistributedSampler` with the same seed, bit for bit.
    - All places have equally many samples: if they do not divide evenly, the first of the order are
      seen again at its end, or the last are left out.

Invariants:
    PLAN-1  After any number of stages, whatever each place has seen in each, exactly the samples
            that were not seen are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Order = npt.NDArray[np.int64]
"""Indexes of samples, in order."""

Stage = tuple[int, ...]
"""The number of samples that each place has seen of an ended stage."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch of `length` samples; `number` counts from 0. Its order is drawn with `seed` and
    `number`, or is the data set's; `stages` are the ended ones.
    """

    length: int
    number: int
    seed: int = 0
    is_shuffled: bool = True
    stages: tuple[Stage, ...] = ()

    def left(self) -> Order:
        """The samples that no place had seen when the present stage began, in order."""
        if self.is_shuffled:
            generator = torch.Generator().manual_seed(self.seed + self.number)
            order = torch.randperm(self.length, generator=generator).numpy()
        else:
            order = np.arange(self.length, dtype=np.int64)
        for stage in self.stages:
            position = np.arange(len(order))
            seen = np.asarray(stage)
            order = order[position // len(stage) >= seen[position % len(stage)]]
        return order

    @property
    def left_count(self) -> int:
        """The length of `left`, without drawing it."""
        count = self.length
        for stage in self.stages:
            shares = (-(-(count - place) // len(stage)) for place in range(len(stage)))
            count = sum(max(share - seen, 0) for share, seen in zip(shares, stage, strict=True))
        return count


def share_count(left_count: int, places: int, *, drop_last: bool) -> int:
    """The number of samples that each place has of a stage."""
    return left_count // places if drop_last else -(-left_count // places)


def share_of(left: Order, place: int, places: int, *, drop_last: bool) -> Order:
    """The samples of one place."""
    count = share_count(len(left), places, drop_last=drop_last)
    if not count:
        return left[:0]
    return left[(place + places * np.arange(count)) % len(left)]


def stage_of(taken: Sequence[int | None]) -> Stage:
    """The stage that ends with `taken` samples seen by each place. An unknown place counts as the
    least of the others, so its samples may be seen again.
    """
    known = [count for count in taken if count is not None]
    least = min(known, default=0)
    return tuple(least if count is None else count for count in taken)


class Position(NamedTuple):
    """A worker's part of an epoch in a checkpoint.

    Attributes:
        number: of the epoch.
        place: None for a worker beyond the first, which shares another's.
        places: of the running stage.
        stages: the ended ones, as far as it knows: none, if it joined within the epoch.
    """

    number: int
    place: int | None
    places: int
    stages: tuple[Stage, ...]


def epoch_of(positions: Sequence[Position]) -> Position:
    """One that knows the epoch with which a run goes on, and its stages. Workers without a place
    count only where there are no others: all that they see is another's share.
    """
    placed = [position for position in positions if position.place is not None] or positions
    number = min(position.number for position in placed)
    return max((p for p in placed if p.number == number), key=lambda p: len(p.stages))
