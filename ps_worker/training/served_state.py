"""The servers' optimizer state in torch.optim's own layout: pulled, and loaded.

Rules:
    - A tensor that has taken no step has no entry, as in torch; Adagrad's have one from the start.
    - State is float32 (float64 for float64 parameters), the servers' arithmetic, whatever the dtype
      of the parameters.
    - Loaded state replaces all state of all tables, with the next `step` (SEMANTICS S16): a tensor
      without an entry begins anew.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partialmethod
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch

from ps_core.errors import InvalidConfig, InvalidTensor
from ps_core.tables.elements import Codec
from ps_core.tables.optimizers import MAX_LOADED_STEP_COUNT, STEP_ARRAY, OptimizerKind, array_words
from ps_worker.client.pending import PendingTickets
from ps_worker.training.tables.inspection import is_finite, same_bits

if TYPE_CHECKING:
    from ps_worker.client.client import Client
    from ps_worker.training.tables.trained_table import TrainedTable

Arrays: TypeAlias = dict[str, torch.Tensor]
"""The arrays of one table, by name: each 1-D, all its elements."""

State: TypeAlias = Mapping[int, Mapping[str, Any]]
"""The state in a torch optimizer's `state_dict`, by the place of the parameter among all."""

DIGEST_BYTES = 16
_MOMENTUM = "momentum_buffer"
"""An array that torch makes only with momentum."""


class LoadedState:
    """Loaded optimizer state that the servers do not have yet.

    Attributes:
        arrays: of each table that is awake.
        names: the arrays, in the order in which the servers get them.
        digest: the same at all workers that loaded the same.
    """

    def __init__(self, arrays: Mapping[TrainedTable, Arrays]) -> None:
        self.arrays = arrays
        self.names = tuple(dict.fromkeys(name for own in arrays.values() for name in own))
        self.digest = digest_of_arrays(
            (table.name, name, values)
            for table, own in arrays.items()
            for name, values in own.items()
        )


def digest_of_arrays(arrays: Iterable[tuple[str, str, torch.Tensor]]) -> bytes:
    """The digest of arrays in host memory, each after its table's name and its own."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for table, name, values in arrays:
        for word in (table, name):
            digest.update(len(word).to_bytes(4, "little") + word.encode())
        digest.update(values.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def is_same(arrays: Mapping[TrainedTable, Arrays], others: Mapping[TrainedTable, Arrays]) -> bool:
    """True if `arrays` equal `others`, whose missing arrays are zeros."""
    return all(
        same_bits(values, others[table][name]) if name in others[table] else not values.any()
        for table, own in arrays.items()
        for name, values in own.items()
    )


class ServedState(dict[torch.Tensor, Any]):
    """The `state` of an optimizer whose state the servers have: empty, and read-only. It is true,
    because torch.distributed.checkpoint calls `step` where it is false, to have state made.
    """

    def __init__(self) -> None:
        super().__init__()

    def __bool__(self) -> bool:
        return True

    @contextlib.contextmanager
    def holding(self, entries: Mapping[torch.Tensor, Any]) -> Iterator[None]:
        """Has these entries in the block, for torch's `state_dict`."""
        super().update(entries)
        try:
            yield
        finally:
            super().clear()

    def refuse(self, what: str, *_: object, **__: object) -> NoReturn:
        """InvalidConfig, with what does the same."""
        raise InvalidConfig(
            f"optimizer.state was {what}, and the servers have it; expected state_dict(), which "
            "reads it, and load_state_dict(), which writes it. To begin anew, all workers call "
            "load_state_dict({'state': {}, 'param_groups': "
            "optimizer.state_dict()['param_groups']})"
        )

    __missing__ = partialmethod(refuse, "read or written by parameter")
    __setitem__ = partialmethod(refuse, "written")
    __delitem__ = pop = popitem = partialmethod(refuse, "taken away in part")
    clear = partialmethod(refuse, "cleared")
    setdefault = update = __ior__ = partialmethod(refuse, "written")


