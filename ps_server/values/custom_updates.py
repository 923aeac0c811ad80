"""Custom updates: their contract, how one that was found is held to it, and its run on blocks.

An update is a function of the values, state, gradient and hyperparameters of some elements. It gets
tensors of its own, on which it may work in place, and returns new values and state. So this file,
and not every author, ensures that nothing is half applied.

Rules:
    - An update that raises, or returns other shapes, dtypes or state than its contract says, is
      `Broken`.
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

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ps_core.errors import InvalidConfig, PushpullError, UpdateFailed
from ps_core.tables.optimizers import Hyperparameters
from ps_core.update_offer import UpdateOffer
from ps_server.values.contributions import Contribution, element_mask, is_finite
from ps_server.values.optimizers import BlockState, padded_length

_TEXT_CHARACTERS = 300
"""Most characters of an exception's text in a message."""


class CustomUpdate(Protocol):
    """The contract of an entry point of the group ``pushpull.updates``: an object with these
    members, or a class that makes one when it is called without arguments.

    Attributes:
        hyperparameters: their names and defaults; at most 32.
        slots: the names of its state, one value for each element, and what each starts with.
    """

    hyperparameters: Mapping[str, float]
    slots: Mapping[str, float]

    def update(
        self,
        values: Tensor,
        state: Mapping[str, Tensor],
        gradient: Tensor,
        numbers: Mapping[str, float],
        step: int,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the new values and state.

        The same arguments give the same bits, always; each element's result depends on that element
        alone.

        Args:
            values: the parameters.
            state: by the names of `slots`.
            gradient: the reduced gradient.
            numbers: by the names of `hyperparameters`.
            step: how many updates these elements have had, this one included; from 1.

        Shapes:
            values, gradient, state: flat, of one length and dtype (float32, or float64 for float64
                tables); contiguous, on the CPU. They are the function's own, to change and to give
                back.
            returns: the new values and the new state, like those.
        """
        ...


class Broken(Exception):
    """The update raised, or returned something wrong. The message holds no place in the code."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckedUpdate:
    """An update that satisfies the contract."""

    name: str
    defaults: Hyperparameters
    slots: Mapping[str, float]
    function: Callable[..., Any]

    def call(
        self,
        values: Tensor,
        state: Mapping[str, Tensor],
        gradient: Tensor,
        numbers: Mapping[str, float],
        step: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Call the update on tensors of its own, and check its result; Broken says what it did."""
        like = values.shape, values.dtype
        try:
            with torch.no_grad():
                result = self.function(values, dict(state), gradient, dict(numbers), step)
        except (Exception, SystemExit) as failure:  # noqa: BLE001 - whatever a stranger's code does
            raise Broken(f"it raised {described(failure)}") from None
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
            raise Broken(f"it returned {_kind(result)}; expected values and a mapping of state")
        new_state = dict(result[1])
        if new_state.keys() != self.slots.keys():
            raise Broken(
                f"it returned state {_listed(new_state)}; expected {_listed(self.slots)}, as its "
                f"slots say"
            )
        _check_tensor("values", result[0], like)
        for name, tensor in new_state.items():
            _check_tensor(f"state '{name}'", tensor, like)
        return result[0], new_state


def checked(name: str, named: object) -> CheckedUpdate:
    """The object of an entry point as an update; InvalidConfig says what it lacks."""
    what = f"custom update '{name}'"
    try:
        made = named() if isinstance(named, type) else named
    except (Exception, SystemExit) as failure:  # noqa: BLE001 - as above
        raise InvalidConfig(
            f"{what} cannot be made without arguments: {described(failure)}"
        ) from None
    function = getattr(made, "update", None)
    if not callable(function):
        raise InvalidConfig(f"{what} is a {type(made).__name__} without a method 'update'")
    defaults = tuple(sorted(_numbers(what, made, "hyperparameters").items()))
    UpdateOffer(name, defaults, "unknown").validated()
    slots = _numbers(what, made, "slots")
    for slot, start in slots.items():
        if math.isnan(start):
            raise InvalidConfig(f"{what}: slot '{slot}' starts with a NaN; expected a number")
    return CheckedUpdate(name, defaults, slots, function)


def _numbers(what: str, made: object, member: str) -> dict[str, float]:
    found = getattr(made, member, None)
    if (
        not isinstance(found, Mapping)
        or not all(isinstance(name, str) for name in found)
        or any(isinstance(v, bool) or not isinstance(v, int | float) for v in found.values())
    ):
        raise InvalidConfig(
            f"{what}: {member} is {_kind(found)}; expected a mapping of names to numbers"
        )
    return {name: float(value) for name, value in found.items()}


def described(failure: BaseException) -> str:
    """A user's exception as text, with the line that raised it."""
    frames = traceback.extract_tb(failure.__traceback__)
    place = ""
    if frames:
        place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})"
    text = failure.message if isinstance(failure, PushpullError) else str(failure)
    return f"{type(failure).__name__}: {text[:_TEXT_CHARACTERS]}{place}"


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(each).__name__ for each in value) or 'nothing'}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(map(str, names))) or "of no name"


def _check_tensor(what: str, tensor: object, like: tuple[torch.Size, torch.dtype]) -> None:
    if not isinstance(tensor, Tensor):
        raise Broken(f"{what} came back as {_kind(tensor)}; expected a tensor")
    if (tensor.shape, tensor.dtype) != like or tensor.device.type != "cpu":
        raise Broken(
            f"{what} came back with shape {tuple(tensor.shape)} and dtype {tensor.dtype} on "
            f"{tensor.device}; expected {tuple(like[0])} and {like[1]} on cpu"
        )


# --- the run


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
