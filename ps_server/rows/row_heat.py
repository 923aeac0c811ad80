"""The hottest rows of one range of a table: an estimate from samples, for people.

Rules:
    - Of each call one id of `SAMPLED_SHARE` is counted, from a place on that is another in each
      call. What is hot shows; what comes once does not. Of a large call it is one of more ids, and
      counts as much more, or counting would take as long as finding the rows.
    - Counts fade: all are halved when a number of samples has come. A row that was hot once makes
      way. Of too many ids, those with the lowest counts are forgotten.
"""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

from ps_core.rows import Ids

SAMPLED_SHARE = 32

_GOLDEN = 0x9E3779B1

_LARGE_COUNT = 512
"""Ids of a call for which one more of `SAMPLED_SHARE` is passed by each time."""

_HALVED_COUNT = 65_536
"""Two million ids."""

_MOST_COUNT = 4_096


class HotRow(NamedTuple):
    """A row, and its share of the ids that came."""

    row_id: int
    share: float


class RowHeat:
    """Counts of ids, sampled. `count` is of all that came.

    Args:
        halved_count: samples after which counts are halved.
        most_count: ids that are kept of too many.
    """

    def __init__(self, halved_count: int = _HALVED_COUNT, most_count: int = _MOST_COUNT) -> None:
        self.count = 0
        self._halved_count, self._most_count = halved_count, most_count
        self._counts: dict[int, float] = {}
        self._total = 0.0
        self._calls = 0

    def note(self, ids: Ids) -> None:
        """Some ids came."""
        self.count += len(ids)
        self._calls += 1
        # The upper bits of multiples of the golden ratio: even, whichever calls one looks at.
        weight = 1 + len(ids) // _LARGE_COUNT
        step = weight * SAMPLED_SHARE
        begin = (self._calls * _GOLDEN % 2**32) * step >> 32
        chosen = ids[begin::step].tolist()
        counts = self._counts
        for row_id in chosen:
            counts[row_id] = counts.get(row_id, 0) + weight
        self._total += weight * len(chosen)
        if self._total >= self._halved_count:
            self._total /= 2
            self._counts = {row_id: count / 2 for row_id, count in self._counts.items()}
        if len(self._counts) > 2 * self._most_count:
            ordered = sorted(self._counts.items(), key=itemgetter(1), reverse=True)
            self._counts = dict(ordered[: self._most_count])

    def hottest(self, count: int) -> list[HotRow]:
        """So many rows, the hottest first; the lower id of two equal ones."""
        ordered = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        return [HotRow(row_id, found / self._total) for row_id, found in ordered[:count]]
