"""A worker's own torch optimizer, for `Aggregate`, `Add` and `Outer`."""

from __future__ import annotations

import copy
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch

from ps_core.errors import InvalidConfig
from ps_worker.spec.optimizers import NAMESAKES, Add, Aggregate, Outer, ServerOptimizer


def outer_of(optimizer: ServerOptimizer, inner_steps: int) -> Outer:
    """`Outer` with the namesake of `optimizer` in torch.optim, for the setting `outer_steps`;
    InvalidConfig if it has none, or a clamp.
    """
    name = type(optimizer).__name__
    if name not in NAMESAKES:
        raise InvalidConfig(
            f"outer_steps is {inner_steps}, and the optimizer is {name}; expected one of "
            f"{', '.join(NAMESAKES)}, whose namesake in torch.optim takes the inner steps"
        )
    settings = optimizer.defaults()
    if "clamp" in settings:
        raise InvalidConfig(
            f"outer_steps is {inner_steps}, and {name} has clamp={settings['clamp']}, which "
            "torch.optim does not have; expected none"
        )
    return Outer(partial(getattr(torch.optim, name), **settings), inner_steps)


def inner_optimizer(
    optimizer: Aggregate | Add | Outer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """The factory's torch optimizer for these groups; InvalidConfig if it makes none."""
    kind = type(optimizer).__name__
    if optimizer.factory is None:
        raise InvalidConfig(f"{kind} has no factory; expected one that makes a torch optimizer")
    if not callable(optimizer.factory):
        raise InvalidConfig(
            f"{kind}'s factory is {type(optimizer.factory).__name__}; expected a function that "
            "makes a torch optimizer of parameter groups, such as "
            "functools.partial(torch.optim.SGD, lr=0.1)"
        )
    inner = optimizer.factory(groups)
    if not isinstance(inner, torch.optim.Optimizer) or isinstance(inner, torch.optim.LBFGS):
        raise InvalidConfig(
            f"{kind}'s factory made a {type(inner).__name__}; expected a torch optimizer that "
            "uses one gradient a step"
        )
    return inner


class StateBefore:
    """A copy of an optimizer's state before a step that may have to be repeated in part."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {tensor: copy.deepcopy(state) for tensor, state in optimizer.state.items()}

    def step_again(self, tensors: AbstractSet[torch.Tensor]) -> None:
        """Repeat the step for these tensors alone, from the copied state."""
        state = self._optimizer.state
        for tensor in tensors:
            state.pop(tensor, None)
            if tensor in self._state:
                state[tensor] = copy.deepcopy(self._state[tensor])
        others = [
            (tensor, tensor.grad)
            for group in self._optimizer.param_groups
            for tensor in group["params"]
            if tensor not in tensors
        ]
        try:
            for tensor, _ in others:
                tensor.grad = None
            self._optimizer.step()
        finally:
            for tensor, gradient in others:
                tensor.grad = gradient
