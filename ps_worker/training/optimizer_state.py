"""A worker's own state of a `DistributedOptimizer`, for checkpoints: the hyperparameters of its
groups, which schedules change; with `Aggregate`, `Add` and `Outer` a local optimizer; with
`Aggregate` the parameters, too; with `Outer` what no outer step has pushed; what codecs have left.
The servers have all else (`served_state`).

Rules:
    - A saved group has every key of the namesake's, so that torch's own `load_state_dict` takes it.
    - All groups are checked before one is loaded. torch's switches of implementation (`foreach`,
      `fused`, ...) are loaded and have no effect here.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.manifest import Imported
from ps_core.tables.table_spec import TableSpec
from ps_runtime.observe import logs
from ps_worker.spec.flat_layout import plain_name
from ps_worker.spec.optimizers import ServerOptimizer
from ps_worker.training.module_buffers import OwnBuffers
from ps_worker.training.tables.trained_table import TrainedTable
from ps_worker.training.trained_model import TrainedModel

if TYPE_CHECKING:
    from ps_worker.client.client import Client

_OWN_KEYS = ("params", "param_names")
_DECOUPLED = "decoupled_weight_decay"
"""The key by which torch tells Adam and AdamW apart."""

_ADAMS = {"Adam": False, "AdamW": True}

_SEARCHED_COUNT = 1000
"""Longer lists hold no optimizers: data, say."""

_SHOWN_TENSOR_COUNT = 5


def fill_groups(groups: Sequence[dict[str, Any]], optimizer: ServerOptimizer) -> None:
    """Fill in the keys that groups of the torch.optim namesake have, if there is one."""
    cls = getattr(torch.optim, type(optimizer).__name__, None)
    if cls is None:
        return
    (namesake,) = cls([torch.zeros(1)]).param_groups
    for group in groups:
        for key, value in namesake.items():
            group.setdefault(key, value)


def checked_groups(
    saved: object, groups: Sequence[Mapping[str, Any]], optimizer: ServerOptimizer
) -> list[dict[str, Any]]:
    """The groups of `saved`, with the parameters of `groups`; InvalidConfig if they do not fit."""
    if not isinstance(saved, Sequence) or not all(isinstance(each, Mapping) for each in saved):
        raise InvalidConfig("the state_dict has no 'param_groups'; expected a torch optimizer's")
    if len(saved) != len(groups):
        raise InvalidConfig(
            f"the state_dict has {len(saved)} parameter groups; this optimizer has {len(groups)}"
        )
    found = []
    for number, (theirs, own) in enumerate(zip(saved, groups, strict=True)):
        count = len(theirs.get("params", ()))
        if count != len(own["params"]):
            raise InvalidConfig(
                f"parameter group {number} of the state_dict has {count} parameters; this "
                f"optimizer's has {len(own['params'])}"
            )
        _check_kind(number, theirs, own, optimizer)
        own_values = {key: own[key] for key in (*_OWN_KEYS, "clamp") if key in own}
        new = copy.deepcopy({key: value for key, value in theirs.items() if key not in _OWN_KEYS})
        found.append({**own_values, **new})
    return found


def _check_kind(
    number: int, theirs: Mapping[str, Any], own: Mapping[str, Any], optimizer: ServerOptimizer
) -> None:
    name = type(optimizer).__name__
    optional = {"clamp", "initial_lr", *_OWN_KEYS}
    missing = sorted((optimizer.defaults().keys() & own.keys()) - optional - theirs.keys())
    if missing:
        raise InvalidConfig(
            f"parameter group {number} of the state_dict has no '{missing[0]}', which {name} "
            "needs: it is another optimizer's"
        )
    expected = _ADAMS.get(name)
    if expected is not None and bool(theirs.get(_DECOUPLED, expected)) is not expected:
        other = next(each for each in _ADAMS if each != name)
        raise InvalidConfig(
            f"parameter group {number} of the state_dict is {other}'s; this optimizer is {name}"
        )


def numbered(
    state: Mapping[Any, Any], saved: Sequence[Mapping[str, Any]]
) -> dict[int, Mapping[str, Any]]:
    """State by the place of its parameter among all; `saved` has the number of each parameter."""
    in_order = (number for group in saved for number in group["params"])
    places = {number: place for place, number in enumerate(in_order)}
    found: dict[int, Mapping[str, Any]] = {}
    for number, entry in state.items():
        if number not in places:
            raise InvalidConfig(
                f"the optimizer state has an entry for {number!r}; expected one of the numbers in "
                "its 'param_groups'"
            )
        if not isinstance(entry, Mapping):
            raise InvalidConfig(
                f"the optimizer state of parameter {number} is {type(entry).__name__}; expected a "
                "dict of arrays by name"
            )
        found[places[number]] = entry
    return found


class RestoredHyperparameters:
    """The hyperparameters that a checkpoint has of an optimizer's groups.

    A schedule's constructor writes those that it begins with into the groups. They are put back
    when the schedule's own state is loaded, because torch's schedules do not write them then. From
    the first step on the groups are the script's.
    """

    def __init__(self) -> None:
        self._saved: Sequence[Mapping[str, Any]] = ()
        self._is_checked = False

    def keep(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """These are the checkpoint's."""
        self._saved = [_without_parameters(group) for group in groups]

    def put_back(self, groups: Sequence[dict[str, Any]], state: object) -> None:
        """Write them into the groups, if `state` has an optimizer of these groups."""
        if self._saved and has_optimizer_of(state, groups):
            for group, saved in zip(groups, self._saved, strict=False):
                group.update(copy.deepcopy(dict(saved)))

    def groups_loaded(
        self, before: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """The script has loaded groups. If they differ from those before, they are its own wish;
        else it gave back what it was given, as Accelerate does with every optimizer.
        """
        for one, other, saved in zip(before, groups, self._saved, strict=False):
            if any(not _is_equal(one.get(key), other.get(key)) for key in saved):
                self._saved = ()
                return

    def check(self, groups: Sequence[Mapping[str, Any]], name: str) -> None:
        """Log a warning, at the first call, of what is not as the checkpoint has it."""
        if self._is_checked:
            return
        self._is_checked = True
        pairs = enumerate(zip(groups, self._saved, strict=False))
        others = {number: _differing(*pair) for number, pair in pairs if _differing(*pair)}
        if others:
            number, keys = next(iter(others.items()))
            logs.warning(
                "hyperparameters_not_of_checkpoint",
                optimizer=name,
                groups=len(others),
                first=number,
                now=_words(groups[number], keys),
                checkpoint=_words(self._saved[number], keys),
                remedy="attach_state of a schedule, after it is made; none if meant so",
            )
        self._saved = ()


def has_optimizer_of(state: object, groups: Iterable[Mapping[str, Any]]) -> bool:
    """True if `state` is an optimizer with one of these groups, or has one in its attributes, or in
    those of states, lists, tuples and dicts there.
    """
    wanted = {id(group) for group in groups}
    seen: set[int] = set()
    found: list[Any] = [state]
    while found:
        each = found.pop()
        if id(each) in seen or isinstance(each, nn.Module | torch.Tensor):
            continue
        seen.add(id(each))
        if isinstance(each, torch.optim.Optimizer):
            if not wanted.isdisjoint(map(id, each.param_groups)):
                return True
        elif isinstance(each, list | tuple | dict):
            if len(each) <= _SEARCHED_COUNT:
                found += each.values() if isinstance(each, dict) else each
        elif each is state or hasattr(type(each), "load_state_dict"):
            found += getattr(each, "__dict__", {}).values()
    return False


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key not in _OWN_KEYS})


