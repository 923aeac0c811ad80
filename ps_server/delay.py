"""Delay compensation: a gradient that was computed at old values, corrected for what has changed.

    g + lambda * g * g * (w - w')          g * g stands for the diagonal of the Hessian
    adaptive: lambda / sqrt(m + eps), where m is the running mean of g * g

Reference: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation" (ICML
2017), equations 10 and 14. As there, m is one value an element, shared by all workers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ps_core.keys import Incarnation
from ps_server.buffer_pool import BufferPool
from ps_server.contributions import Contribution, element_mask, head
from ps_server.events import Compensation
from ps_server.optimizers import BlockState

MEAN_SQUARE = "delay_mean_square"
"""The optimizer state that the adaptive form adds to a block."""

MEAN_DECAY = 0.95
EPSILON = 1e-7


class KeptValues:
    """The values that readers were given last, block by block: what their gradients start from."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._kept: dict[tuple[Incarnation, int], Tensor] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def byte_count(self) -> int:
        """What they cost."""
        return sum(kept.nbytes for kept in self._kept.values())

    def keep(self, reader: Incarnation, block: int, values: Tensor) -> None:
        """Remember the block's values as they are now."""
        kept = self._kept.get((reader, block))
        if kept is None:
            kept = self._pool.take(values.numel(), values.dtype)
            self._kept[reader, block] = kept
        kept.copy_(values)

    def find(self, reader: Incarnation, block: int) -> Tensor | None:
        """What the reader was given; None if it never was."""
        return self._kept.get((reader, block))

    def forget(self, reader: Incarnation) -> None:
        """The reader has gone."""
        for key in [key for key in self._kept if key[0] == reader]:
            self._pool.give_back(self._kept.pop(key))

    def clear(self) -> None:
        """All readers have."""
        for reader in {reader for reader, _ in self._kept}:
            self.forget(reader)


def compensate(
    part: Contribution,
    state: BlockState,
    kept: Tensor,
    setting: Compensation,
    scratch: Tensor,
) -> None:
    """Correct `part` in place.

    Args:
        part: the gradient; owned.
        state: the block's values; the adaptive form updates its running mean.
        kept: the values that the gradient was computed at.
        setting: lambda, and whether it is adaptive.
        scratch: working memory.

    Shapes:
        kept, scratch: like `state.values`.
    """
    length = part.length
    gradient, change = head(part.values, length), head(scratch, length)
    torch.sub(head(state.values, length), head(kept, length), out=change)
    change.mul_(gradient)
    if setting.adaptive:
        change.div_(_root_mean_square(part, state, gradient))
    if part.present is not None:  # what is absent has no gradient, whatever its memory holds
        absent = torch.from_numpy(~element_mask(part.bounds, part.present))
        change.masked_fill_(absent, 0.0)
    gradient.addcmul_(change, gradient, value=setting.strength)


def _root_mean_square(part: Contribution, state: BlockState, gradient: Tensor) -> Tensor:
    mean = state.slots.get(MEAN_SQUARE)
    if mean is None:
        mean = state.slots[MEAN_SQUARE] = torch.zeros_like(state.values)
    mean = head(mean, part.length)
    updated = mean.mul(MEAN_DECAY).addcmul_(gradient, gradient, value=1 - MEAN_DECAY)
    if part.present is None:
        mean.copy_(updated)
    else:
        here = torch.from_numpy(element_mask(part.bounds, part.present))
        torch.where(here, updated, mean, out=mean)
    return mean.add(EPSILON).sqrt_()
