"""What a distributed optimizer has of its own, taken over by another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ps_core.errors import InvalidCheckpoint
from ps_worker.checkpoint.state_codec import decode, encode
from ps_worker.training.optimizer_state import OptimizerState


class Local(torch.optim.Adam):
    """As a `DistributedOptimizer` with a local optimizer looks to its state."""

    has_local_state = True


class Remote(torch.optim.SGD):
    """As one whose state is the servers'."""

    has_local_state = False


def trained(steps: int, kind: Any = Local, lr: float = 0.1) -> Any:
    torch.manual_seed(3)
    parameters = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(2, 2))]
    optimizer = kind([{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 0.01}], lr=lr)
    for _ in range(steps):
        for each in parameters:
            each.grad = torch.ones_like(each)
        optimizer.step()
    return optimizer


def values(optimizer: Any) -> list[Any]:
    return [p.tolist() for group in optimizer.param_groups for p in group["params"]]


def through_a_file(optimizer: Any, keeps_parameters: bool = False) -> Any:
    state, tensors = encode(OptimizerState(optimizer, keeps_parameters).state_dict())
    return decode(state, tensors)


def test_numbers_of_groups_are_taken_over_and_parameters_are_not() -> None:
    saved = trained(2, Remote)
    for group, lr in zip(saved.param_groups, (0.5, 0.25), strict=True):
        group["lr"], group["initial_lr"] = lr, 1.0
    other = trained(0, Remote)
    before = values(other)
    OptimizerState(other, keeps_parameters=False).load_state_dict(through_a_file(saved))
    assert [(g["lr"], g["initial_lr"]) for g in other.param_groups] == [(0.5, 1.0), (0.25, 1.0)]
    assert values(other) == before
    assert [len(group["params"]) for group in other.param_groups] == [1, 1]


def test_one_with_a_local_optimizer_and_parameters_goes_on() -> None:
    never_saved, saved, other = trained(5), trained(3), trained(0)
    state = through_a_file(saved, keeps_parameters=True)
    OptimizerState(other, keeps_parameters=True).load_state_dict(state)
    for _ in range(2):
        for group in other.param_groups:
            for each in group["params"]:
                each.grad = torch.ones_like(each)
        other.step()
    assert values(other) == values(never_saved)


def test_a_rate_that_is_a_tensor_is_the_new_optimizers_own() -> None:
    state = through_a_file(trained(0, lr=torch.tensor(0.3)))  # type: ignore[arg-type]
    other = trained(0, lr=torch.tensor(0.1))  # type: ignore[arg-type]
    OptimizerState(other, keeps_parameters=False).load_state_dict(state)
    assert float(other.param_groups[0]["lr"]) == pytest.approx(0.3)


def test_other_groups_and_other_parameters_are_refused() -> None:
    state = through_a_file(trained(1), keeps_parameters=True)
    taken = OptimizerState(trained(0), keeps_parameters=True)
    with pytest.raises(InvalidCheckpoint, match="1 parameter groups; this optimizer 2"):
        taken.load_state_dict({**state, "numbers": state["numbers"][:1]})
    wrong: list[list[torch.Tensor]] = [[], state["parameters"][::-1]]
    for parameters in wrong:
        with pytest.raises(InvalidCheckpoint, match="parameters of other shapes than these 2"):
            taken.load_state_dict({**state, "parameters": parameters})


def test_a_part_that_is_refused_changes_nothing() -> None:
    state = through_a_file(trained(1, lr=0.7), keeps_parameters=True)
    optimizer = trained(0)
    before = values(optimizer)
    taken = OptimizerState(optimizer, keeps_parameters=True)
    with pytest.raises(InvalidCheckpoint):
        taken.load_state_dict({**state, "parameters": []})
    assert values(optimizer) == before
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.state
