"""What a `DistributedOptimizer` has of its own at a worker, for checkpoints.

The servers have the parameters and their optimizers' state. A worker has the numbers of its groups,
which schedules change; with `Aggregate` and `Add` a local optimizer; with `Aggregate` the
parameters, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ps_core.errors import InvalidCheckpoint
from ps_runtime.observe import logs

_NO_NUMBERS = ("params", "param_names")


class _Optimizer(Protocol):
    """A `DistributedOptimizer`, of which this is known."""

    param_groups: list[dict[str, Any]]

    @property
    def has_local_state(self) -> bool: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class OptimizerState:
    """The state of one.

    Args:
        optimizer: whose.
        keeps_parameters: whether the parameters belong to it.
    """

    def __init__(self, optimizer: _Optimizer, keeps_parameters: bool) -> None:
        self._optimizer = optimizer
        self._keeps_parameters = keeps_parameters
        self._later: Mapping[str, Any] | None = None  # it has groups that are not there yet

    def state_dict(self) -> dict[str, Any]:
        """Numbers by group; the local optimizer's state; the parameters in order."""
        groups = self._optimizer.param_groups
        numbers = [{k: v for k, v in group.items() if k not in _NO_NUMBERS} for group in groups]
        found: dict[str, Any] = {"numbers": numbers}
        if self._optimizer.has_local_state:
            found["local"] = self._optimizer.state_dict()["state"]
        if self._keeps_parameters:
            found["parameters"] = [each.detach() for each in self._parameters()]
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave. What it has of groups that are not there yet is for
        `group_added`.

        Raises:
            InvalidCheckpoint: it is of an optimizer with fewer groups or other parameters; nothing
                has changed.
        """
        saved_count, count = len(state["numbers"]), len(self._optimizer.param_groups)
        if saved_count < count:
            raise InvalidCheckpoint(
                f"the checkpoint has {saved_count} parameter groups; this optimizer {count}"
            )
        self._take(state, 0)
        if saved_count > count:
            self._later = state
            logs.warning("parameter_groups_missing", checkpoint=saved_count, optimizer=count)

    def group_added(self) -> None:
        """There is another group, the last: it goes on as it was in the checkpoint, if that has it.

        Raises:
            InvalidCheckpoint: its parameters were others.
        """
        if self._later is not None:
            count = len(self._optimizer.param_groups)
            self._take(self._later, count - 1)
            if count == len(self._later["numbers"]):
                self._later = None

    def _take(self, state: Mapping[str, Any], first: int) -> None:
        """Take over what `state` has of the groups from `first` on."""
        groups = self._optimizer.param_groups
        begin = sum(len(group["params"]) for group in groups[:first])
        own = self._parameters()[begin:]
        parameters: list[torch.Tensor] = []
        if self._keeps_parameters:
            parameters = state.get("parameters", [])[begin : begin + len(own)]
            self._check_shapes(own, parameters)
        for group, saved in zip(groups[first:], state["numbers"][first:], strict=False):
            group.update(saved)
        if self._optimizer.has_local_state and "local" in state:
            now = self._optimizer.state_dict()
            numbers = range(begin, begin + len(own))
            local = {k: v for k, v in state["local"].items() if k in numbers}
            self._optimizer.load_state_dict({**now, "state": {**now["state"], **local}})
        with torch.no_grad():
            for parameter, values in zip(own, parameters, strict=False):
                parameter.copy_(values)

    def _check_shapes(self, own: list[torch.Tensor], saved: list[torch.Tensor]) -> None:
        if [tuple(each.shape) for each in saved] != [tuple(each.shape) for each in own]:
            raise InvalidCheckpoint(
                f"the checkpoint has {len(saved)} parameters of other shapes than these {len(own)}"
            )

    def _parameters(self) -> list[torch.Tensor]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]
