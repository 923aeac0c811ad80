"""The worker's optimizer descriptions: torch's defaults, torch's bounds, torch's group keys."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from ps_core.errors import InvalidConfig
from ps_core.tables.optimizers import HYPERPARAMETER_DEFAULTS, Kernels, OptimizerKind
from ps_worker.spec import optimizers
from ps_worker.spec.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Aggregate,
    Custom,
    Outer,
    RMSprop,
    ServerOptimizer,
)

PAIRS: list[tuple[type[ServerOptimizer], type[torch.optim.Optimizer]]] = [
    (SGD, torch.optim.SGD),
    (Adam, torch.optim.Adam),
    (AdamW, torch.optim.AdamW),
    (Adagrad, torch.optim.Adagrad),
    (RMSprop, torch.optim.RMSprop),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_defaults_are_those_of_torch(
    ours: type[ServerOptimizer], theirs: type[torch.optim.Optimizer]
) -> None:
    signature = inspect.signature(theirs)
    for name, value in ours().defaults().items():
        assert signature.parameters[name].default == value, name
    spec = ours().spec()
    assert dict(spec.hyperparameters) == HYPERPARAMETER_DEFAULTS[ours.kind]


OUTER: dict[str, Any] = {"factory": torch.optim.SGD, "inner_steps": 2}

BAD: list[tuple[type[ServerOptimizer], dict[str, Any], str]] = [
    (SGD, {"lr": -1.0}, "lr is -1.0"),
    (SGD, {"momentum": -0.1}, "momentum is -0.1"),
    (SGD, {"weight_decay": -0.1}, "weight_decay"),
    (SGD, {"nesterov": True}, "nesterov needs momentum"),
    (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening 0"),
    (SGD, {"lr": float("nan")}, "finite"),
    (SGD, {"lr": "fast"}, "expected a number"),
    (Adam, {"betas": (1.0, 0.9)}, "beta1 is 1.0"),
    (Adam, {"betas": (0.9, -0.1)}, "beta2 is -0.1"),
    (Adam, {"betas": (0.9,)}, "two numbers"),
    (AdamW, {"eps": -1.0}, "eps"),
    (Adagrad, {"initial_accumulator_value": -1.0}, "initial_accumulator_value"),
    (Adagrad, {"lr_decay": -1.0}, "lr_decay"),
    (RMSprop, {"alpha": -1.0}, "alpha"),
    (RMSprop, {"momentum": -1.0}, "momentum"),
    (FTRL, {"lr": 0.0}, "FTRL: lr is 0.0; expected above 0"),
    (FTRL, {"lr": -1.0}, "lr is -1.0"),
    (FTRL, {"lr": float("nan")}, "lr is nan"),
    (FTRL, {"l1": -0.1}, "l1 is -0.1"),
    (FTRL, {"l2": -0.1}, "l2 is -0.1"),
    (FTRL, {"beta": -1.0}, "beta is -1.0"),
    (FTRL, {"beta": "small"}, "expected a number"),
    (SGD, {"clamp": 0.5}, r"clamp is 0.5; expected \(least, greatest\)"),
    (Adam, {"clamp": (1.0, 0.5)}, "expected the least first"),
    (Outer, {**OUTER, "inner_steps": 0}, "Outer: inner_steps is 0; expected a whole number from 1"),
    (Outer, {**OUTER, "inner_steps": 1_000_001}, "is 1000001; expected .* to 1,000,000"),
    (Outer, {**OUTER, "inner_steps": 2.5}, "inner_steps is 2.5"),
    (Outer, {**OUTER, "lr": -0.7}, "Outer: lr is -0.7"),
    (Outer, {**OUTER, "momentum": 0.0}, "nesterov needs momentum above 0"),
    (AdamW, {"clamp": (None, float("inf"))}, "clamp_max is inf; expected a finite number"),
]


@pytest.mark.parametrize(("ours", "arguments", "message"), BAD)
def test_bounds_are_those_of_torch(
    ours: type[ServerOptimizer], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        ours(**arguments)


def test_the_beta_of_ftrl_is_no_part_of_a_pair() -> None:
    spec = FTRL(lr=0.5, l1=2.0, l2=3.0, beta=4.0, maximize=True).spec()
    assert dict(spec.hyperparameters) == {"lr": 0.5, "l1": 2.0, "l2": 3.0, "beta": 4.0}
    assert (spec.kind, spec.maximize) == (OptimizerKind.FTRL, True)
    assert dict(FTRL().spec().hyperparameters) == HYPERPARAMETER_DEFAULTS[OptimizerKind.FTRL]


def test_numbers_come_from_a_torch_group_by_torchs_names() -> None:
    parameter = torch.zeros(1, requires_grad=True)
    group = torch.optim.Adam([parameter], lr=torch.tensor(0.5), betas=(0.8, 0.99)).param_groups[0]
    assert dict(optimizers.hyperparameters(OptimizerKind.ADAM, group)) == {
        "lr": 0.5, "beta1": 0.8, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0,
    }  # fmt: skip
    with pytest.raises(InvalidConfig, match="no 'momentum'"):
        optimizers.hyperparameters(OptimizerKind.SGD, group)


def test_a_group_overrides_what_the_optimizer_says() -> None:
    chosen = SGD(lr=0.1).with_group({"lr": 0.2, "momentum": 0.9, "nesterov": True})
    assert chosen == SGD(lr=0.2, momentum=0.9, nesterov=True)
    spec = chosen.spec(Kernels.EXACT)
    assert (spec.nesterov, spec.kernels) == (True, Kernels.EXACT)
    assert dict(spec.hyperparameters)["lr"] == 0.2
    with pytest.raises(InvalidConfig, match="lr is -3"):
        SGD().with_group({"lr": -3})


def test_a_clamp_is_a_groups_own() -> None:
    clamped = SGD(lr=0.1, clamp=(-0.5, None))
    assert clamped.defaults()["clamp"] == (-0.5, None)
    spec = clamped.spec()
    assert dict(spec.hyperparameters)["clamp_min"] == -0.5
    assert "clamp_max" not in dict(spec.hyperparameters)
    group = {**SGD().defaults(), "clamp": (-0.25, 0.25)}
    assert SGD().with_group(group).clamp == (-0.25, 0.25)
    assert dict(optimizers.hyperparameters_of(spec, group))["clamp_max"] == 0.25
    optimizers.check_switches(spec, group, "t")
    with pytest.raises(InvalidConfig, match=r"table 't' has clamp_min -0\.5; the parameter group"):
        optimizers.check_switches(spec, {**group, "clamp": (None, 0.25)}, "t")


def test_a_custom_updates_numbers_are_what_is_in_the_group() -> None:
    lion = Custom("lion", lr=0.1, beta1=0.9)
    assert lion == Custom("lion", beta1=0.9, lr=0.1) == pickle.loads(pickle.dumps(lion))  # noqa: S301
    assert lion.defaults() == {"lr": 0.1, "beta1": 0.9}
    group = {"params": [], "param_names": [], "lr": 0.2, "weight_decay": 0.5, "initial_lr": 0.1}
    chosen = lion.with_group(group)
    assert chosen == Custom("lion", lr=0.2, beta1=0.9, weight_decay=0.5)
    spec = chosen.spec(Kernels.EXACT)
    assert (spec.kind, spec.custom_update) == (OptimizerKind.CUSTOM, "lion")
    assert spec.hyperparameters == (("beta1", 0.9), ("lr", 0.2), ("weight_decay", 0.5))
    later = {"lr": torch.tensor(0.25), "beta1": 0.5, "weight_decay": 0, "maximize": True}
    assert optimizers.hyperparameters_of(spec, later) == (
        ("beta1", 0.5), ("lr", 0.25), ("weight_decay", 0.0),
    )  # fmt: skip
    optimizers.check_switches(spec, later, "t")
    with pytest.raises(InvalidConfig, match="no 'beta1', which custom:lion needs"):
        optimizers.hyperparameters_of(spec, {"lr": 1.0})
    with pytest.raises(InvalidConfig, match="custom update 'lion': lr is nan"):
        Custom("lion", lr=float("nan"))


def test_switches_are_for_good() -> None:
    spec = Adagrad(initial_accumulator_value=0.5).spec()
    optimizers.check_switches(spec, {"lr": 7, "maximize": False}, "t")
    with pytest.raises(InvalidConfig, match="'maximize' of table 't'"):
        optimizers.check_switches(spec, {"maximize": True}, "t")
    with pytest.raises(InvalidConfig, match="initial_accumulator_value"):
        optimizers.check_switches(spec, {"initial_accumulator_value": 0.1}, "t")


def test_aggregate_has_no_numbers() -> None:
    assert Aggregate(torch.optim.SGD).spec().hyperparameters == ()


def test_outer_is_sgd_to_the_servers() -> None:
    outer = Outer(torch.optim.AdamW, inner_steps=50, nesterov=False)
    spec = outer.spec(Kernels.EXACT)
    sgd = SGD(lr=0.7, momentum=0.9).spec(Kernels.EXACT)
    assert (spec.inner_steps, replace(spec, inner_steps=0)) == (50, sgd)
    assert Outer(torch.optim.AdamW, inner_steps=50).spec().nesterov


def test_a_group_of_the_inner_optimizer_may_say_the_outer_rate() -> None:
    outer = Outer(torch.optim.AdamW, inner_steps=50)
    own = outer.outer_hyperparameters({"lr": 1e-3})
    assert own == outer.spec().hyperparameters
    group = {"lr": 1e-3, "outer_lr": 0.5, "outer_momentum": 0.8}
    assert dict(outer.outer_hyperparameters(group)) == {**dict(own), "lr": 0.5, "momentum": 0.8}
    with pytest.raises(InvalidConfig, match="lr is nan"):
        outer.outer_hyperparameters({"outer_lr": float("nan")})
