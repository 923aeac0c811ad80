"""Learning-rate schedules of a resumed run: the optimizer has the checkpoint's hyperparameters when
its schedule has its state, whatever the schedule's constructor has written into the groups.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as rates

from ps_worker.checkpoint.save_points import SavePoints
from ps_worker.checkpoint.state_codec import decode, encode
from ps_worker.training.hybrid.workers_half import WorkersHalf
from ps_worker.training.optimizer_state import OptimizerState
from tests.unit.saving_worker import Worker
from tests.unit.torch_schedules import SCHEDULERS, BuildScheduler

STEPS = 16


class Momentum(torch.optim.SGD):
    """As a `DistributedOptimizer` looks to its state."""

    has_local_state = False


class Betas(torch.optim.Adam):
    """Likewise, with the pair that schedules of momentum change."""

    has_local_state = False


class Local(torch.optim.Adam):
    """Likewise, with a local optimizer."""

    has_local_state = True


def parameters(count: int = 2) -> list[dict[str, Any]]:
    return [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.05 + i} for i in range(count)]


def optimizer_of(kind: Any, groups: Any = None) -> Any:
    options = {"momentum": 0.9} if kind is Momentum else {}
    return kind(groups or parameters(), lr=0.05, **options)


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """All hyperparameters, by group, as they are now."""
    return [
        copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]


def run(optimizer: Any, schedule: Any, steps: Iterable[int]) -> list[list[dict[str, Any]]]:
    """The hyperparameters of each of these steps."""
    history = []
    for number in steps:
        history.append(settings(optimizer))
        optimizer.step()
        if isinstance(schedule, rates.ReduceLROnPlateau):
            schedule.step(1.0 if number < 4 else 2.0)
        else:
            schedule.step()
    return history


@dataclass
class Saved:
    """The states of a worker in a checkpoint."""

    optimizer: Any
    schedule: Any


def in_a_file(state: Any) -> Any:
    return decode(*encode(state))


def saved_after(build: BuildScheduler, kind: Any, steps: int) -> Saved:
    optimizer = optimizer_of(kind)
    schedule = build(optimizer)
    run(optimizer, schedule, range(steps))
    mine = OptimizerState(optimizer, keeps_parameters=False).state_dict()
    return Saved(in_a_file(mine), in_a_file(schedule.state_dict()))


def load(points: SavePoints, name: str, state: Any, found: Any) -> None:
    points.attach(name, state)
    points.load(name, copy.deepcopy(found))


def resumed(optimizer: Any, saved: Saved) -> tuple[SavePoints, OptimizerState]:
    """A worker's save points, and the optimizer's own state, as it has it after a resume."""
    points, own = Worker().points, OptimizerState(optimizer, keeps_parameters=False)
    load(points, "optimizer", own, saved.optimizer)
    return points, own


# --- every schedule of torch


@pytest.mark.parametrize("kind", [Momentum, Betas, Local])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_each_step_has_the_hyperparameters_of_the_run_that_was_not_stopped(
    name: str, kind: Any
) -> None:
    build = SCHEDULERS[name]
    whole = optimizer_of(kind)
    expected = run(whole, build(whole), range(STEPS))
    for stopped_after in (1, 5, 9):
        optimizer, saved = optimizer_of(kind), saved_after(build, kind, stopped_after)
        points, _ = resumed(optimizer, saved)
        schedule = build(optimizer)
        load(points, "schedule", schedule, saved.schedule)
        found = run(optimizer, schedule, range(stopped_after, STEPS))
        assert found == expected[stopped_after:], stopped_after


def test_every_schedule_of_torch_is_tried() -> None:
    assert {*rates.__all__} - {"LRScheduler"} <= SCHEDULERS.keys()


# --- whose schedule it is


def warm_up(optimizer: Any) -> Any:
    return rates.LinearLR(optimizer, total_iters=3)


class Holder:
    """A script's own state, which has its schedule somewhere."""

    def __init__(self, *held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class Wrapped(torch.optim.Optimizer):
    """As frameworks wrap an optimizer: with its groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


def of_schedule(optimizer: Any) -> Holder:
    return Holder(warm_up(optimizer))


def of_dict(optimizer: Any) -> Holder:
    return Holder({"schedules": [warm_up(optimizer)]})


def of_another_holder(optimizer: Any) -> Holder:
    return Holder(of_schedule(optimizer))


def of_wrapped(optimizer: Any) -> Holder:
    warm_up(optimizer)
    return Holder(Wrapped(optimizer))


def test_after_the_first_step_the_groups_are_the_scripts() -> None:
    """A state with the optimizer in it may be attached at the first evaluation."""
    saved = saved_after(warm_up, Momentum, 5)
    optimizer = optimizer_of(Momentum)
    points, own = resumed(optimizer, saved)
    own.check("model")  # as a step does
    optimizer.param_groups[0]["lr"] = 0.7
    load(points, "best", Holder(optimizer), {})
    assert optimizer.param_groups[0]["lr"] == 0.7


@pytest.mark.parametrize("build", [of_schedule, of_dict, of_another_holder, of_wrapped])
def test_a_state_that_has_the_optimizer_in_it_counts_as_its_schedule(build: Any) -> None:
    saved = saved_after(warm_up, Momentum, 5)
    optimizer = optimizer_of(Momentum)
    points, _ = resumed(optimizer, saved)
    load(points, "mine", build(optimizer), {})
    assert settings(optimizer)[0]["lr"] == saved.optimizer["numbers"][0]["lr"] == 0.05


@pytest.mark.parametrize(
    "other",
    [
        lambda: Holder(1, "two", None),
        lambda: Holder(warm_up(optimizer_of(Momentum))),
        lambda: Holder(list(range(10_000))),
        lambda: warm_up(optimizer_of(Betas)),
    ],
)
def test_the_state_of_something_else_changes_nothing(other: Any) -> None:
    """A script may set a rate of its own before it attaches its position in the data."""
    optimizer = optimizer_of(Momentum)
    points, _ = resumed(optimizer, saved_after(warm_up, Momentum, 5))
    optimizer.param_groups[0]["lr"] = 0.7
    state = other()
    found = state.state_dict()
    load(points, "other", state, found)
    assert optimizer.param_groups[0]["lr"] == 0.7


def test_two_optimizers_have_each_their_own() -> None:
    """In whatever order their schedules are made and attached."""
    first, second = optimizer_of(Momentum), optimizer_of(Betas)
    points = Worker().points
    saved = [saved_after(warm_up, Momentum, 5), saved_after(warm_up, Betas, 1)]
    for each, optimizer, state in zip("ab", (first, second), saved, strict=True):
        load(points, each, OptimizerState(optimizer, False), state.optimizer)
    schedules = [warm_up(first), warm_up(second)]
    left = settings(second)
    load(points, "c", schedules[0], saved[0].schedule)
    assert settings(second) == left
    load(points, "d", schedules[1], saved[1].schedule)
    assert [each["lr"] for each in settings(first)] == [0.05, 1.05]
    expected = [group["lr"] for group in saved[1].optimizer["numbers"]]
    assert [each["lr"] for each in settings(second)] == expected


# --- the script's own wishes


def test_a_rate_that_is_set_after_the_schedule_is_attached_stays() -> None:
    saved = saved_after(warm_up, Momentum, 5)
    optimizer = optimizer_of(Momentum)
    points, _ = resumed(optimizer, saved)
    schedule = warm_up(optimizer)
    load(points, "schedule", schedule, saved.schedule)
    optimizer.param_groups[0]["lr"] = 0.7
    load(points, "other", Holder(3), {})
    optimizer.step()
    schedule.step()
    assert [each["lr"] for each in settings(optimizer)] == [0.7, 1.05]


def test_keys_that_the_checkpoint_does_not_have_stay() -> None:
    saved = saved_after(warm_up, Momentum, 5)
    optimizer = optimizer_of(Momentum)
    points, _ = resumed(optimizer, saved)
    optimizer.param_groups[0]["mine"] = "kept"
    load(points, "schedule", warm_up(optimizer), saved.schedule)
    assert optimizer.param_groups[0]["mine"] == "kept"


def test_a_rate_that_is_a_tensor_is_put_back_as_often_as_it_must() -> None:
    """Schedules write into the tensor, which must not be the one that is kept."""
    optimizer = Betas(parameters(1), lr=torch.tensor(0.05))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
    points, own = Worker().points, OptimizerState(optimizer, False)
    load(points, "optimizer", own, in_a_file(own.state_dict()))
    for name in "ab":
        schedule = warm_up(optimizer)
        assert float(optimizer.param_groups[0]["lr"]) < 0.04
        load(points, name, schedule, in_a_file(schedule.state_dict()))
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)


def test_groups_that_the_script_loads_are_its_own_wish_if_they_differ() -> None:
    saved = saved_after(warm_up, Local, 5)
    for loads_other in (False, True):
        optimizer = optimizer_of(Local)
        points, own = resumed(optimizer, saved)
        schedule = warm_up(optimizer)
        before, given = optimizer.param_groups, optimizer.state_dict()
        if loads_other:
            given["param_groups"][0]["lr"] = 0.7
        optimizer.load_state_dict(given)
        own.groups_loaded(before)
        load(points, "schedule", schedule, saved.schedule)
        assert settings(optimizer)[0]["lr"] == (0.7 if loads_other else 0.05)


def test_a_group_that_is_added_later_has_the_checkpoints_when_its_schedule_comes() -> None:
    saved = saved_after(warm_up, Local, 5)
    optimizer = optimizer_of(Local, parameters(1))
    points, own = resumed(optimizer, saved)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 9.0})
    own.group_added()
    load(points, "schedule", warm_up(optimizer), saved.schedule)
    assert [each["lr"] for each in settings(optimizer)] == [0.05, 1.05]


def test_a_schedule_that_is_not_attached_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """It begins anew, from where the checkpoint was."""
    optimizer = optimizer_of(Momentum)
    _, own = resumed(optimizer, saved_after(warm_up, Momentum, 5))
    warm_up(optimizer)
    for _ in range(2):
        own.check("model")
    (said,) = (record.message for record in caplog.records)
    assert "hyperparameters_not_of_checkpoint" in said
    assert "lr 0.05" in said
    assert optimizer.param_groups[0]["lr"] < 0.05


def test_nothing_is_said_of_a_schedule_that_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    saved = saved_after(SCHEDULERS["OneCycleLR"], Betas, 5)
    optimizer = optimizer_of(Betas)
    points, own = resumed(optimizer, saved)
    load(points, "schedule", SCHEDULERS["OneCycleLR"](optimizer), saved.schedule)
    own.check("model")
    assert not caplog.records


# --- the workers' half of a hybrid model


class Anything:
    """A client of which the half asks what it says in errors."""

    restored_from, rank, world_size = "", 0, 1


def test_the_workers_half_has_the_checkpoints_as_well() -> None:
    """Its schedule is made of an optimizer with the groups of both halves."""

    def half(optimizer: torch.optim.Optimizer) -> WorkersHalf:
        client: Any = Anything()
        return WorkersHalf(client, torch.nn.Module(), optimizer, (), lambda: 5, lambda: None)

    optimizer = optimizer_of(Betas)
    run(optimizer, warm_up(optimizer), range(5))
    found = in_a_file(half(optimizer).state_dict())
    other = optimizer_of(Betas)
    points = Worker().points
    load(points, "half", half(other), found)
    schedule = warm_up(Wrapped(other))
    load(points, "schedule", schedule, in_a_file(schedule.state_dict()))
    assert [each["lr"] for each in settings(other)] == [0.05, 1.05]
