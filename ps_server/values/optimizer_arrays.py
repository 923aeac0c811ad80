"""Optimizer state of one block, array by array: read, and loaded, by torch.optim's names.

    exp_avg --laid beside--> exp_avg_sq --laid beside--> step: all in place, at one clock

Rules:
    - State is loaded array by array, a clock for each. An array is laid beside the present state,
      which goes on; `step`, the last, puts all arrays in place. So neither a reader nor a
      checkpoint sees half of a load.
    - Arrays laid beside under the name of one edit are never put in place by another.
    - `step` is an array too: each element has the steps that its tensor has taken. When it is
      loaded, the first element of each tensor in the block counts. Whatever is written there
      becomes a count: by then it is decided, and is the same on every replica.

Invariants:
    STO-6  An array is one that the table's optimizer has.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ps_core.errors import InvalidKeys, check
from ps_core.tables.optimizers import (
    MAX_LOADED_STEP_COUNT,
    STEP_ARRAY,
    VALUES_ARRAY,
    OptimizerSpec,
    array_words,
)
from ps_core.tables.table import Table
from ps_server.values import contributions
from ps_server.values.contributions import Contribution
from ps_server.values.optimizers import BlockState, initial_state_value

_BESIDE = "beside/"
"""The prefix of state that is laid beside; no optimizer of torch has one."""


def check_array(table: Table, name: str) -> None:
    """Raise InvalidKeys if the table's optimizer has no array of that name."""
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
        counts = np.repeat(state.segment_steps(), np.diff(state.bounds))
        return counts.astype(state.values.numpy().dtype).tobytes()
    return _array(state, optimizer, name).numpy()[: state.length].tobytes()


def is_laid_beside(slot: str) -> bool:
    return slot.startswith(_BESIDE)


def _array(state: BlockState, optimizer: OptimizerSpec, name: str) -> Tensor:
    """An array of the block, initial if no update has made it yet."""
    found = state.values if name == VALUES_ARRAY else state.slots.get(name)
    if found is None:
        return torch.full_like(state.values, initial_state_value(optimizer, name))
    return found


def assign_array(
    state: BlockState, optimizer: OptimizerSpec, of: tuple[str, bytes], part: Contribution
) -> None:
    """Lay an edit's array beside what there is, or, of `step`, put in place what lies beside."""
    name, edit = of
    check(optimizer.has_array(name), "STO-6", f"{name} is assigned")
    own = f"{_BESIDE}{edit.hex()}/"
    for slot in [slot for slot in state.slots if is_laid_beside(slot) and not slot.startswith(own)]:
        del state.slots[slot]
    if name == STEP_ARRAY:
        _put_in_place(state, own)
        _assign_steps(state, part)
        return
    beside = state.slots.get(own + name)
    if beside is None:
        beside = state.slots[own + name] = _array(state, optimizer, name).clone()
    contributions.copy_present(part, beside)


def _put_in_place(state: BlockState, own: str) -> None:
    for slot in [slot for slot in state.slots if slot.startswith(own)]:
        laid, name = state.slots.pop(slot), slot.removeprefix(own)
        if name == VALUES_ARRAY:
            state.values.copy_(laid)  # others may read that memory
        else:
            state.slots[name] = laid


def _assign_steps(state: BlockState, part: Contribution) -> None:
    steps = state.segment_steps()
    loaded = part.values.numpy()[state.bounds[:-1]].astype(np.float64)
    counts = np.nan_to_num(np.clip(loaded, 0, MAX_LOADED_STEP_COUNT)).astype(np.int64)
    here = slice(None) if part.present is None else part.present
    steps[here] = counts[here]
    state.set_segment_steps(steps)
