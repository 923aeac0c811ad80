"""Rounding errors of one table's gradients, added to the next ones (error feedback).

Rules:
    - A block that is pushed again in a step starts again from what earlier steps have left: there
      are two numbers an element, and the step's counts once it is sealed.
    - A block that servers apply on arrival counts whatever becomes of the step.
    - Residuals are in the gradients' own unit, the contribution scale of the newest step. A step
      with another scale (mixed precision) converts them.
    - Of a step that servers clip by itself (SSP, ASP), what they did not take in is kept as
      clipped: part of the gradient, and all of what was left before.
    - What servers discard of a sealed step, since it came too late, comes back.
    - In a block that they reject as too stale a step has no part: its gradient is computed anew,
      and what was left before stays, also if later steps were sealed by then. So it is with all
      blocks of a step that fails, as one with a NaN, or beside an edit of another worker; but for
      those that were applied on arrival.
    - A codec may keep other numbers of a block beside them, its start: the step's count once it is
      sealed, too. They have no unit, and nothing of them comes back.

Invariants:
    RES-1  Over all blocks of steps that took part: the sum of scale * gradient = the sum of scale *
           what the servers took in, + the newest scale * the residual, as float32 rounds. Where
           servers clip a step by itself, its scale is times that factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from ps_core.codecs.int8_passes import Floats
from ps_core.errors import InvalidCheckpoint
from ps_core.tables.table import Table


class _Change(NamedTuple):
    """The change that a sealed step made to what is left of a block, and the unit of then."""

    elements: Floats
    unit: float


class Residuals:
    """The residuals of one worker's pushes to one table.

    Args:
        start_counts: of each block, the numbers of its start; they begin as zeros.
    """

    def __init__(self, table: Table, start_counts: Sequence[int]) -> None:
        self._table = table
        self._start_ends = list(itertools.accumulate(start_counts, initial=0))
        self._starts = np.zeros((2, self._start_ends[-1]), np.float32)
        self._values = np.zeros((2, table.spec.element_count), np.float32)
        self._newest = np.zeros(table.block_count, np.uint8)  # which of the two counts
        self._open: set[int] = set()  # blocks pushed in the open step
        self._final: set[int] = set()  # those of them that are applied on arrival
        # Of each block: its newest sealed step that has not ended, whose other number is what was
        # left before; and what older ones have changed, since that number is another step's now.
        self._returnable: dict[int, int] = {}
        self._changes: dict[int, dict[int, _Change]] = {}
        self._unit = 0.0  # 0: no step has been sealed

    def pair(self, block: int, *, is_final: bool = False) -> tuple[Floats, Floats]:
        """The residual of a block that is pushed, and the memory of what this push leaves.

        Args:
            is_final: servers apply it on arrival.

        Shapes: (elements of the block,).
        """
        self._open.add(block)
        if is_final:
            self._final.add(block)
        before, left = self._both(block)
        clock = self._returnable.pop(block, None)
        if clock is not None:
            self._changes.setdefault(clock, {})[block] = _Change(before - left, self._unit)
        return before, left

    def of(self, block: int) -> Floats:
        """The residual of a block as it counts, a view. Shapes: (elements of the block,)."""
        return self._both(block)[0]

    def starts(self, block: int) -> tuple[Floats, Floats]:
        """As `pair`, of the block's start. Shapes: (numbers of it,)."""
        which, part = self._newest[block], self._start_part(block)
        return self._starts[which, part], self._starts[1 - which, part]

    def keep_only(self, blocks: Collection[int]) -> None:
        """The open step's other blocks are withdrawn, if that is still possible."""
        self._open.intersection_update({*blocks, *self._final})

    def seal(
        self, clock: int, scale: float, *, takes_part: bool = True, taken: float = 1.0
    ) -> None:
        """The open step is sealed, with this contribution scale.

        Args:
            taken: the factor that clips it: servers take in so much of each block that is not
                applied on arrival.
        """
        counted = self._open if takes_part else self._final
        if counted or takes_part:
            self._count(counted, scale, taken)
            self._returnable.update(dict.fromkeys(counted, clock))
        self._open.clear()
        self._final.clear()

    def _count(self, blocks: set[int], scale: float, taken: float) -> None:
        ratio = self._unit / scale if self._unit else 1.0
        for block in blocks:
            before, left = self._both(block)
            share = 1.0 if block in self._final else taken
            if share != 1.0:
                left *= np.float32(share)
            if ratio != share:
                left += np.float32(ratio - share) * before
            if ratio != 1.0:
                before *= np.float32(ratio)
            self._newest[block] = 1 - self._newest[block]
        if ratio != 1.0:
            for block in range(self._table.block_count):
                if block not in blocks:
                    self._values[:, self._part(block)] *= np.float32(ratio)
        self._unit = scale

    def give_back(self, block: int, elements: Floats, scale: float) -> None:
        """A block of a sealed step, of that scale, was discarded: its elements come back."""
        self._add(block, np.float32(scale / self._unit) * elements)

    def revise(self, clock: int, block: int, share: float) -> None:
        """Servers take `share` times as much of a block of a sealed step as was counted; it has not
        ended. 0: it has no part in the block, and only what was left before stays.
        """
        if self._returnable.get(block) == clock:
            if not share:
                self._newest[block] = 1 - self._newest[block]  # its start, too
                del self._returnable[block]
                return
            counts, before = self._both(block)
            change = _Change(counts - before, self._unit)
        else:
            found = self._changes.get(clock, {}).get(block)
            if found is None:  # it was withdrawn
                return
            change = found
        self._add(block, np.float32((share - 1.0) * change.unit / self._unit) * change.elements)

    def ended(self, clock: int) -> None:
        """Nothing of a sealed step is revised any more."""
        self._changes.pop(clock, None)
        for block in [block for block, newest in self._returnable.items() if newest == clock]:
            del self._returnable[block]

    def _add(self, block: int, elements: Floats) -> None:
        """Both numbers: an open step has begun with the one, and the other is what it leaves; so it
        is with a step that has not ended.
        """
        if np.isfinite(elements).all():
            self._values[:, self._part(block)] += elements

    # --- in checkpoints

    @property
    def unit(self) -> float:
        """The scale that the residuals are to be multiplied by; 0 before the first step."""
        return self._unit

    def flat(self) -> Floats:
        """A copy of all residuals. Shapes: (elements of the table,)."""
        return self._counted(self._values, self._part)

    def flat_starts(self) -> Floats:
        """A copy of all starts, block by block."""
        return self._counted(self._starts, self._start_part)

    def _counted(self, both: Floats, part_of: Callable[[int], slice]) -> Floats:
        found: Floats = np.empty_like(both[0])
        for block in range(self._table.block_count):
            part = part_of(block)
            found[part] = both[self._newest[block], part]
        return found

    def load(self, flat: Floats, unit: float, starts: Floats | None) -> None:
        """Go on from the residuals of a checkpoint, and from its starts, unless a codec with others
        saved them. Shapes: as of `flat` and `flat_starts`.
        """
        self._check(flat)
        self._newest[:] = 0
        self._values[0] = flat
        self._starts[0] = 0 if starts is None or starts.shape != self._starts[0].shape else starts
        self._open.clear()
        self._final.clear()
        self._returnable.clear()
        self._changes.clear()
        self._unit = unit

    def add(self, flat: Floats, unit: float) -> None:
        """Take over another worker's residuals, of that unit, between two steps. Shapes: as of
        `flat`.
        """
        if not unit:  # it had taken no step
            return
        self._check(flat)
        self._unit = self._unit or unit
        factor = np.float32(unit / self._unit)
        for block in range(self._table.block_count):
            self._add(block, factor * flat[self._part(block)])

    def _check(self, flat: Floats) -> None:
        count = self._table.spec.element_count
        if flat.shape != (count,):
            raise InvalidCheckpoint(
                f"the residuals of table '{self._table.spec.name}' have {flat.shape} elements; "
                f"expected {count}"
            )

    def _both(self, block: int) -> tuple[Floats, Floats]:
        """The number of each element that counts, and the other."""
        which, part = self._newest[block], self._part(block)
        return self._values[which, part], self._values[1 - which, part]

    def _part(self, block: int) -> slice:
        begin = block * self._table.spec.block_elements
        return slice(begin, begin + self._table.block_length(block))

    def _start_part(self, block: int) -> slice:
        return slice(self._start_ends[block], self._start_ends[block + 1])
