"""Ids as the world has them: few come often, and most seldom.

    probability of rank r = r ** -EXPONENT / sum of k ** -EXPONENT, k = 1 ... row_count

Ranks are scattered over the ids by a random permutation, so that hot rows are no neighbours.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

EXPONENT = 1.05


class ZipfIds:
    """Independent draws; an id may come several times. Takes 16 bytes a row."""

    def __init__(self, row_count: int) -> None:
        self._draws = np.random.default_rng(0)
        self._sums = np.cumsum(np.arange(1, row_count + 1, dtype=np.float64) ** -EXPONENT)
        self._ids = self._draws.permutation(row_count)

    def next(self, count: int) -> npt.NDArray[np.int64]:
        """So many ids, each drawn anew. Shapes: (count,)."""
        points = self._draws.random(count) * self._sums[-1]
        return self.at(np.searchsorted(self._sums, points, side="right"))

    def at(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The ids of these places in the order of their frequency, from 0."""
        found: npt.NDArray[np.int64] = self._ids[np.minimum(places, len(self._ids) - 1)]
        return found
