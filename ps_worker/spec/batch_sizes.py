"""The samples of each step of a data pass, dealt out to workers by their speed.

    step      0 1 2 3 | 4 5 6 7 | 8 9 ...         with windows of four steps
    sizes of  the start         | what was agreed at step 4

Rules:
    - Each step takes the next samples of the pass, one run of them for each worker, in the order of
      ranks. The sizes of these runs are fixed for a window of steps.
    - What is agreed in a window holds from the next but one on, so a loader may draw batches ahead,
      up to the end of the next window, before the steps that come before them are taken.
    - The last step has the samples that are left, in the same proportion; fewer than one for each
      worker are left out of the pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ps_core.errors import InvalidConfig, check_config


def dealt(total: int, speeds: Mapping[int, float], least: int, most: int) -> dict[int, int]:
    """Samples for each worker, of whole numbers that give `total`, such that the last to have
    computed its samples is done as early as it can be.

    Args:
        total: as many as `least` for each worker, up to `most` for each.
        speeds: samples a second, by rank; above 0.
    """
    sizes = dict.fromkeys(sorted(speeds), least)
    # When each would be done with one sample more.
    ends = [((least + 1) / speeds[rank], rank) for rank in sizes if least < most]
    heapq.heapify(ends)
    for _ in range(total - least * len(sizes)):
        _, rank = heapq.heappop(ends)
        sizes[rank] += 1
        if sizes[rank] < most:
            heapq.heappush(ends, ((sizes[rank] + 1) / speeds[rank], rank))
    return sizes


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """The data set and its batches; all workers have the same.

    Attributes:
        length: the samples of the data set.
        batch_size: the samples of a worker's batch at first, and on average.
        least, most: bounds of a batch.
        every: the steps of a window.
        seed: draws the order of the samples.
    """

    length: int
    batch_size: int
    least: int
    most: int
    every: int
    seed: int

    def check(self, worker_count: int) -> None:
        """InvalidConfig if a value is out of bounds."""
        is_right = 1 <= self.least <= self.batch_size <= self.most and self.every >= 1
        check_config(
            is_right and self.seed >= 0 and self.length >= worker_count,
            f"adaptive batches of {self.batch_size} samples, from {self.least} to {self.most}, of "
            f"a data set of {self.length}, agreed on every {self.every} steps, with seed "
            f"{self.seed}; expected bounds of 1 or more around the size, 1 step or more, a seed "
            f"from 0 on, and a sample for each of {worker_count} workers",
        )


@dataclass(frozen=True, slots=True)
class _Window:
    begun: int  # the samples of the pass before it
    sizes: Mapping[int, int]

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


class BatchPlan:
    """The samples of one pass, from `begun` on; all workers have the same.

    Args:
        begun: the samples of the pass that were trained on before.
        sizes: by rank, of the first two windows.
    """

    def __init__(self, spec: BatchSpec, begun: int, sizes: Mapping[int, int]) -> None:
        self._length = spec.length
        self._every = spec.every
        self._windows = [_Window(begun, sizes)]
        self.agree(sizes)

    def agree(self, sizes: Mapping[int, int]) -> None:
        """Set the sizes of the next window of which none are known."""
        last = self._windows[-1]
        begun = min(last.begun + self._every * last.total, self._length)
        self._windows.append(_Window(begun, sizes))

    def begun(self, step: int) -> int:
        """The samples of the pass before a step; those that are left out count when it has ended.

        Raises:
            InvalidConfig: the sizes of the steps before it are not all known.
        """
        inside = step % self._every
        if step == self._every * len(self._windows):
            window, inside = self._windows[-1], self._every
        else:
            window = self._window(step)
        begun = min(window.begun + inside * window.total, self._length)
        return self._length if self._length - begun < len(window.sizes) else begun

    def batch(self, step: int, rank: int) -> range | None:
        """A worker's samples in a step, as places in the order of the pass; None after the last.

        Raises:
            InvalidConfig: the sizes of the step are not known.
        """
        begun = self.begun(step)
        if begun == self._length:
            return None
        sizes = self._sizes(step)
        before = sum(size for other, size in sizes.items() if other < rank)
        return range(begun + before, begun + before + sizes[rank])

    def weight(self, step: int, rank: int, members: Collection[int]) -> float:
        """The factor of a worker's mean over its batch such that the mean over the members is that
        over all their samples of the step: one that is gone is not in the mean.
        """
        sizes = {r: s for r, s in self._sizes(step).items() if r in members or r == rank}
        return sizes[rank] * len(sizes) / sum(sizes.values())

    def _window(self, step: int) -> _Window:
        known_count = self._every * len(self._windows)
        if step >= known_count:
            raise InvalidConfig(
                f"the loader draws batch {step} of the pass, and sizes are known up to "
                f"{known_count}: it fetches too far ahead. Expected a larger `every` than "
                f"{self._every}, such as the loader's num_workers * prefetch_factor"
            )
        return self._windows[step // self._every]

    def _sizes(self, step: int) -> Mapping[int, int]:
        window = self._window(step)
        left = self._length - self.begun(step)
        if left >= window.total:
            return window.sizes
        return dealt(left, {rank: float(size) for rank, size in window.sizes.items()}, 1, left)