# --- from the servers


def pulled_arrays(client: Client, tables: Sequence[TrainedTable]) -> dict[TrainedTable, Arrays]:
    """All state of these tables, at this worker's clock on each.

    Under BSP that is one state of all tables, which does not change before this worker's next step;
    else each array is of the moment of its pull. Blocks until every server has answered.
    """
    found: dict[TrainedTable, Arrays] = {table: {} for table in tables}
    _pull(client, [(table, STEP_ARRAY) for table in tables], found)
    wanted = [
        (table, name)
        for table in tables
        if found[table][STEP_ARRAY].any() or _begins_with_state(table)  # else zeros
        for name in table.handle.spec.optimizer.state_arrays
    ]
    _pull(client, wanted, found)
    return found


def _begins_with_state(table: TrainedTable) -> bool:
    return table.handle.spec.optimizer.kind is OptimizerKind.ADAGRAD


def _pull(
    client: Client, wanted: Sequence[tuple[TrainedTable, str]], found: dict[TrainedTable, Arrays]
) -> None:
    pending = PendingTickets(client)
    for table, name in wanted:
        values = found[table][name] = _zeros(table)
        pending.add(table.start_state_pull(name, values))
    pending.wait()


def torch_state(
    arrays: Mapping[TrainedTable, Arrays], groups: Sequence[Mapping[str, Any]]
) -> dict[torch.Tensor, dict[str, Any]]:
    """The state of each parameter, as in its torch.optim namesake; views of `arrays`."""
    found = {}
    for table, own in arrays.items():
        steps = own[STEP_ARRAY]
        for entry, tensor in zip(table.layout.placed, table.handle.spec.tensors, strict=True):
            count = int(steps[tensor.offset]) if tensor.element_count else 0
            part = slice(tensor.offset, tensor.offset + tensor.element_count)
            shape = tuple(entry.tensor.shape)
            views = {n: own[n][part].view(shape) for n in own if n != STEP_ARRAY}
            state = _tensor_state(table, count, views, groups[table.group])
            if state:
                found[entry.tensor] = state
    return found


