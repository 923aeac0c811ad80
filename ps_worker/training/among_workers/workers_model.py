"""The model that the workers of `Aggregate` keep, each its own copy. The copies stay equal only if
all workers do the same to them, and the servers compare that.

    settings of the groups, codec of pulls --------+
    parameters that the script has changed --+     +--> the seal's hyperparameters --> servers
    optimizer state that it has loaded ------+     |
    updates that this worker has lost -------+--> history

Rules:
    - The servers refuse a seal that differs from another of its clock, with an error that names
      both workers.
    - The history is a digest of all changes in their order. A skipped step has no say, so what it
      would have told is compared at the next.
    - Autograd's version of a parameter tells of a change, which costs next to nothing. A change
      that bypasses it (`.data`, numpy) is not seen; one that was undone counts.
    - What a script changes while an update is waited for comes after that update: once a wait was
      given up, the update is of the parameters and the settings of then (`StateLeft`).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ps_core import limits
from ps_core.errors import InvalidConfig
from ps_core.tables.optimizers import DISAGREE, Hyperparameters
from ps_worker.steps.steps import PushTicket
from ps_worker.training.among_workers.state_left import StateLeft, version_of
from ps_worker.training.local_optimizer import local_state
from ps_worker.training.planned_edits import Edited, digest_of, names_of
from ps_worker.training.served_state import DIGEST_BYTES, digest_of_arrays
from ps_worker.training.tables.trained_table import TrainedTable

_NO_SETTINGS = ("params", "param_names")
_OTHERS = "other settings"

_MOST_SETTINGS = limits.MAX_HYPERPARAMETER_COUNT - 3
"""All that a seal has room for, but for `_OTHERS`, the codec of pulls and the history."""

SCHEDULES = (
    "If a schedule steps only where GradScaler did not skip, step it every time: each worker has a "
    "loss scale of its own"
)
"""The most frequent reason of other learning rates, and its remedy."""

_LATE_SCHEDULES = (
    "In a worker that joins others a schedule begins at optimizer.clock: LambdaLR(optimizer, rate, "
    "last_epoch=optimizer.clock - 1), after group.setdefault('initial_lr', group['lr']) for each "
    "group of optimizer.param_groups (TRAINING.md)"
)

_LATE_ROWS = (
    "An Embedding of a worker that joins others, or takes another's place, begins with those of "
    "the table: set its hyperparameters by the number of the step (optimizer.clock)"
)

_GO_BACK = (
    "The step was not taken, and is not if they agree now: start all workers again from a "
    "checkpoint, or call client.restore at each (CONSISTENCY.md)"
)
"""The remedy after workers have disagreed."""

_MOST_NAME_BYTES = limits.MAX_HYPERPARAMETER_NAME_BYTES
_VALUE_BYTES = 6
"""Bytes of a digest that a float64 holds, as a whole number."""


class WorkersModel:
    """This worker's copy of the model, as the others compare it.

    Args:
        rank: the worker's.
        tables: the owner adds them.
        inner: the local optimizer. Changes of its state and of the parameters count from now on.
    """

    def __init__(
        self, rank: int, tables: Sequence[TrainedTable], inner: torch.optim.Optimizer
    ) -> None:
        self._rank = rank
        self._tables = tables
        self._inner = inner
        self._state: object = local_state(inner)  # another object when torch has loaded one
        self._versions: dict[TrainedTable, list[int]] = {}
        self._history = b""
        self._words = ""  # the last change
        self._left: StateLeft | None = None  # when the wait for an update was given up
        self._mark(tables)

    def added(self, tables: Iterable[TrainedTable], load: Callable[[], object]) -> None:
        """The tables of a new group are there, whose values and state `load` loads."""
        self.take_changes()
        load()
        self._state = local_state(self._inner)
        self._mark(tables)

    def take_changes(self) -> None:
        """Add what the script has changed since the last step to the history."""
        if edited := self._edited():
            self._add(f"changes of {names_of(edited)}", digest_of(edited))
            self._mark(edited)
        if (state := local_state(self._inner)) is not self._state:
            self._state = state
            self._add("loaded optimizer state", _digest_of_state(self._inner))

    def step(self, clip_norm: float | None) -> float | None:
        """Take a step of the local optimizer; returns the norm that the gradients were clipped by,
        None without `clip_norm`. One that is not finite makes them NaN.
        """
        left, self._left = self._left, None
        if left is None:
            self.take_changes()  # of another thread's, since the seal
        with contextlib.nullcontext() if left is None else left.in_place():
            norm = None
            if clip_norm is not None:
                norm = float(torch.nn.utils.clip_grad_norm_(self._parameters(), clip_norm))
            self._inner.step()
            self._mark(self._tables)
        return norm

    def left(self, tickets: Iterable[PushTicket], *, is_over: bool) -> None:
        """A wait for the update of a step was given up, or (`is_over`) the step has ended with an
        error. If a seal of that stands, the others take its update, and this copy lacks it from now
        on.
        """
        if not is_over:
            self._left = self._left or StateLeft(self._inner.param_groups, self._parameters())
            return
        self._left = None
        if any(not each.future.done() or each.future.exception() is None for each in tickets):
            self._add(f"an update lost by worker {self._rank}", str(self._rank).encode())

    def hyperparameters(self, group: Mapping[str, Any], table: TrainedTable) -> Hyperparameters:
        """The hyperparameters of a seal of a table, which is of this group."""
        found = settings_of(group)
        if (codec := table.handle.codecs.pull) is not None:
            found[f"pull_codec {codec.value}"] = 1.0
        if self._history:
            name = self._words.encode()[:_MOST_NAME_BYTES].decode(errors="ignore")
            found[name] = _number_of(self._history)
        return tuple(sorted(found.items()))

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self._inner.param_groups:
            yield from group["params"]

    def _edited(self) -> Edited:
        found = {}
        for table, before in self._versions.items():
            now = _versions_of(table)
            if now != before:
                pairs = enumerate(zip(now, before, strict=True))
                found[table] = [index for index, (new, old) in pairs if new != old]
        return found

    def _mark(self, tables: Iterable[TrainedTable]) -> None:
        self._versions.update({table: _versions_of(table) for table in tables})

    def _add(self, words: str, digest: bytes) -> None:
        self._words = words
        self._history = _digest(self._history + digest)


def explained(error: InvalidConfig, *, of_rows: bool = False) -> InvalidConfig:
    """The error with what its reader may do, if workers have sealed a clock with other
    hyperparameters.
    """
    if DISAGREE not in error.message:
        return error
    words = f"expected the same at every worker, changed before the same step. {_GO_BACK}"
    if of_rows:
        words += f". {_LATE_ROWS}"
    elif "lr: " in error.message:
        words += f". {SCHEDULES}. {_LATE_SCHEDULES}"
    return InvalidConfig(f"{error.message}; {words}")


def settings_of(group: Mapping[str, Any]) -> dict[str, float]:
    """The settings of a torch group by name; digests of those that are no numbers."""
    found: dict[str, float] = {}
    others = []
    for name, value in _each_setting(group):
        if len(found) == _MOST_SETTINGS or len(name.encode()) > _MOST_NAME_BYTES:
            others.append(f"{name}={_comparable(value)}")
        else:
            found[name] = _as_number(value)
    if others:
        found[_OTHERS] = _as_number("; ".join(others))
    return found


def _each_setting(group: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name in sorted(group):
        value = group[name]
        if name in _NO_SETTINGS:
            continue
        if isinstance(value, tuple | list):
            yield from ((f"{name}[{i}]", each) for i, each in enumerate(value))
        else:
            yield name, value


def _as_number(value: object) -> float:
    """A setting as a hyperparameter; reads a number from its device."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, int | float):
        number = float(value)
        if math.isfinite(number) and abs(number) <= limits.MAX_HYPERPARAMETER_MAGNITUDE:
            return number
    return _number_of(_digest(str(_comparable(value)).encode()))


def _comparable(value: object) -> object:
    """A setting as workers compare it: its type alone where it has no plain value."""
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return value if is_plain else type(value).__name__


def _versions_of(table: TrainedTable) -> list[int]:
    return [version_of(entry.tensor) for entry in table.layout.placed]


def _digest_of_state(inner: torch.optim.Optimizer) -> bytes:
    parameters = (each for group in inner.param_groups for each in group["params"])
    return digest_of_arrays(
        (str(place), name, value.detach().cpu())
        for place, parameter in enumerate(parameters)
        for name, value in sorted(inner.state.get(parameter, {}).items())
        if type(value) is torch.Tensor and value.layout is torch.strided
    )


def _digest(of: bytes) -> bytes:
    return hashlib.blake2b(of, digest_size=DIGEST_BYTES).digest()


def _number_of(digest: bytes) -> float:
    return float(int.from_bytes(digest[:_VALUE_BYTES], "little"))