def _is_equal(one: object, other: object) -> bool:
    return bool(torch.as_tensor(one == other).all())


def _differing(group: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    return [key for key in saved if not _is_equal(group.get(key), saved[key])]


def _words(group: Mapping[str, Any], keys: Iterable[str]) -> str:
    return ", ".join(f"{key} {group.get(key)}" for key in keys)


class _Optimizer(Protocol):
    """A `DistributedOptimizer`, which imports this module."""

    param_groups: list[dict[str, Any]]

    @property
    def has_local_state(self) -> bool: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class OptimizerState:
    """The attached state of a `DistributedOptimizer`, which trains `tables`; with
    `keeps_parameters` it has them, too.
    """

    begins_anew = "To begin them anew, give the optimizer another name="

    def __init__(
        self,
        optimizer: _Optimizer,
        keeps_parameters: bool,
        tables: Iterable[TrainedTable] = (),
    ) -> None:
        self._optimizer = optimizer
        self.keeps_parameters = keeps_parameters
        self._tables = tables
        self._restored = RestoredHyperparameters()
        self._later: Mapping[str, Any] | None = None  # it has groups that are not there yet

    def is_part_of(self, tables: Collection[str]) -> bool:
        """True if its model has one of the tables of these names."""
        return any(table.name in tables for table in self._tables)

    def state_dict(self) -> dict[str, Any]:
        """Hyperparameters by group; the local optimizer's state; the parameters in order."""
        groups = self._optimizer.param_groups
        by_group = [{k: v for k, v in group.items() if k not in _OWN_KEYS} for group in groups]
        found: dict[str, Any] = {"numbers": by_group}
        if self._optimizer.has_local_state:
            found["local"] = self._optimizer.state_dict()["state"]
        if self.keeps_parameters:
            found["parameters"] = [each.detach() for each in self._parameters()]
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; `group_added` loads groups that do not exist yet. After
        an InvalidCheckpoint nothing has changed.
        """
        saved_count, count = len(state["numbers"]), len(self._optimizer.param_groups)
        if saved_count < count:
            raise InvalidCheckpoint(
                f"the checkpoint has {saved_count} parameter groups; this optimizer {count}"
            )
        self._take(state, 0)
        self._restored.keep(state["numbers"])
        if saved_count > count:
            self._later = state
            logs.warning("parameter_groups_missing", checkpoint=saved_count, optimizer=count)

    def goes_on_with(self, state: object) -> None:
        """Take the hyperparameters once more, which a schedule's constructor has changed."""
        self._restored.put_back(self._optimizer.param_groups, state)

    def groups_loaded(self, before: Sequence[Mapping[str, Any]]) -> None:
        """As `RestoredHyperparameters.groups_loaded`."""
        self._restored.groups_loaded(before, self._optimizer.param_groups)

    def check(self, name: str) -> None:
        """As `RestoredHyperparameters.check`."""
        self._restored.check(self._optimizer.param_groups, name)

    def group_added(self) -> None:
        """Load the last group, which is new, if the checkpoint has it."""
        if self._later is not None:
            count = len(self._optimizer.param_groups)
            self._take(self._later, count - 1)
            if count == len(self._later["numbers"]):
                self._later = None

    def _take(self, state: Mapping[str, Any], first: int) -> None:
        """Load the groups from `first` on."""
        groups = self._optimizer.param_groups
        begin = sum(len(group["params"]) for group in groups[:first])
        own = self._parameters()[begin:]
        parameters: list[torch.Tensor] = []
        if self.keeps_parameters:
            parameters = state.get("parameters", [])[begin : begin + len(own)]
            if [tuple(each.shape) for each in parameters] != [tuple(each.shape) for each in own]:
                raise InvalidCheckpoint(
                    f"the checkpoint has {len(parameters)} parameters of other shapes than these "
                    f"{len(own)}"
                )
        for group, saved in zip(groups[first:], state["numbers"][first:], strict=False):
            group.update(saved)
        if self._optimizer.has_local_state and "local" in state:
            now = self._optimizer.state_dict()
            places = range(begin, begin + len(own))
            local = {k: v for k, v in state["local"].items() if k in places}
            self._optimizer.load_state_dict({**now, "state": {**now["state"], **local}})
        with torch.no_grad():
            for parameter, values in zip(own, parameters, strict=False):
                parameter.copy_(values)

    def _parameters(self) -> list[torch.Tensor]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]