def _tensor_state(
    table: TrainedTable, count: int, views: dict[str, torch.Tensor], group: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of a tensor that has taken `count` steps; empty if it has none."""
    optimizer = table.handle.spec.optimizer
    if optimizer.kind is OptimizerKind.SGD:
        return {_MOMENTUM: views[_MOMENTUM]} if count else {}
    if not count and not _begins_with_state(table):
        return {}
    if optimizer.kind is OptimizerKind.RMSPROP and not group["momentum"] > 0:
        views.pop(_MOMENTUM, None)  # loaded state without momentum has none
    is_double = torch.get_default_dtype() is torch.float64  # as torch.optim counts steps
    dtype = torch.float64 if is_double else torch.float32
    return {STEP_ARRAY: torch.tensor(float(count), dtype=dtype), **views}


def _zeros(table: TrainedTable) -> torch.Tensor:
    is_double = table.handle.spec.arithmetic_codec is Codec.FP64
    dtype = torch.float64 if is_double else torch.float32
    return torch.zeros(table.handle.element_count, dtype=dtype)


# --- to the servers


def arrays_of(
    state: State,
    tables: Sequence[TrainedTable],
    groups: Sequence[Mapping[str, Any]],
    *,
    may_be_infinite: bool,
) -> dict[TrainedTable, Arrays]:
    """State in torch's layout, as arrays of the tables that are awake; refuses another optimizer's,
    or of other parameters. `state` has the places of parameters, counted over all groups; `groups`
    are the parameter groups as they will be.
    """
    place_of: dict[torch.Tensor, int] = {}
    for group in groups:
        for parameter in group["params"]:
            place_of.setdefault(parameter, len(place_of))
    found: dict[TrainedTable, Arrays] = {}
    for table in tables:
        own = {
            index: state[place_of[entry.tensor]]
            for index, entry in enumerate(table.layout.placed)
            if state.get(place_of[entry.tensor])
        }
        if table.is_asleep and own:
            raise InvalidConfig(
                f"the optimizer state has an entry for '{table.layout.placed[min(own)].name}', "
                "which is frozen and has no state here; unfreeze it (requires_grad_(True)) and "
                "call zero_grad() before load_state_dict, or drop the entry"
            )
        if not table.is_asleep:
            found[table] = _table_arrays(table, own, groups[table.group], may_be_infinite)
    return found


def _table_arrays(
    table: TrainedTable,
    own: Mapping[int, Mapping[str, Any]],
    group: Mapping[str, Any],
    may_be_infinite: bool,
) -> Arrays:
    """All state of one table; tensors without an entry have their initial state."""
    optimizer = table.handle.spec.optimizer
    arrays: Arrays = {}
    for name in (*optimizer.state_arrays, STEP_ARRAY):
        has_any = any(entry.get(name) is not None for entry in own.values())
        is_without = optimizer.kind is OptimizerKind.SGD or not group.get("momentum")
        if name == _MOMENTUM and is_without and not has_any:
            continue  # the optimizer does not use it
        arrays[name] = _zeros(table)
        if name == "sum":
            arrays[name].fill_(dict(optimizer.merged(()))["initial_accumulator_value"])
    for index, entry in own.items():
        _check_names(table, index, entry, arrays)
        tensor = table.handle.spec.tensors[index]
        for name, values in arrays.items():
            part = values[tensor.offset : tensor.offset + tensor.element_count]
            if name == STEP_ARRAY:
                part.fill_(_count(table, index, entry))
            elif entry.get(name) is not None:
                part.copy_(_checked(table, index, name, entry[name], may_be_infinite))
    return arrays


def _words(table: TrainedTable, index: int) -> str:
    return f"the optimizer state of '{table.layout.placed[index].name}'"


def _check_names(table: TrainedTable, index: int, entry: Mapping[str, Any], arrays: Arrays) -> None:
    optimizer = table.handle.spec.optimizer
    for name in entry:
        if not optimizer.has_array(name) and entry[name] is not None:
            raise InvalidConfig(
                f"{_words(table, index)} has '{name}'; {optimizer.label} has "
                f"{array_words(optimizer)}: the state is another optimizer's, or was made with "
                "another amsgrad or centered"
            )
    if optimizer.kind is OptimizerKind.SGD:  # the first gradient makes its buffer
        return
    for name in arrays:
        if entry.get(name) is None:
            raise InvalidConfig(
                f"{_words(table, index)} has no '{name}', which {optimizer.label} needs: it is "
                "another optimizer's, or was made with other settings"
            )


def _count(table: TrainedTable, index: int, entry: Mapping[str, Any]) -> float:
    """The steps that a tensor has taken; SGD's has taken one once it has momentum."""
    if table.handle.spec.optimizer.kind is OptimizerKind.SGD:
        return float(entry.get(_MOMENTUM) is not None)
    count = float(entry[STEP_ARRAY])
    if not 0 <= count <= MAX_LOADED_STEP_COUNT or count != int(count):
        raise InvalidTensor(
            f"{_words(table, index)} has step {count}; expected a whole number from 0 to "
            f"{MAX_LOADED_STEP_COUNT}"
        )
    return count


def _checked(
    table: TrainedTable, index: int, name: str, values: object, may_be_infinite: bool
) -> torch.Tensor:
    expected = tuple(table.layout.placed[index].tensor.shape)
    if not isinstance(values, torch.Tensor) or tuple(values.shape) != expected:
        shape = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise InvalidTensor(f"{_words(table, index)}: '{name}' is {shape}; expected {expected}")
    if not may_be_infinite and not is_finite(values.detach()):
        raise InvalidTensor(
            f"{_words(table, index)}: '{name}' has an infinity or a NaN; expected finite values "
            "(allow_non_finite=True would take it)"
        )
    return values.detach().reshape(-1)
