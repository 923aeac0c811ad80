"""Marks of gradients: has the script written another one since, by whatever way?

A gradient's mark is its place and version, and, on a device, where a graph may write it without a
trace, the sums of its bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ps_worker.training.tables.inspection import ColumnSums, place_of, true_numbers


class GradientMarks:
    """The marks of some gradients, in their order."""

    def __init__(self, gradients: Iterable[torch.Tensor | None]) -> None:
        given = [
            None if each is None or each.layout is not torch.strided else each.detach()
            for each in gradients
        ]
        self._counts = [0 if each is None else each.numel() for each in given]
        self._places = [None if each is None else place_of(each) for each in given]
        self._far = [
            (n, each) for n, each in enumerate(given) if each is not None and not each.is_cpu
        ]
        self._sums = ColumnSums(self._counts)
        self._sums.take(self._far)

    def differ_from(self, earlier: GradientMarks) -> bool:
        """True if any gradient differs from its earlier mark; waits for the devices."""
        if self._places != earlier._places or self._counts != earlier._counts:
            return True
        return bool(true_numbers(self._sums.differing(earlier._sums, self._far)))