class InnerStepsState:
    """The attached state of inner steps since the last outer step, which no server has (`Outer`).

    The values that were pulled last are kept with the parameters: the pseudo-gradient counts from
    them, and under SSP and ASP the servers' go on meanwhile. Only outer steps share buffers.

    Args:
        module: has the model's buffers; None if workers do not share them.
    """

    def __init__(self, model: TrainedModel, module: nn.Module | None) -> None:
        self._model = model
        self._buffers = None if module is None else OwnBuffers(module)
        self._later: dict[str, Any] = {}  # of tables that are not there yet
        self._unmerged: dict[str, torch.Tensor | None] = {}
        self._chosen_at = 0  # the clock that their fragment was chosen for

    def state_dict(self) -> dict[str, Any]:
        """The number of inner steps, the values of each table, and the buffers; or nothing."""
        model, steps = self._model, self._model.inner_steps
        model.end_overlapped()
        if not steps.have_moved:
            return {}
        return {
            "taken": steps.taken,
            "has_kept": steps.has_kept,
            "tables": {t.name: t.local_values() for t in model.tables if not t.is_asleep},
            "unmerged": {t.name: t.moves.unmerged for t in model.tables},
            "chosen_at": model.outer_steps.chosen_at,
            "buffers": {} if self._buffers is None else self._buffers.state_dict(),
            "unmerged_buffers": {n: v for table in model.buffers for n, v in table.arrived.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        if not state:
            return
        steps = self._model.inner_steps
        steps.taken, steps.has_kept = state["taken"], state["has_kept"]
        self._later = dict(state["tables"])
        self._unmerged = dict(state.get("unmerged", {}))
        # Under ASP the tables may begin at another clock than that of this worker's state.
        self._chosen_at = state.get("chosen_at", self._model.clock - 1)
        self.take(self._model.tables)
        if self._buffers is not None:
            self._buffers.load_state_dict(state["buffers"])
        for table in self._model.buffers:
            table.load_arrived(state.get("unmerged_buffers", {}))

    def take(self, tables: Iterable[TrainedTable]) -> None:
        """Load what there is of these tables."""
        for table in tables:
            if table.name in self._later:
                table.load_local(*self._later.pop(table.name))
            if (measured := self._unmerged.pop(table.name, None)) is not None:
                self._model.outer_steps.choose(self._chosen_at)
                table.moves.load_unmerged(measured)


def keep_residuals(client: Client, model: TrainedModel, table: TrainedTable) -> None:
    """Have checkpoints keep what the table's codec leaves for later steps; what an outer step that
    is on its way leaves is known at its end.
    """
    checkpoints, residuals = client.checkpoints, table.handle.steps.residuals
    name, ranks = f"residuals/{table.name}", model.group.pushes_for
    if residuals is not None:
        if model.outer is not None:
            residuals.await_ends = model.end_overlapped
        checkpoints.attach_for(ranks, name, residuals)
    elif dropped := checkpoints.saved_for(ranks, name):
        logs.warning(
            "residuals_dropped",
            table=table.name,
            ranks=",".join(map(str, dropped)),
            remedy="push_codec int8, sign, topk, randomk or lowrank",
        )


def check_imported(
    imported: Imported, name: str, module: nn.Module, of_rows: Iterable[TableSpec]
) -> None:
    """Refuse an import with tensors that the model does not have; `name` is the optimizer's. Tied
    parameters count under each of their names, as in `module.state_dict()`; parameters of the
    module that another optimizer trains count as well.
    """
    if not imported.is_for(f"{name}/"):
        return
    known = [plain_name(key) for key in module.state_dict()]
    for spec in of_rows:
        if imported.is_for(spec.name):
            known += filter(None, imported.rows_of(spec))
    unknown = list(imported.unknown(known))
    if unknown:
        shown = ", ".join(f"'{tensor}'" for tensor in unknown[:_SHOWN_TENSOR_COUNT])
        other_count = len(unknown) - _SHOWN_TENSOR_COUNT
        more = f" and {other_count} others" if other_count > 0 else ""
        raise InvalidCheckpoint(
            f"{imported.url} has {shown}{more}, which model '{name}' does not have; expected the "
            "state dict of this model, or one that was imported with --prefix for another"
        )
