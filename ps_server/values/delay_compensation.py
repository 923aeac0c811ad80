"""Delay compensation: corrects a gradient computed at old values for later changes.

    g + lambda * g * g * (w - w')          g * g stands for the diagonal of the Hessian
    adaptive: lambda / sqrt(m + eps), where m is the running mean of g * g

Reference: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation" (ICML
2017), equations 10 and 14. As there, m is one value an element, shared by all workers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ps_core.keys import Incarnation
from ps_core.tables.optimizers import DELAY_MEAN_SQUARE
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.contributions import Contribution, element_mask, head, take_padded
from ps_server.values.optimizers import BlockState

MEAN_SQUARE = DELAY_MEAN_SQUARE

MEAN_DECAY = 0.95
EPSILON = 1e-7


class ReaderValues:
    """The values that readers were given last, block by block: their gradients start from these."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._kept: dict[tuple[Incarnation, int], Tensor] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def byte_count(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values())

    def keep(self, reader: Incarnation, block: int, values: Tensor) -> None:
        if (reader, block) not in self._kept:
            self._kept[reader, block] = self._pool.take(values.numel(), values.dtype)
        self._kept[reader, block].copy_(values)

    def find(self, reader: Incarnation, block: int) -> Tensor | None:
        return self._kept.get((reader, block))

    def forget(self, reader: Incarnation) -> None:
        for key in [key for key in self._kept if key[0] == reader]:
            self._pool.give_back(self._kept.pop(key))

    def clear(self) -> None:
        for reader in {reader for reader, _ in self._kept}:
            self.forget(reader)


def compensate(
    part: Contribution,
    state: BlockState,
    kept: Tensor,
    strength: float,
    mean: Contribution | None,
    scratch: Tensor,
) -> None:
    """Correct `part`, an owned gradient, in place.

    Args:
        kept: the values that the gradient was computed at, like `state.values`.
        strength: lambda.
        mean: the adaptive form: the running mean, with this gradient in it.
        scratch: working memory, like `state.values`.
    """
    length = part.length
    gradient, change = head(part.values, length), head(scratch, length)
    torch.sub(head(state.values, length), head(kept, length), out=change)
    change.mul_(gradient)
    if mean is not None:
        change.div_(head(mean.values, length).add(EPSILON).sqrt_())
    if part.present is not None:  # what is absent has no gradient, whatever its memory holds
        absent = torch.from_numpy(~element_mask(part.bounds, part.present))
        change.masked_fill_(absent, 0.0)
    gradient.addcmul_(change, gradient, value=strength)


def mean_after(part: Contribution, before: Tensor | None, pool: BufferPool) -> Contribution:
    """The running mean of a block with this gradient in it; what is absent keeps its own."""
    length = part.length
    result = take_padded(pool, length, part.values.dtype)
    mean, gradient = head(result, length), head(part.values, length)
    past = torch.zeros_like(mean) if before is None else head(before, length)
    torch.mul(past, MEAN_DECAY, out=mean)
    mean.addcmul_(gradient, gradient, value=1 - MEAN_DECAY)
    if part.present is not None:
        here = torch.from_numpy(element_mask(part.bounds, part.present))
        torch.where(here, mean, past, out=mean)
    return Contribution(part.block, length, result, None, part.bounds, is_owned=True)
