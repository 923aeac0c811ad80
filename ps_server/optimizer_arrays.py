"""Optimizer state of one block, array by array: read, and replaced, by torch.optim's names.

Rules:
    - What no update has made yet reads as it would begin, and is made when it is replaced.
    - `step` is an array too: each element has the steps that its tensor has taken. When it is
      replaced, the first element of each tensor in the block counts. Whatever is written there
      becomes a count: by then it is decided, and is the same on every replica.
    - Absent tensors keep what they have.

Invariants:
    STO-6  An array is one that the table's optimizer has.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ps_core.errors import InvalidKeys, check
from ps_core.tables import MAX_LOADED_STEP_COUNT, STEP_ARRAY, OptimizerSpec, Table, array_words
from ps_server import contributions
from ps_server.contributions import Contribution
from ps_server.optimizers import BlockState, initial_state_value


def check_array(table: Table, name: str) -> None:
    """Refuse an array that the table's optimizer does not have.

    Raises:
        InvalidKeys: it has none of that name.
    """
    optimizer = table.spec.optimizer
    if not optimizer.has_array(name):
        raise InvalidKeys(
            f"table '{table.spec.name}' has no optimizer state '{name[:64]}'; it has "
            f"{array_words(optimizer)}"
        )


def read_array(state: BlockState, optimizer: OptimizerSpec, name: str) -> bytes:
    """The block's elements of an array, in the dtype of its values."""
    check(optimizer.has_array(name), "STO-6", f"{name} is read")
    if name == STEP_ARRAY:
        steps = np.broadcast_to(np.int64(state.steps), state.segment_count)
        counts = np.repeat(steps, np.diff(state.bounds))
        return counts.astype(state.values.numpy().dtype).tobytes()
    slot = state.slots.get(name)
    if slot is None:
        slot = torch.full_like(state.values, initial_state_value(optimizer, name))
    return slot.numpy()[: state.length].tobytes()


def assign_array(
    state: BlockState, optimizer: OptimizerSpec, name: str, part: Contribution
) -> None:
    """Replace the present tensors of an array."""
    check(optimizer.has_array(name), "STO-6", f"{name} is assigned")
    if name == STEP_ARRAY:
        _assign_steps(state, part)
        return
    slot = state.slots.get(name)
    if slot is None:
        fill = initial_state_value(optimizer, name)
        slot = state.slots[name] = torch.full_like(state.values, fill)
    contributions.copy_present(part, slot)


def _assign_steps(state: BlockState, part: Contribution) -> None:
    steps = np.broadcast_to(np.int64(state.steps), state.segment_count).copy()
    said = np.clip(_numbers(part.values)[state.bounds[:-1]], 0, MAX_LOADED_STEP_COUNT)
    counts = np.nan_to_num(said).astype(np.int64)
    here = slice(None) if part.present is None else part.present
    steps[here] = counts[here]
    state.steps = int(steps[0]) if (steps == steps[0]).all() else steps


def _numbers(values: Tensor) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return values.numpy().astype(np.float64)
