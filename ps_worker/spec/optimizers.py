"""Optimizers that run on the servers, with the names and hyperparameters of torch.optim.

The fields of each are the keys of a `torch.optim` parameter group, so torch's learning-rate
schedulers find the names that they look for.

Rules:
    - Fields, defaults and bounds are those of the `torch.optim` namesake, and `clamp`, which torch
      leaves to the script. `Custom` has none: the servers have its hyperparameters.
    - `hyperparameters` gives those that travel with each step; the switches (`nesterov`, `amsgrad`,
      `centered`, `maximize`) and `initial_accumulator_value` are fixed when the table is created.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, SupportsFloat, TypeAlias

from ps_core import limits
from ps_core.errors import InvalidConfig
from ps_core.tables.optimizers import (
    CLAMP_NAMES,
    HYPERPARAMETER_DEFAULTS,
    Hyperparameters,
    Kernels,
    OptimizerKind,
    OptimizerSpec,
)
from ps_core.update_offer import GROUP_KEYS

_SWITCHES = ("nesterov", "amsgrad", "centered", "maximize")
_WITHOUT_BOUNDS = (*_SWITCHES, "dampening", "betas", "clamp", "factory")
"""The fields that are no numbers of 0 or more."""

_BETAS = ("beta1", "beta2")
"""The hyperparameters that torch has as a pair, `betas`."""

Clamp: TypeAlias = tuple[float | None, float | None]
"""The least and the greatest value of a parameter after an update, as for `torch.clamp_`; None for
a side without a bound. The servers clamp all that an update has touched, so a clamp by the script
between steps changes nothing.
"""


class ServerOptimizer:
    """The base of the optimizers: conversion from and to parameter groups and table settings."""

    __slots__ = ()
    kind: ClassVar[OptimizerKind]

    def __post_init__(self) -> None:
        """Raises InvalidConfig for a setting out of its bounds."""
        label, settings = type(self).__name__, self._settings()
        clamp_hyperparameters(label, settings.get("clamp"))
        for name, value in settings.items():
            if name not in _WITHOUT_BOUNDS and (number := _require_number(label, name, value)) < 0:
                raise InvalidConfig(f"{label}: {name} is {number}; expected 0 or more")
        if "betas" in settings:
            _require_betas(label, settings["betas"])

    def defaults(self) -> dict[str, Any]:
        """The keys and values of a torch parameter group with these settings: torch's own, and
        `clamp` if there is one. None with a `factory`, whose optimizer has the groups.
        """
        settings = self._settings()
        if "factory" in settings:
            return {}
        if settings.get("clamp", ()) is None:
            del settings["clamp"]
        return settings

    def _settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def with_group(self, group: Mapping[str, Any]) -> Self:
        """The optimizer with the settings of a parameter group, validated."""
        return type(self)(**{key: group.get(key, own) for key, own in self._settings().items()})

    def spec(self, kernels: Kernels = Kernels.FAST) -> OptimizerSpec:
        """The optimizer as a table's setting, with all hyperparameters."""
        group = self.defaults()
        switches: dict[str, Any] = {n: bool(group[n]) for n in _SWITCHES if n in group}
        return OptimizerSpec(
            kind=self.kind,
            hyperparameters=hyperparameters(self.kind, group),
            kernels=kernels,
            **switches,
        )


def check_optimizer(optimizer: object) -> None:
    """Refuse an object that is no optimizer of this module: torch's own, a name, a class. The
    InvalidConfig has the optimizer to use instead.
    """
    if isinstance(optimizer, ServerOptimizer):
        return
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(cls, ServerOptimizer):
        raise InvalidConfig(
            f"optimizer is the class {cls.__name__}; expected one with its numbers, such as "
            f"{_example(cls.__name__)}"
        )
    if any((base.__module__, base.__name__) == _TORCH_BASE for base in cls.__mro__):
        what = f"optimizer is torch's {cls.__name__}, which knows no servers"
        if cls.__module__.startswith("torch.optim.") and cls.__name__ in NAMESAKES:
            raise InvalidConfig(
                f"{what}; expected {_example(cls.__name__)}, which does the same on the servers"
            )
        raise InvalidConfig(
            f"{what}; expected {_example('Adam')} or another of the servers', or "
            f"ps_worker.Aggregate(functools.partial({cls.__name__}, lr=0.001)), which runs it at "
            "the workers"
        )
    if isinstance(optimizer, str):
        known = {name.lower(): name for name in NAMESAKES}
        name = known.get(optimizer.lower(), "SGD")
        raise InvalidConfig(f"optimizer is the text '{optimizer}'; expected {_example(name)}")
    raise InvalidConfig(
        f"optimizer is {cls.__name__}; expected one of ps_worker's, such as {_example('SGD')}"
    )


