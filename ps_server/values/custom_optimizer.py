"""Runs a custom update on the blocks of a table.

The update gets copies and returns new values and state, so that this module, and not every author,
ensures that nothing is half applied.

Rules:
    - Elements of tensors that are absent from an update are not handed over.
    - Elements of several tensors with equal step counts are handed over as one vector. Its length
      is a multiple of 64: zeros follow the last element, and their results are dropped. So no
      element is ever in the tail of a vector, which torch rounds differently.
    - Values must come back finite, unless the table allows others. State may hold infinities, but
      no NaN. A table whose update breaks this, or its contract, has failed.

Invariants:
    CU-1  All blocks of an update change, or none does.
    CU-2  With an update that treats each element by itself, OPT-1 holds
          (`ps_server.values.update_check` tries that).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ps_core.errors import UpdateFailed
from ps_server.values.contributions import Contribution, element_mask, is_finite
from ps_server.values.custom_updates import Broken, CheckedUpdate
from ps_server.values.optimizers import BlockState, padded_length


class _UpdatedElements(NamedTuple):
    """New values of `length` elements of a block, those at `chosen`; padding follows them."""

    chosen: slice | Tensor
    length: int
    values: Tensor
    state: dict[str, Tensor]


class _UpdatedBlock(NamedTuple):
    block: BlockState
    elements: list[_UpdatedElements]
    steps: np.ndarray[Any, np.dtype[np.int64]]


class CustomOptimizer:
    """Runs an update on the blocks of one table, whose name is `table`."""

    def __init__(self, update: CheckedUpdate, table: str, *, allow_non_finite: bool) -> None:
        self._update = update
        self._table = table
        self._allow_non_finite = allow_non_finite

    def apply(
        self,
        clock: int,
        parts: Sequence[tuple[BlockState, Contribution]],
        numbers: Mapping[str, float],
    ) -> None:
        """Run update `clock` on the present tensors of all blocks, or raise UpdateFailed and change
        none (CU-1). Each block has its reduced gradient, which is only read.
        """
        updated = []
        for state, total in parts:
            try:
                updated.append(self._updated(state, total, numbers))
            except Broken as failure:
                raise UpdateFailed(
                    f"table '{self._table}' has failed: its custom update '{self._update.name}' "
                    f"cannot make update {clock} of block {total.block}: {failure}"
                ) from None
        for block in updated:
            self._write(block)

    def _updated(
        self, state: BlockState, total: Contribution, numbers: Mapping[str, float]
    ) -> _UpdatedBlock:
        steps = state.segment_steps()
        here = np.ones(len(steps), dtype=np.bool_) if total.present is None else total.present
        found = []
        for step in np.unique(steps[here]).tolist():
            segments = here & (steps == step)
            chosen: slice | Tensor = slice(state.length)
            if not segments.all():
                chosen = torch.from_numpy(np.flatnonzero(element_mask(state.bounds, segments)))
            values, gradient = padded_copy(state.values[chosen]), padded_copy(total.values[chosen])
            slots = {
                name: padded_copy(state.slots[name][chosen])
                if name in state.slots
                else torch.full_like(values, start)
                for name, start in self._update.slots.items()
            }
            result = self._update.call(values, slots, gradient, numbers, step + 1)
            elements = _UpdatedElements(chosen, state.values[chosen].numel(), *result)
            if not self._allow_non_finite:
                _check_finite(elements)
            found.append(elements)
        steps[here] += 1
        return _UpdatedBlock(state, found, steps)

    def _write(self, updated: _UpdatedBlock) -> None:
        state = updated.block
        for name, start in self._update.slots.items():
            if name not in state.slots:
                state.slots[name] = torch.full_like(state.values, start)
        for elements in updated.elements:
            state.values[elements.chosen] = elements.values[: elements.length]
            for name, tensor in elements.state.items():
                state.slots[name][elements.chosen] = tensor[: elements.length]
        state.set_segment_steps(updated.steps)


def _check_finite(elements: _UpdatedElements) -> None:
    if not is_finite(elements.values[: elements.length]):
        raise Broken("values came back with an infinity or a NaN; expected finite ones")
    for name, tensor in elements.state.items():
        if bool(torch.isnan(tensor[: elements.length]).any()):
            raise Broken(f"state '{name}' came back with a NaN; expected numbers")


def padded_copy(elements: Tensor) -> Tensor:
    """A copy with zeros up to the next multiple of 64 elements."""
    count = elements.numel()
    copy = torch.zeros(padded_length(count), dtype=elements.dtype)
    copy[:count] = elements
    return copy
