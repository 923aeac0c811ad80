"""Which samples of an epoch a worker sees, and what is left of it when others go on: pure.

An epoch is an order of all samples. Its *places*, one for each worker that the cluster was started
for, take turns: place p has positions p, p + places, p + 2 * places, ... of it. Where a run goes
on with other workers, what nobody had seen becomes the order of another *stage*, with as many
places as there are workers then.

Rules:
    - The order of a first stage, and what each place has of it, are those of
      `torch.utils.data.DistributedSampler` with the same seed, bit for bit.
    - All places have equally many samples: where they do not come out even, those at the begin of
      the order are seen again at its end, or those at the end are left out.

Invariants:
    PLAN-1  However many stages an epoch has, and however far each place came in each: nothing that
            is left of it has been seen, and all that was not seen is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Order = npt.NDArray[np.int64]
"""Numbers of samples, in the order in which they are seen."""

Stage = tuple[int, ...]
"""How many samples each place has seen of a stage that is over; as many as it had places."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch, from its begin.

    Attributes:
        length: samples of the data set.
        number: which epoch it is, from 0.
        seed: what its order is drawn from, with its number.
        is_shuffled: whether it is drawn; else it is that of the data set.
        stages: those that are over.
    """

    length: int
    number: int
    seed: int = 0
    is_shuffled: bool = True
    stages: tuple[Stage, ...] = ()

    def left(self) -> Order:
        """What nobody had seen when the present stage began, in order."""
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
        """How many these are, without drawing them."""
        count = self.length
        for stage in self.stages:
            shares = (-(-(count - place) // len(stage)) for place in range(len(stage)))
            count = sum(max(share - seen, 0) for share, seen in zip(shares, stage, strict=True))
        return count


def share_count(left_count: int, places: int, *, drop_last: bool) -> int:
    """How many samples each place has of so many."""
    return left_count // places if drop_last else -(-left_count // places)


def share_of(left: Order, place: int, places: int, *, drop_last: bool) -> Order:
    """What one place has of them."""
    count = share_count(len(left), places, drop_last=drop_last)
    if not count:
        return left[:0]
    return left[(place + places * np.arange(count)) % len(left)]


def stage_of(taken: Sequence[int | None]) -> Stage:
    """The stage that ends, where each place has seen so many; of one that is not known it is taken
    for granted that it saw no more than the others: what it did may be seen again.
    """
    known = [count for count in taken if count is not None]
    least = min(known, default=0)
    return tuple(least if count is None else count for count in taken)