NAMESAKES = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop")
"""The optimizers with a namesake in torch.optim."""

_TORCH_BASE = ("torch.optim.optimizer", "Optimizer")
"""The base of every optimizer of torch, by name, because this module does not import torch."""

_EXAMPLES = {
    "Aggregate": "functools.partial(torch.optim.SGD, lr=0.1)",
    "Add": "functools.partial(torch.optim.SGD, lr=0.1)",
    "Assign": "",
    "Outer": "functools.partial(torch.optim.AdamW, lr=0.001), inner_steps=50",
    "Custom": "'lion', lr=0.0001",
    "SGD": "lr=0.1",
}


def _example(name: str) -> str:
    return f"ps_worker.{name}({_EXAMPLES.get(name, 'lr=0.001')})"


@dataclass(frozen=True, slots=True)
class SGD(ServerOptimizer):
    """`torch.optim.SGD`, on the servers; with `clamp`, see `Clamp`.

    Raises:
        InvalidConfig: a number out of bounds, or Nesterov without momentum or with dampening.
    """

    kind: ClassVar[OptimizerKind] = OptimizerKind.SGD

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    clamp: Clamp | None = None

    def __post_init__(self) -> None:
        ServerOptimizer.__post_init__(self)  # a class with slots is made anew: no bare `super`
        _require_number("SGD", "dampening", self.dampening)
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise InvalidConfig(
                f"SGD: nesterov needs momentum above 0 and dampening 0; got momentum "
                f"{self.momentum} and dampening {self.dampening}"
            )


@dataclass(frozen=True, slots=True)
class Adam(ServerOptimizer):
    """`torch.optim.Adam`, on the servers; with `clamp`, see `Clamp`.

    Raises:
        InvalidConfig: a number out of bounds.
    """

    kind: ClassVar[OptimizerKind] = OptimizerKind.ADAM

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    clamp: Clamp | None = None


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """`torch.optim.AdamW`, on the servers; with `clamp`, see `Clamp`.

    Raises:
        InvalidConfig: a number out of bounds.
    """

    kind: ClassVar[OptimizerKind] = OptimizerKind.ADAMW

    weight_decay: float = 1e-2


@dataclass(frozen=True, slots=True)
class Adagrad(ServerOptimizer):
    """`torch.optim.Adagrad`, on the servers; with `clamp`, see `Clamp`.

    Raises:
        InvalidConfig: a number out of bounds.
    """

    kind: ClassVar[OptimizerKind] = OptimizerKind.ADAGRAD

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False
    clamp: Clamp | None = None


@dataclass(frozen=True, slots=True)
class RowwiseAdagrad(ServerOptimizer):
    """Adagrad with one number of state for each row of an embedding table, which grows by the mean
    of the row's squared gradients: torchrec's EXACT_ROWWISE_ADAGRAD.

    Raises:
        InvalidConfig: a number out of bounds.
    """

    kind: ClassVar[OptimizerKind] = OptimizerKind.ROWWISE_ADAGRAD

    lr: float = 1e-2
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    maximize: bool = False


