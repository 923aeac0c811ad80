"""Updates as users write them: good ones, and one for each way to be wrong."""

# ruff: noqa: ARG002, ARG005 - what an update is called with is the contract's to say

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

State = Mapping[str, Tensor]
Numbers = Mapping[str, float]
Result = tuple[Tensor, State]
Then = Callable[[Tensor, dict[str, Tensor]], Any]


class Lion:
    """Chen et al., Symbolic Discovery of Optimization Algorithms, 2023."""

    hyperparameters: ClassVar = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}
    slots: ClassVar = {"momentum": 0.0}

    def update(
        self,
        values: Tensor,
        state: State,
        gradient: Tensor,
        numbers: Mapping[str, float],
        step: int,
    ) -> Result:
        momentum, beta1, beta2 = state["momentum"], numbers["beta1"], numbers["beta2"]
        direction = momentum.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
        values.mul_(1 - numbers["lr"] * numbers["weight_decay"]).add_(
            direction, alpha=-numbers["lr"]
        )
        return values, {"momentum": momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)}


class Decaying:
    """Plain steps that get shorter: an element must know how many it has had."""

    hyperparameters: ClassVar = {"lr": 1.0}
    slots: ClassVar[dict[str, float]] = {}

    def update(
        self,
        values: Tensor,
        state: State,
        gradient: Tensor,
        numbers: Mapping[str, float],
        step: int,
    ) -> Result:
        return values.sub_(gradient * numbers["lr"] / step), {}


class Counting:
    """As `Decaying`, by a state of its own, which starts with 1."""

    hyperparameters: ClassVar = {"lr": 1.0}
    slots: ClassVar = {"count": 1.0}

    def update(
        self,
        values: Tensor,
        state: State,
        gradient: Tensor,
        numbers: Mapping[str, float],
        step: int,
    ) -> Result:
        values.addcdiv_(gradient, state["count"], value=-numbers["lr"])
        return values, {"count": state["count"] + 1.0}


class Given:
    """Does what it is told, once it has worked in place on all that it was handed."""

    hyperparameters: ClassVar = {"lr": 1.0, "until": 1.0}
    slots: ClassVar = {"m": 0.5}

    def __init__(
        self, then: Callable[[Tensor, dict[str, Tensor]], Any], from_step: int = 1
    ) -> None:
        self.then = then
        self.from_step = from_step

    def update(
        self,
        values: Tensor,
        state: State,
        gradient: Tensor,
        numbers: Mapping[str, float],
        step: int,
    ) -> Any:
        state["m"].add_(gradient)
        values.sub_(gradient)
        gradient.zero_()
        if step < self.from_step:
            return values, state
        return self.then(values, dict(state))


def raising(values: Tensor, state: State) -> Any:
    raise ArithmeticError("the moon is full")


def exiting(values: Tensor, state: State) -> Any:
    raise SystemExit(3)


BREACHES: dict[str, tuple[Then, str]] = {
    "raises": (raising, r"raised ArithmeticError: the moon is full \(sample_updates.py:\d+\)"),
    "exits": (exiting, "raised SystemExit: 3"),
    "gives nothing": (lambda v, s: None, "returned nothing; expected values and a mapping"),
    "gives no state": (lambda v, s: v, "returned a Tensor; expected values and a mapping"),
    "gives a list": (lambda v, s: (v, [s]), "returned a tuple of Tensor, list"),
    "loses state": (lambda v, s: (v, {}), "returned state of no name; expected m"),
    "invents state": (lambda v, s: (v, {**s, "n": v}), "returned state m, n; expected m"),
    "no tensor": (lambda v, s: (v.numpy(), s), "values came back as a ndarray"),
    "shorter": (lambda v, s: (v[1:], s), r"values came back with shape \(\d+,\) and dtype"),
    "two dimensions": (lambda v, s: (v.view(1, -1), s), r"values came back with shape \(1, \d+\)"),
    "resized in place": (lambda v, s: (v.resize_(3), s), r"values came back with shape \(3,\)"),
    "state shorter": (
        lambda v, s: (v, {"m": s["m"][:3]}),
        r"state 'm' came back with shape \(3,\)",
    ),
    "another dtype": (lambda v, s: (v.double(), s), "and dtype torch.float64"),
    "state of ints": (lambda v, s: (v, {"m": s["m"].int()}), "state 'm' came back .* torch.int32"),
    "another device": (lambda v, s: (v.to("meta"), s), "on meta; expected .* on cpu"),
    "infinity": (lambda v, s: (v / 0.0, s), "values came back with an infinity or a NaN"),
    "one NaN": (lambda v, s: (_spoilt(v), s), "values came back with an infinity or a NaN"),
    "NaN in state": (lambda v, s: (v, {"m": _spoilt(s["m"])}), "state 'm' came back with a NaN"),
}
"""What an update does, and the words that say so."""


def _spoilt(tensor: Tensor) -> Tensor:
    tensor[0] = torch.nan
    return tensor
