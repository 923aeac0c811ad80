"""The hottest rows of one range of a table: an estimate from samples, for people.

Rules:
    - Of each call one id of `SAMPLED_SHARE` is counted, from a place on that is another in each
      call. What is hot shows; what comes once does not.
    - Counts fade: all are halved when a number of samples has come. A row that was hot once makes
      way. Of too many ids, those with the lowest counts are forgotten.
"""

from __future__ import annotations

from collections import Counter
from operator import itemgetter
from typing import NamedTuple

from ps_core.rows import Ids

SAMPLED_SHARE = 32

_GOLDEN = 0x9E3779B1

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
        self._counts: Counter[int] = Counter()  # halves of whole numbers, too
        self._total = 0.0
        self._calls = 0

    def note(self, ids: Ids) -> None:
        """Some ids came."""
        self.count += len(ids)
        self._calls += 1
        # The upper bits of multiples of the golden ratio: even, whichever calls one looks at.
        begin = (self._calls * _GOLDEN % 2**32) * SAMPLED_SHARE >> 32
        chosen = ids[begin::SAMPLED_SHARE].tolist()
        self._counts.update(chosen)
        self._total += len(chosen)
        if self._total >= self._halved_count:
            self._total /= 2
            self._counts = Counter({row_id: count / 2 for row_id, count in self._counts.items()})
        if len(self._counts) > 2 * self._most_count:
            ordered = sorted(self._counts.items(), key=itemgetter(1), reverse=True)
            self._counts = Counter(dict(ordered[: self._most_count]))

    def hottest(self, count: int) -> list[HotRow]:
        """So many rows, the hottest first; the lower id of two equal ones."""
        ordered = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        return [HotRow(row_id, found / self._total) for row_id, found in ordered[:count]]