@dataclass(frozen=True, slots=True)
class FTRL(ServerOptimizer):
    """FTRL-Proximal for each element of an embedding table's rows: Adagrad with a penalty that
    keeps elements at exactly 0 until their gradients outweigh it.

        r = (beta + sqrt(sum of g * g)) / lr
        z += g - (growth of r) * w
        w = 0 if |z| <= l1 else (sign(z) * l1 - z) / (r + l2)

    A row's first step starts from its initial value, where the paper starts from 0: its z begins as
    `-beta / lr * w`. Without penalties a step is `w -= g / r`, so an element without a gradient
    keeps its initial value. `l1` and `l2` pull it to 0 from the row's first step on, unless `beta`
    is 0: then an element's first gradient begins that. Every hyperparameter may be another at each
    step, and what was learned stays: half the learning rate halves the steps, not the rows.

    Args:
        lr: above 0, since the update divides by it; `alpha` in the paper.
        l1: the penalty `l1 * |w|`.
        l2: the penalty `l2 / 2 * w**2`.
        beta: makes the first steps smaller.
        maximize: go up the gradient.

    Raises:
        InvalidConfig: a number out of bounds.

    Reference: McMahan et al., "Ad Click Prediction: a View from the Trenches" (2013), algorithm 1,
        with other initial values than 0, and other hyperparameters from step to step.
    """

    kind: ClassVar[OptimizerKind] = OptimizerKind.FTRL

    lr: float = 0.1
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0
    maximize: bool = False

    def __post_init__(self) -> None:
        ServerOptimizer.__post_init__(self)
        if float(self.lr) <= 0:
            raise InvalidConfig(f"FTRL: lr is {self.lr}; expected above 0, since it divides")


@dataclass(frozen=True, slots=True)
class RMSprop(ServerOptimizer):
    """`torch.optim.RMSprop`, on the servers; with `clamp`, see `Clamp`.

    Raises:
        InvalidConfig: a number out of bounds.
    """

    kind: ClassVar[OptimizerKind] = OptimizerKind.RMSPROP

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False
    clamp: Clamp | None = None


@dataclass(frozen=True, slots=True)
class Aggregate(ServerOptimizer):
    """The servers reduce the gradients; each worker runs its own torch optimizer on the result.

    Needs BSP. All workers run the same optimizer on the same reduced gradient, so their parameters
    stay equal, if they begin with the same and all scripts do the same to them: a step is refused
    if the settings of the optimizers differ, or what was changed since the last step.

    Args:
        factory: Builds the torch optimizer from parameter groups, for instance
            ``functools.partial(torch.optim.NAdam, lr=1e-3)``. `DistributedOptimizer` needs it;
            `create_table` does not.
    """

    kind: ClassVar[OptimizerKind] = OptimizerKind.AGGREGATE

    factory: Callable[[list[dict[str, Any]]], Any] | None = None


@dataclass(frozen=True, slots=True)
class Assign(ServerOptimizer):
    """The reduced contribution replaces the table's value: running statistics, averages."""

    kind: ClassVar[OptimizerKind] = OptimizerKind.ASSIGN


@dataclass(frozen=True, slots=True)
class Add(ServerOptimizer):
    """The reduced contribution is added to the table's value.

    With `DistributedOptimizer` each worker runs its own torch optimizer on its own gradient, and
    pushes the change of the parameters. The worker keeps the optimizer's state. With a push codec
    that sends a part of each update ("sign", "topk", "randomk", "lowrank"), the worker's own
    parameters have what it has still to send (Xie et al., CSER, 2020).

    Args:
        factory: as `Aggregate`'s.
    """

    kind: ClassVar[OptimizerKind] = OptimizerKind.ADD

    factory: Callable[[list[dict[str, Any]]], Any] | None = None


