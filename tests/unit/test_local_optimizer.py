"""A worker's own step, and the optimizer that takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker as ps
from ps_core.change import TableChange
from ps_core.errors import InvalidConfig
from ps_core.keys import TableId
from ps_core.tables.table import Table
from ps_worker.compression.push_encoder import BEYOND_HALF
from ps_worker.spec.optimizers import ServerOptimizer
from ps_worker.spec.settings import ASP, BSP
from ps_worker.spec.training_options import TrainingOptions
from ps_worker.steps.steps import TableHandle
from ps_worker.training.local_optimizer import (
    SettingsByClock,
    StateBefore,
    check_shared,
    inner_optimizer,
    local_state,
    outer_of,
    skipped_step,
)
from tests.unit.saving_worker import A, B, Worker


def stepped(optimizer: torch.optim.Optimizer, *gradients: float) -> None:
    """One step; the gradients of the parameters in their order."""
    tensors = [each for group in optimizer.param_groups for each in group["params"]]
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = torch.full_like(tensor, gradient)
    optimizer.step()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_is_repeated_for_some_tensors_as_if_it_had_not_been_taken(steps: int) -> None:
    """From the state before, or from none; the others keep what the first step gave them."""
    model, once = ([nn.Parameter(torch.zeros(3)) for _ in range(2)] for _ in range(2))
    optimizer, repeated = (torch.optim.Adam(each, lr=0.5) for each in (model, once))
    for each in (optimizer, repeated):
        for number in range(steps):
            stepped(each, 1.0 + number, 2.0)
    start = model[0].detach().clone()
    before = StateBefore(optimizer)
    stepped(optimizer, 8.0, 3.0)
    with torch.no_grad():
        model[0].copy_(start)  # pulled anew
    model[0].grad = torch.full((3,), 4.0)
    before.step_again({model[0]})
    stepped(repeated, 4.0, 3.0)
    for mine, theirs in zip(model, once, strict=True):
        assert torch.equal(mine, theirs)
        for name, value in repeated.state[theirs].items():
            assert torch.equal(optimizer.state[mine][name], value), name
    assert model[1].grad is not None
    assert model[1].grad.eq(3.0).all(), "it has its gradient back"
    before.step_again({model[0]})
    assert float(optimizer.state[model[0]]["step"]) == steps + 1, "as often as it must"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.8, "dampening": 0.5, "maximize": True}),
        ("Adam", {"lr": 0.1, "betas": (0.8, 0.9), "eps": 0.1, "amsgrad": True}),
        ("AdamW", {}),
        ("Adagrad", {"lr": 0.2, "lr_decay": 0.5, "initial_accumulator_value": 2.0}),
        ("RMSprop", {"alpha": 0.9, "momentum": 0.5, "centered": True}),
    ],
)
def test_outer_steps_have_inner_steps_of_the_namesake(name: str, given: dict[str, Any]) -> None:
    """With its hyperparameters, which those of a parameter group go before."""
    outer = outer_of(getattr(ps, name)(**given), 7)
    assert outer == ps.Outer(outer.factory, inner_steps=7)
    found, expected = ([nn.Parameter(torch.ones(3)) for _ in range(2)] for _ in range(2))

    def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 0.5}]

    inner = inner_optimizer(outer, groups(found))
    namesake = getattr(torch.optim, name)(groups(expected), **given)
    for step in range(4):
        for optimizer in (inner, namesake):
            stepped(optimizer, 1.0 - step, 2.0)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(found[1], torch.ones(3))


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (ps.Add(torch.optim.SGD), "the optimizer is Add; expected one of SGD, Adam, AdamW"),
        (ps.Aggregate(torch.optim.SGD), "the optimizer is Aggregate; expected"),
        (ps.Outer(torch.optim.SGD, 7), "the optimizer is Outer; expected"),
        (ps.Custom("lion"), "the optimizer is Custom; expected"),
        (ps.SGD(clamp=(0.0, None)), r"SGD has clamp=\(0\.0, None\), which torch.optim does not"),
    ],
)
def test_outer_steps_refuse_what_has_no_namesake(optimizer: ServerOptimizer, named: str) -> None:
    with pytest.raises(InvalidConfig, match=f"outer_steps is 7, and .*{named}"):
        outer_of(optimizer, 7)


# --- settings


def test_a_setting_holds_until_the_change_takes_effect() -> None:
    """Views tell of each change ahead of its clock, and of two before the first takes effect."""
    handle = Worker().handles[A]
    table = handle.table
    settings = SettingsByClock(lambda _: table)
    changes = [
        TableChange(1, 3, ps.ASP()),
        TableChange(2, 4, ps.SSP(1)),
        TableChange(3, 9, ps.BSP()),
    ]
    found = []
    for clock in range(12):
        if clock in (0, 1, 8):
            table = replace(table, change=changes.pop(0))
        handle.steps.clock = clock
        found.append(
            [str(*settings.ahead(ahead, [(handle, True), (handle, False)])) for ahead in (2, 1)]
        )
    by_clock = ["bsp"] * 3 + ["asp"] + ["ssp:1"] * 5 + ["bsp"] * 4
    assert found == [[by_clock[n + 1], by_clock[n]] for n in range(12)]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (ps.BSP(), (True, 7, 0)),
        (ps.SSP(2), (True, 5, 0)),
        (ps.ASP(), (False, 0, 0)),
        (ps.BSP(backup_workers=2), (True, 7, 3)),
    ],
)
def test_an_outer_step_needs_of_others_what_its_setting_says(
    setting: ps.Consistency, expected: tuple[bool, int, int]
) -> None:
    """With backup workers the clock of all, so that enough workers can be chosen for it."""
    handle = Worker().handles[A]
    handle.steps.clock = 7
    table = replace(handle.table, change=TableChange(1, 0, setting))
    settings = SettingsByClock(lambda _: table)
    assert settings.needs_after(7, [(handle, True)], worker_count=5) == expected


def enough_for(newest: dict[TableId, Table], pairs: list[tuple[TableHandle, bool]]) -> int:
    settings = SettingsByClock(lambda handle: newest[handle.table.table_id])
    return settings.needs_after(7, pairs, worker_count=5).enough


def test_the_table_with_fewest_backup_workers_needs_most() -> None:
    """The step ends when each table has its update."""
    handles = Worker().handles
    pairs = [(handles[A], True), (handles[B], True)]
    for backups, enough in (((1, 2), 4), ((2, 1), 4), ((2, 2), 3), ((0, 1), 0), ((1, 0), 0)):
        newest = {}
        for table_id, count in zip((A, B), backups, strict=True):
            change = TableChange(1, 0, ps.BSP(backup_workers=count))
            newest[table_id] = replace(handles[table_id].table, change=change)
        assert enough_for(newest, pairs) == enough


def test_the_state_of_a_local_optimizer_is_its_own_and_never_false() -> None:
    """torch.distributed.checkpoint takes a step where it is false, to have some made."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(3))], lr=0.1)
    assert not optimizer.state
    for _ in range(2):
        assert local_state(optimizer)
        stepped(optimizer, 1.0)
    assert local_state(optimizer) is optimizer.state
    (entry,) = local_state(optimizer).values()
    assert float(entry["step"]) == 2
    other = torch.optim.Adam([nn.Parameter(torch.zeros(3))], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert (len(local_state(optimizer)), len(local_state(other))) == (0, 1)
    assert local_state(optimizer)
    stepped(optimizer, 1.0)
    assert len(optimizer.state) == 1


def test_groups_that_no_step_is_taken_with_are_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    groups = optimizer.param_groups
    check_shared([*groups], groups, "model")
    for other in ([], [{**groups[0]}], [*groups, {"params": []}]):
        with pytest.raises(InvalidConfig, match="of 'model' are other groups than those of the"):
            check_shared(other, groups, "model")


def test_a_step_that_a_codec_cannot_hold_is_not_told_to_allow_infinities() -> None:
    """They would be applied. Of an eager step some blocks are already."""
    bsp = TrainingOptions.of({}, BSP())
    asp = TrainingOptions.of({"mode": "eager"}, ASP())
    infinite = skipped_step("it has a NaN", bsp)
    assert infinite.startswith("it has a NaN; expected finite values. The step was skipped on")
    assert "allow_non_finite=True" in infinite
    beyond = f"it is {BEYOND_HALF}"
    sealed = skipped_step(beyond, bsp)
    assert sealed == f"{beyond}. The step was skipped on every server"
    eager = skipped_step(beyond, asp)
    assert eager.startswith(f"{beyond}. Blocks that had left before were applied")
    assert skipped_step("", asp) == ""
