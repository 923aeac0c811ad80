"""What a `DistributedOptimizer` has of its own at a worker, for checkpoints.

The servers have the parameters and their optimizers' state. A worker has the numbers of its groups,
which schedules change; with `Aggregate` and `Add` a local optimizer; with `Aggregate` the
parameters, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ps_core.errors import InvalidCheckpoint

if TYPE_CHECKING:
    from ps_worker.distributed_optimizer import DistributedOptimizer

_NO_NUMBERS = ("params", "param_names")


class OptimizerState:
    """The state of one.

    Args:
        optimizer: whose.
        keeps_parameters: whether the parameters belong to it.
    """

    def __init__(self, optimizer: DistributedOptimizer, keeps_parameters: bool) -> None:
        self._optimizer = optimizer
        self._keeps_parameters = keeps_parameters

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
        """Takes over what `state_dict` gave.

        Raises:
            InvalidCheckpoint: it is of an optimizer with other groups or parameters; nothing has
                changed.
        """
        numbers, groups = state["numbers"], self._optimizer.param_groups
        if len(numbers) != len(groups):
            raise InvalidCheckpoint(
                f"the checkpoint has {len(numbers)} parameter groups; this optimizer {len(groups)}"
            )
        parameters = state.get("parameters", []) if self._keeps_parameters else []
        if self._keeps_parameters:
            self._check_shapes(parameters)
        for group, saved in zip(groups, numbers, strict=True):
            group.update(saved)
        if self._optimizer.has_local_state and "local" in state:
            own = self._optimizer.state_dict()
            self._optimizer.load_state_dict({**own, "state": state["local"]})
        with torch.no_grad():
            for parameter, values in zip(self._parameters(), parameters, strict=False):
                parameter.copy_(values)

    def _check_shapes(self, saved: list[torch.Tensor]) -> None:
        parameters = self._parameters()
        shapes = [tuple(each.shape) for each in parameters]
        if [tuple(each.shape) for each in saved] != shapes:
            raise InvalidCheckpoint(
                f"the checkpoint has {len(saved)} parameters of other shapes than these "
                f"{len(parameters)}"
            )

    def _parameters(self) -> list[torch.Tensor]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]