@dataclass(frozen=True, slots=True)
class Outer(ServerOptimizer):
    """Each worker trains on its own copy of the parameters for `inner_steps` steps, with a torch
    optimizer of its own. Then it pushes the pseudo-gradient: the parameters that it began with,
    minus its own. The servers take an outer step of SGD with the mean of all workers', and every
    worker goes on from the result.

        ps.Outer(functools.partial(torch.optim.AdamW, lr=4e-4), inner_steps=50)

    Only with `DistributedOptimizer`, and under any consistency. Every `inner_steps`-th call of its
    `step` takes the outer step. The local optimizer keeps its state, and its groups are
    `param_groups`; there `outer_lr` and `outer_momentum`, once set, go before `lr` and `momentum`.

    Args:
        factory: as `Aggregate`'s.
        inner_steps: the steps of each worker in an outer step, 1 to 1,000,000; the same at all.
        lr: the outer learning rate.
        momentum: the outer momentum.
        nesterov: the outer momentum is Nesterov's.
        fragments: the parts of the model that take their outer steps in turn, each after
            `inner_steps`: one every `inner_steps / fragments`. They are its blocks, dealt out. The
            same at all workers.
        overlap: the inner steps that a worker takes while an outer step is on its way; then it
            merges what has come. 0: it waits.
        elastic: the share of the way to the servers' values that the worker's own parameters go in
            an outer step; 1: all. Below 1, with `lr` the workers' number times that share and no
            momentum, this is elastic averaging (EASGD).

    Raises:
        InvalidConfig: a number out of bounds, or Nesterov without momentum.

    Reference: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
        (2023), algorithm 1; and "Streaming DiLoCo with overlapping communication" (2025). Zhang et
        al., "Deep learning with Elastic Averaging SGD" (2015).
    """

    kind: ClassVar[OptimizerKind] = OptimizerKind.SGD

    factory: Callable[[list[dict[str, Any]]], Any]
    inner_steps: int
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    fragments: int = 1
    overlap: int = 0
    elastic: float = 1.0

    def __post_init__(self) -> None:
        ServerOptimizer.__post_init__(self)
        steps, most = self.inner_steps, limits.MAX_INNER_STEP_COUNT
        if not 1 <= steps <= most or steps % 1:
            raise InvalidConfig(
                f"Outer: inner_steps is {steps}; expected a whole number from 1 to {most:,}"
            )
        count, most = self.fragments, limits.MAX_FRAGMENT_COUNT
        if not 1 <= count <= most or steps % count:
            raise InvalidConfig(
                f"Outer: fragments is {count}; expected 1 to {most:,}, and a divisor of "
                f"inner_steps, which is {steps}"
            )
        if not 0 <= self.overlap < self.steps_per_clock or self.overlap % 1:
            raise InvalidConfig(
                f"Outer: overlap is {self.overlap}; expected a whole number from 0 to "
                f"{self.steps_per_clock - 1}, so that an outer step ends before the next begins"
            )
        if not 0.0 < self.elastic <= 1.0:
            raise InvalidConfig(f"Outer: elastic is {self.elastic}; expected above 0, up to 1")
        SGD(self.lr, self.momentum, nesterov=self.nesterov)

    @property
    def steps_per_clock(self) -> int:
        """The inner steps from one outer step to the next, which may be another fragment's."""
        return self.inner_steps // self.fragments

    @property
    def merges(self) -> bool:
        """True if a worker's parameters are not the servers' right after an outer step."""
        return self.fragments > 1 or self.overlap > 0 or self.elastic < 1.0

    def outer_hyperparameters(self, group: Mapping[str, Any]) -> Hyperparameters:
        """The hyperparameters of a group's outer step; raises as `hyperparameters`."""
        outer = SGD(group.get("outer_lr", self.lr), group.get("outer_momentum", self.momentum))
        return hyperparameters(self.kind, outer.defaults())

    def spec(self, kernels: Kernels = Kernels.FAST) -> OptimizerSpec:
        """The outer optimizer as a table's setting, with the inner steps of each update."""
        sgd = SGD(self.lr, self.momentum, nesterov=self.nesterov).spec(kernels)
        count = self.fragments if self.fragments > 1 else 0
        return replace(sgd, inner_steps=self.steps_per_clock, fragment_count=count)


@dataclass(frozen=True, slots=True, init=False)
class Custom(ServerOptimizer):
    """A custom update on the servers, by the name of its entry point (CUSTOM_UPDATES.md).

        ps.Custom("lion", lr=1e-4, weight_decay=0.1)

    An operator has installed it on every server. Hyperparameters that are left out have the
    update's defaults; schedulers find them, too, in the parameter groups of `DistributedOptimizer`.

    Args:
        update: the name of the update.
        hyperparameters: the update's, by name. The cluster refuses a wrong name when the table is
            created.

    Raises:
        InvalidConfig: a hyperparameter is not a number.
    """

    kind: ClassVar[OptimizerKind] = OptimizerKind.CUSTOM

    update: str
    hyperparameters: Hyperparameters

    def __init__(self, update: str, /, **hyperparameters: float) -> None:
        found = [
            (name, _require_number(f"custom update '{update}'", name, value))
            for name, value in hyperparameters.items()
        ]
        object.__setattr__(self, "update", update)
        object.__setattr__(self, "hyperparameters", tuple(sorted(found)))

    def defaults(self) -> dict[str, Any]:
        """The given hyperparameters."""
        return dict(self.hyperparameters)

    def with_group(self, group: Mapping[str, Any]) -> Custom:
        """The update with a parameter group's hyperparameters: all keys except torch's own."""
        new = {name: value for name, value in group.items() if name not in GROUP_KEYS}
        return Custom(self.update, **{**dict(self.hyperparameters), **new})

    def spec(self, kernels: Kernels = Kernels.FAST) -> OptimizerSpec:
        """The update as a table's setting; the scheduler fills in missing hyperparameters."""
        return OptimizerSpec(
            self.kind, self.hyperparameters, kernels=kernels, custom_update=self.update
        )


