"""A copy of a store's lasting state, for a server that joins its range (SEMANTICS S9).

What is volatile is not in it: sums in the making, whose steps their workers send again, and what
delay compensation remembers for readers.

Invariants:
    COPY-1  A store that was restored from a copy goes on bit for bit as the one that was copied.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ps_core import limits
from ps_core.errors import InvalidTensor
from ps_server.values.mutations import SentAccumulator
from ps_server.values.optimizer_arrays import is_laid_beside
from ps_server.values.optimizers import BlockState

_MAX_STEP_COUNT = 2**53
"""A step count that is broken: a float64 would lose steps there, and no training gets so far."""


class BlockCopy(NamedTuple):
    """A copy of a block.

    Shapes:
        steps: as `BlockState.step_counts`.
        values: little-endian, in the dtype of the table's arithmetic, with the padding.
        slots: (name, as values).
    """

    block: int
    version: int
    steps: tuple[int, ...]
    values: bytes | memoryview
    slots: tuple[tuple[str, bytes | memoryview], ...]


class SumCopy(NamedTuple):
    """A copy of a sum that waits for its scale, or that an AGGREGATE table is pulled as."""

    clock: int
    waits: bool
    accumulator: SentAccumulator


class StoreCopy(NamedTuple):
    """A copy of one table's blocks in one range."""

    blocks: tuple[BlockCopy, ...]
    sums: tuple[SumCopy, ...]


def copy_of_block(block: int, version: int, state: BlockState) -> BlockCopy:
    slots = tuple((name, slot.numpy().tobytes()) for name, slot in sorted(state.slots.items()))
    return BlockCopy(block, version, state.step_counts, state.values.numpy().tobytes(), slots)


def check_block(what: str, copy: BlockCopy, state: BlockState) -> None:
    """Check that the copy is of this block.

    Raises:
        InvalidTensor: a length is wrong, a name comes twice, or steps are no steps.
    """
    expected = state.values.nbytes
    for name, payload in (("values", copy.values), *copy.slots):
        if len(payload) != expected:
            raise InvalidTensor(f"{what}: {name} has {len(payload)} bytes; expected {expected}")
    names = [name for name, _ in copy.slots]
    if len(set(names)) != len(names):
        raise InvalidTensor(f"{what} has state {', '.join(names)}; expected each once")
    is_count = len(copy.steps) in (1, state.segment_count)
    if not is_count or not all(0 <= steps < _MAX_STEP_COUNT for steps in copy.steps):
        raise InvalidTensor(
            f"{what} has {len(copy.steps)} counts of steps, the first {copy.steps[:3]}; expected 1 "
            f"or {state.segment_count}, from 0"
        )


def restore_block(copy: BlockCopy, state: BlockState) -> None:
    """Restore the block from the copy, in its own memory."""
    _overwrite(state.values, copy.values)
    state.slots = {
        name: _overwrite(state.slots.get(name, torch.empty_like(state.values)), payload)
        for name, payload in copy.slots
    }
    state.set_segment_steps(copy.steps)


def _overwrite(target: Tensor, payload: bytes | memoryview) -> Tensor:
    target.numpy().view(np.uint8)[:] = np.frombuffer(payload, np.uint8)
    return target


IDS = "ids"
"""The name of a partition's ids beside the values and the optimizer state."""


CANDIDATES = "candidate_ids"
"""The name of the ids of its candidates."""


class RowSpan(NamedTuple):
    """The place of some rows, or candidates, from `begin` on, among all `total` of a partition."""

    begin: int
    total: int


class SavedBlock(NamedTuple):
    """A block as a checkpoint has it, or some rows of a partition.

    Shapes:
        steps: as in `BlockCopy`.
        tensors: (name, little-endian elements without the padding), the values first.
    """

    block: int
    version: int
    steps: tuple[int, ...]
    tensors: tuple[tuple[str, memoryview], ...]
    rows: RowSpan | None = None

    @property
    def byte_count(self) -> int:
        return sum(payload.nbytes for _, payload in self.tensors)

    def place_of(self, payload: memoryview) -> tuple[int, int] | None:
        """The beginning of a tensor's payload in the tensor of all rows, and the bytes of that one;
        None if it is all of it.
        """
        if self.rows is None:
            return None
        named = dict(self.tensors)
        count = len(named[IDS if IDS in named else CANDIDATES]) // limits.ROW_ID_BYTES
        if count == self.rows.total:
            return None
        row_bytes = payload.nbytes // count
        return self.rows.begin * row_bytes, self.rows.total * row_bytes

    def copied_to(self, buffer: memoryview) -> SavedBlock:
        """A copy that shares nothing with the block, in `buffer`: `byte_count` writable bytes."""
        tensors = []
        for name, payload in self.tensors:
            target, buffer = buffer[: payload.nbytes], buffer[payload.nbytes :]
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(payload, np.uint8))
            tensors.append((name, target))
        return self._replace(tensors=tuple(tensors))


VALUES = "values"
"""The checkpoint's tensor for a block's values; the others are its optimizer's."""

_ESCAPES = (("%", "%25"), ("/", "%2F"))
_ESCAPED_VALUES = "%76alues"


def tensor_of(slot: str) -> str:
    """The checkpoint's name of an optimizer state: escaped, so that no name of a custom update has
    a slash or equals that of the values.
    """
    for sign, escape in _ESCAPES:
        slot = slot.replace(sign, escape)
    return _ESCAPED_VALUES if slot == VALUES else slot


def slot_of(tensor: str) -> str:
    """The inverse of `tensor_of`."""
    if tensor == _ESCAPED_VALUES:
        return VALUES
    for sign, escape in reversed(_ESCAPES):
        tensor = tensor.replace(escape, sign)
    return tensor


def saved_block(block: int, version: int, state: BlockState) -> SavedBlock:
    """A view of the block for a checkpoint."""
    slots = state.slots.items()
    named = sorted((tensor_of(slot), tensor) for slot, tensor in slots if not is_laid_beside(slot))
    tensors = [(name, _elements(each, state)) for name, each in ((VALUES, state.values), *named)]
    return SavedBlock(block, version, state.step_counts, tuple(tensors))


def buffer_for(name: str, state: BlockState) -> memoryview:
    """The memory of a tensor of the block, to write to; made if it is missing."""
    if name == VALUES:
        return _elements(state.values, state)
    slot = slot_of(name)
    if slot not in state.slots:
        state.slots[slot] = torch.zeros_like(state.values)
    return _elements(state.slots[slot], state)


def _elements(tensor: Tensor, state: BlockState) -> memoryview:
    return tensor.numpy()[: state.length].data.cast("B")
