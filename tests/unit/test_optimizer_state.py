"""What a distributed optimizer has of its own, taken over by another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_worker.checkpoint.state_codec import decode, encode
from ps_worker.spec.optimizers import SGD, Adam, AdamW
from ps_worker.training.optimizer_state import (
    OptimizerState,
    checked_groups,
    fill_groups,
    numbered,
)


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


# --- groups that are added later


def in_groups(count: int, lr: float) -> Any:
    """A local optimizer of so many groups, whose rates count up, after two steps."""
    parameters = [torch.nn.Parameter(torch.full((2,), float(i))) for i in range(count)]
    groups = [{"params": [each], "lr": lr + i} for i, each in enumerate(parameters)]
    optimizer = Local(groups, lr=lr)
    for _ in range(2):
        step(optimizer)
    return optimizer


def step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = torch.ones_like(each)
    optimizer.step()


def rates(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def add(optimizer: Any, taken: OptimizerState) -> torch.nn.Parameter:
    """Another group, as a script adds it."""
    parameter = torch.nn.Parameter(torch.full((2,), -1.0))
    optimizer.add_param_group({"params": [parameter], "lr": 0.5})
    taken.group_added()
    return parameter


def test_each_group_that_is_added_later_goes_on_from_the_checkpoint() -> None:
    """What was trained since in the others stays."""
    saved, other = in_groups(3, 10.0), in_groups(1, 20.0)
    taken = OptimizerState(other, keeps_parameters=True)
    taken.load_state_dict(through_a_file(saved, keeps_parameters=True))
    step(other)
    other.param_groups[0]["lr"] = 30.0
    trained_on = values(other)[0]
    counts = [float(entry["step"]) for entry in other.state.values()]
    assert counts == [3.0]
    for number in (1, 2):
        added = add(other, taken)
        assert added.tolist() == values(saved)[number]
        assert float(other.state[added]["step"]) == 2.0
    assert rates(other) == [30.0, 11.0, 12.0]
    assert values(other)[0] == trained_on
    assert float(other.state[other.param_groups[0]["params"][0]]["step"]) == 3.0


def test_a_group_beyond_those_of_the_checkpoint_keeps_what_the_script_gave_it() -> None:
    saved = in_groups(2, 10.0)
    for before in (1, 2):
        other = in_groups(before, 20.0)
        taken = OptimizerState(other, keeps_parameters=True)
        taken.load_state_dict(through_a_file(saved, keeps_parameters=True))
        for _ in range(3 - before):
            added = add(other, taken)
        assert rates(other) == [10.0, 11.0, 0.5]
        assert added.tolist() == [-1.0, -1.0]
        assert added not in other.state


# --- groups of a torch state_dict


def torchs(kind: Any = torch.optim.SGD, *counts: int, **settings: Any) -> list[dict[str, Any]]:
    parameters = [[torch.nn.Parameter(torch.zeros(1)) for _ in range(n)] for n in counts or (1,)]
    made = kind([{"params": each} for each in parameters], **{"lr": 0.1, **settings})
    return made.state_dict()["param_groups"]  # type: ignore[no-any-return]


def own(optimizer: Any, *counts: int) -> list[dict[str, Any]]:
    names = iter(range(100))
    return [
        {**optimizer.defaults(), "params": [object() for _ in range(n)],
         "param_names": [f"p{next(names)}" for _ in range(n)]}
        for n in counts or (1,)
    ]  # fmt: skip


def test_a_groups_numbers_are_taken_and_its_parameters_names_and_clamp_stay() -> None:
    groups = own(SGD(lr=1.0, clamp=(0.0, None)), 2)
    (saved,) = torchs(torch.optim.SGD, 2, lr=0.25, momentum=0.5)
    (found,) = checked_groups([{**saved, "initial_lr": 3.0}], groups, SGD(lr=1.0))
    assert (found["lr"], found["momentum"], found["initial_lr"]) == (0.25, 0.5, 3.0)
    for name in ("params", "param_names", "clamp"):
        assert found[name] == groups[0][name]


@pytest.mark.parametrize("saved", [None, 3, [1], [None]])
def test_what_has_no_groups_is_no_state(saved: object) -> None:
    with pytest.raises(InvalidConfig, match="has no 'param_groups'"):
        checked_groups(saved, own(SGD(lr=1.0)), SGD(lr=1.0))


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ((1,), "has 1 parameter groups; this optimizer has 2"),
        ((1, 1, 1), "has 3 parameter groups; this optimizer has 2"),
        ((1, 2), "group 1 of the state_dict has 2 parameters; this optimizer's has 1"),
        ((2, 1), "group 0 of the state_dict has 2 parameters; this optimizer's has 1"),
    ],
)
def test_other_groups_of_a_state_dict_are_refused(saved: tuple[int, ...], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        checked_groups(torchs(torch.optim.SGD, *saved), own(SGD(lr=1.0), 1, 1), SGD(lr=1.0))


def test_another_optimizers_groups_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="has no 'amsgrad', which Adam needs"):
        checked_groups(torchs(), own(Adam()), Adam())
    adam, adamw = torchs(torch.optim.Adam), torchs(torch.optim.AdamW)
    with pytest.raises(InvalidConfig, match="is AdamW's; this optimizer is Adam"):
        checked_groups(adamw, own(Adam()), Adam())
    with pytest.raises(InvalidConfig, match="is Adam's; this optimizer is AdamW"):
        checked_groups([{**adam[0], "decoupled_weight_decay": False}], own(AdamW()), AdamW())
    for saved, optimizer in ((adam, Adam()), (adamw, AdamW())):
        old = [{k: v for k, v in saved[0].items() if k != "decoupled_weight_decay"}]
        assert checked_groups(old, own(optimizer), optimizer), "an older torch has no such key"


def test_groups_are_filled_with_the_keys_of_the_namesake() -> None:
    groups = own(SGD(lr=0.25))
    fill_groups(groups, SGD(lr=0.25))
    (expected,) = torchs()
    assert groups[0].keys() == expected.keys() | {"param_names"}
    assert groups[0]["lr"] == 0.25


def test_state_is_found_by_the_place_of_its_parameter() -> None:
    saved = [{"params": [4, 2]}, {"params": [9]}]
    assert numbered({9: {"a": 1}, 4: {"b": 2}}, saved) == {2: {"a": 1}, 0: {"b": 2}}
    with pytest.raises(InvalidConfig, match="has an entry for 3; expected one of the numbers"):
        numbered({3: {}}, saved)
    with pytest.raises(InvalidConfig, match="of parameter 2 is int; expected a dict"):
        numbered({2: 5}, saved)