def hyperparameters_of(spec: OptimizerSpec, group: Mapping[str, Any]) -> Hyperparameters:
    """A torch group's hyperparameters for a step of that optimizer; raises as `hyperparameters`."""
    if spec.kind is not OptimizerKind.CUSTOM:
        return hyperparameters(spec.kind, group)
    names = [name for name, _ in spec.hyperparameters]
    for name in names:
        if name not in group:
            raise InvalidConfig(f"the parameter group has no '{name}', which {spec.label} needs")
    return tuple((name, _require_number(spec.label, name, group[name])) for name in names)


def hyperparameters(kind: OptimizerKind, group: Mapping[str, Any]) -> Hyperparameters:
    """The hyperparameters of a torch parameter group that `kind` has, sorted by name; InvalidConfig
    if one is missing. `betas` become `beta1` and `beta2`; one-element tensors become floats.
    """
    found = []
    for name in HYPERPARAMETER_DEFAULTS[kind]:
        key, index = ("betas", int(name[-1]) - 1) if name in _BETAS else (name, None)
        if key not in group:
            raise InvalidConfig(f"the parameter group has no '{key}', which {kind.value} needs")
        value = group[key] if index is None else group[key][index]
        found.append((name, _require_number(kind.value, name, value)))
    return tuple(sorted([*found, *clamp_hyperparameters(kind.value, group.get("clamp"))]))


def clamp_hyperparameters(optimizer: str, clamp: object) -> Hyperparameters:
    """The hyperparameters of a clamp, for the sides with a bound."""
    if clamp is None:
        return ()
    if not isinstance(clamp, tuple | list) or len(clamp) != 2:
        raise InvalidConfig(f"{optimizer}: clamp is {clamp!r}; expected (least, greatest)")
    found = [
        (name, _require_number(optimizer, name, bound))
        for name, bound in zip(CLAMP_NAMES, clamp, strict=True)
        if bound is not None
    ]
    if len(found) == 2 and found[0][1] > found[1][1]:
        raise InvalidConfig(f"{optimizer}: clamp is {clamp!r}; expected the least first")
    return tuple(found)


def check_switches(spec: OptimizerSpec, group: Mapping[str, Any], table: str) -> None:
    """Raises InvalidConfig for a group whose switches have changed since its table was created."""
    if spec.kind is OptimizerKind.CUSTOM:  # its hyperparameters have any names
        return
    created = dict(spec.hyperparameters)
    fixed: dict[str, bool | float] = {name: getattr(spec, name) for name in _SWITCHES}
    if "initial_accumulator_value" in created:
        fixed["initial_accumulator_value"] = created["initial_accumulator_value"]
    for name, value in fixed.items():
        if name in group and type(value)(group[name]) != value:
            raise InvalidConfig(
                f"'{name}' of table '{table}' is {value} for good; the parameter group now says "
                f"{group[name]}"
            )
    given = dict(clamp_hyperparameters(table, group.get("clamp")))
    for name in CLAMP_NAMES:
        if name in created and name not in given:
            raise InvalidConfig(
                f"'clamp' of table '{table}' has {name} {created[name]}; the parameter group now "
                "has none, which would mean the table's: expected another bound, such as 1e18"
            )


def _require_number(optimizer: str, name: str, value: SupportsFloat) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidConfig(f"{optimizer}: {name} is {value!r}; expected a number") from error
    if not math.isfinite(number):
        raise InvalidConfig(f"{optimizer}: {name} is {number}; expected a finite number")
    return number


def _require_betas(optimizer: str, betas: object) -> None:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InvalidConfig(f"{optimizer}: betas are {betas!r}; expected two numbers")
    for index, beta in enumerate(betas):
        number = _require_number(optimizer, f"beta{index + 1}", beta)
        if not 0.0 <= number < 1.0:
            raise InvalidConfig(f"{optimizer}: beta{index + 1} is {number}; expected 0 <= beta < 1")
