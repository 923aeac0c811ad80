"""Finds blocks whose residual outgrows their gradients; these fall back to a denser codec.

A gradient that arrives many steps late can make a run diverge that is stable without a codec. Then
residuals and gradients grow together, so a residual is compared with what gradients were before.

Rules:
    - A block is looked at in one of eight steps, by a hash of its number and the step's: whichever
      steps push it, such as each fourth with a fragment of `Outer`.
    - Its residual may be `limit` times as long as its gradients usually are. That length is a mean
      of those that were looked at, in which each one has an eighth of the weight.
    - A block falls back when it was too long at two looks, one after the other: one gradient may be
      far longer than all others.
    - A block that has fallen back stays so, also in a run that goes on with another codec. What is
      left of it goes in steps of at most four times the usual length, because all of it at once
      would be as bad as late.
"""

from __future__ import annotations

import math
import zlib
from struct import Struct

import numpy as np
import numpy.typing as npt

from ps_core.codecs.int8_passes import Floats
from ps_core.errors import InvalidCheckpoint

_PLACE = Struct("<QQ")
_LOOK_EVERY = 8
_WEIGHT = 1 / 8
_LONGEST_STEP = 4.0
_LOOKS = 2


class ResidualGuard:
    """The guard of one table. Lengths are Euclidean norms.

    Args:
        limit: the length of a block's residual, over the usual length of its gradients.
    """

    def __init__(self, block_count: int, limit: float) -> None:
        self._limit = limit
        self._usual = np.zeros(block_count)
        self._outgrown = np.zeros(block_count)  # looks in a row, at most _LOOKS

    def is_dense(self, block: int) -> bool:
        """True if the block has fallen back."""
        return bool(self._outgrown[block] == _LOOKS)

    @property
    def dense_count(self) -> int:
        """Blocks that have fallen back."""
        return int(np.count_nonzero(self._outgrown == _LOOKS))

    def looks(self, clock: int, block: int, gradient: Floats, left: Floats) -> bool:
        """True if the block falls back in this step, because what it leaves is too long."""
        if math.isinf(self._limit) and not self.is_dense(block):
            return False
        if zlib.crc32(_PLACE.pack(clock, block)) % _LOOK_EVERY:
            return False
        length = length_of(gradient)
        if not math.isfinite(length):
            return False
        usual = self._usual[block] or length
        self._usual[block] = usual + _WEIGHT * (length - usual)
        if not self.is_dense(block):
            is_long = length_of(left) > self._limit * self._usual[block] > 0
            self._outgrown[block] = self._outgrown[block] + 1 if is_long else 0
        return self.is_dense(block)

    def longest_step(self, block: int) -> float:
        """The greatest length of what a block that has fallen back may send."""
        return float(_LONGEST_STEP * self._usual[block])

    # --- in checkpoints

    def state(self) -> npt.NDArray[np.float64]:
        """The usual length of each block's gradients, and then the looks at which it was too long.
        Shapes: (2 * blocks,).
        """
        return np.concatenate((self._usual, self._outgrown))

    def load(self, state: npt.NDArray[np.float64]) -> None:
        """Go on from a checkpoint's. Shapes: as of `state`."""
        count = len(self._usual)
        if state.shape != (2 * count,):
            raise InvalidCheckpoint(
                f"a residual guard's state has {state.shape} numbers; expected {2 * count}"
            )
        self._usual[:], self._outgrown[:] = state[:count], state[count:]


def length_of(elements: Floats) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return math.sqrt(float(np.dot(elements, elements)))
