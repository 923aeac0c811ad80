"""A module may be an update as it is: it has the members."""

from __future__ import annotations

from typing import Any

from torch import Tensor

hyperparameters = {"lr": 0.1}
slots: dict[str, float] = {}


def update(values: Tensor, state: Any, gradient: Tensor, numbers: Any, step: int) -> Any:
    return values.sub_(gradient, alpha=numbers["lr"]), state
