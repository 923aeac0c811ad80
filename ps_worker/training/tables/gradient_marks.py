"""Marks of gradients: has the script written another one since, by whatever way?

A gradient's mark is its place and version, and, on a device, where a graph may write it without a
trace, the sums of its bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import starmap, zip_longest
from typing import TypeAlias

import torch

from ps_worker.training.tables.staging import column_sums, place_of, sums_differ

_Mark: TypeAlias = tuple[object, torch.Tensor | None] | None
"""None: there is no gradient."""


class GradientMarks:
    """The marks of some gradients, in their order."""

    def __init__(self, gradients: Iterable[torch.Tensor | None]) -> None:
        self._marks = [_mark_of(gradient) for gradient in gradients]

    def differ_from(self, earlier: GradientMarks) -> bool:
        """True if any gradient differs from its earlier mark; waits for the devices."""
        return any(starmap(_differ, zip_longest(earlier._marks, self._marks)))


def _differ(before: _Mark, now: _Mark) -> bool:
    if before is None or now is None:
        return before is not now
    (place, sums), (place_now, sums_now) = before, now
    if place != place_now:
        return True
    return sums is not None and sums_now is not None and bool(sums_differ(sums, sums_now))


def _mark_of(gradient: torch.Tensor | None) -> _Mark:
    if gradient is None or gradient.layout is not torch.strided:
        return None
    return place_of(gradient), None if gradient.is_cpu else column_sums(gradient.detach())
