"""What the workers of `Aggregate` compare of their copies of the model."""

from __future__ import annotations

import re
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from ps_core.errors import InvalidConfig, UpdateFailed
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_worker.spec.optimizers import Aggregate
from ps_worker.steps.steps import PushTicket, StepResult
from ps_worker.training.among_workers.workers_model import (
    WorkersModel,
    explained,
    settings_of,
)
from ps_worker.training.local_optimizer import local_state
from tests.unit.table_client import parameter, trained_tables


class Copy:
    """A worker's copy of a model of two parameters, and a frozen one."""

    def __init__(self, rank: int = 0, **settings: Any) -> None:
        self.frozen = parameter(5.0)
        self.frozen.requires_grad_(False)
        self.parameters = [parameter(1.0, 2.0), parameter(3.0)]
        everything = [*self.parameters, self.frozen]
        self.inner = torch.optim.Adam(everything, **{"lr": 0.5, **settings})
        self.tables = trained_tables(Aggregate(lambda _: self.inner), everything)
        self.model = WorkersModel(rank, self.tables, self.inner)

    def step(self, clip_norm: float | None = None) -> float | None:
        for each in self.parameters:
            each.grad = torch.ones_like(each)
        return self.model.step(clip_norm)

    @property
    def told(self) -> dict[str, float]:
        """The hyperparameters of its next seal."""
        self.model.take_changes()
        found = self.model.hyperparameters(self.inner.param_groups[0], self.tables[0])
        OptimizerSpec(OptimizerKind.AGGREGATE).merged(found)  # the servers take them
        assert list(found) == sorted(found)
        return dict(found)


def changes(copy: Copy) -> list[str]:
    """What it tells beside its settings."""
    return [name for name in copy.told if name not in settings_of(copy.inner.param_groups[0])]


def test_who_reads_the_state_has_changed_nothing() -> None:
    copy = Copy()
    copy.step()
    assert local_state(copy.inner)  # as `DistributedOptimizer.state` does, at one worker
    assert changes(copy) == []


def test_the_settings_of_a_group_are_told_by_name() -> None:
    told = Copy(betas=(0.5, 0.75)).told
    assert (told["lr"], told["betas[0]"], told["betas[1]"]) == (0.5, 0.5, 0.75)
    assert (told["amsgrad"], told["maximize"]) == (0.0, 0.0)
    assert "params" not in told
    assert Copy().told != Copy(lr=0.25).told
    assert Copy().told == Copy().told


def test_a_rate_in_a_tensor_is_its_number() -> None:
    assert settings_of({"lr": torch.tensor(0.5)}) == {"lr": 0.5}
    assert settings_of({"lr": torch.tensor([0.5])}) == {"lr": 0.5}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("cosine", "linear"),
        (None, True),
        (float("nan"), float("inf")),
        (1e300, 2e300),
        ([0.1, None], [0.1, "x"]),
        (torch.ones(2), None),
    ],
)
def test_settings_that_are_no_numbers_are_told_apart(one: object, other: object) -> None:
    found = [settings_of({"mode": value, "lr": 0.1}) for value in (one, one, other)]
    assert found[0] == found[1] != found[2]
    assert all(name.startswith(("mode", "lr")) for name in found[0])


def test_settings_beyond_what_a_seal_has_room_for_are_told_together() -> None:
    group: dict[str, object] = {f"a{number:02}": number for number in range(40)}
    group["x" * 65] = 1
    found = settings_of(group)
    assert len(found) == 30
    for name in ("a39", "x" * 65):
        assert settings_of({**group, name: -1})["other settings"] != found["other settings"]


def test_a_copy_that_nobody_touches_has_no_changes() -> None:
    copy = Copy()
    assert copy.step() is None
    assert copy.step(1.0) == pytest.approx(3.0**0.5)
    assert changes(copy) == []


def test_changes_are_told_with_their_names_and_from_then_on() -> None:
    one, other = Copy(), Copy()
    for copy in (one, other):
        with torch.no_grad():
            copy.parameters[1].fill_(7.0)
            copy.frozen.fill_(8.0)
        assert changes(copy) == ["changes of 'parameter.1', 'parameter.2'"]
        copy.step()
    assert one.told == other.told
    assert changes(one) == ["changes of 'parameter.1', 'parameter.2'"]
    with torch.no_grad():
        one.parameters[0].mul_(2.0)
    assert changes(one) == ["changes of 'parameter.0'"]
    assert one.told != other.told


def test_other_values_and_another_order_are_told_apart() -> None:
    found = []
    for values in ((1.0, 2.0), (2.0, 1.0), (1.0, 3.0)):
        copy = Copy()
        for value in values:
            with torch.no_grad():
                copy.parameters[0].fill_(value)
            copy.step()
        found.append(tuple(copy.told.items()))
    assert len({*found}) == 3


def test_a_change_while_a_step_was_waited_for_comes_before_it() -> None:
    copy = Copy()
    with torch.no_grad():
        copy.parameters[0].fill_(1.0)
    copy.step()  # whose seal had left
    assert changes(copy) == ["changes of 'parameter.0'"]


def test_loaded_state_is_told() -> None:
    one, other, same = Copy(), Copy(), Copy()
    for copy in (one, other, same):
        copy.step()
    state = one.inner.state_dict()
    one.inner.load_state_dict(state)
    same.inner.load_state_dict(state)
    assert changes(one) == ["loaded optimizer state"]
    assert one.told == same.told
    state["state"][0]["exp_avg"] = torch.zeros(2)
    other.inner.load_state_dict(state)
    assert changes(other) == ["loaded optimizer state"]
    assert one.told != other.told


def test_what_a_new_group_loads_is_no_change_and_what_came_before_is() -> None:
    """Workers that go on from a checkpoint may add it at different steps."""
    copy = Copy()
    new = parameter(4.0)
    copy.inner.add_param_group({"params": [new]})
    tables = trained_tables(Aggregate(lambda _: copy.inner), [new])

    def load() -> None:
        copy.inner.load_state_dict(copy.inner.state_dict())
        with torch.no_grad():
            new.fill_(6.0)

    copy.model.added(tables, load)
    assert changes(copy) == []
    with torch.no_grad():
        copy.parameters[0].fill_(6.0)
    copy.model.added(tables, load)
    assert changes(copy) == ["changes of 'parameter.0'"]


def test_names_are_cut_to_what_a_message_takes() -> None:
    copy = Copy()
    for each in range(50):
        copy.model._add("ü" * each, b"")
        found = copy.model.hyperparameters({}, copy.tables[0])
        OptimizerSpec(OptimizerKind.AGGREGATE).merged(found)
        assert all(len(name.encode()) <= 64 for name, _ in found)


def test_a_lost_update_is_told_by_whoever_lost_it() -> None:
    """Another worker that lost the same one is refused as well: the third has it."""
    table = trained_tables(Aggregate(), [parameter(1.0)])[0].handle.table
    ended, refused, open_ = (PushTicket(table, 1, Future(), lambda: True) for _ in range(3))
    ended.future.set_result(StepResult(1, True, 0))
    refused.future.set_exception(UpdateFailed("no"))
    copies = [Copy(rank) for rank in range(2)]
    copies[0].model.left([refused], is_over=True)
    assert changes(copies[0]) == []
    for copy, tickets in zip(copies, ([refused, ended], [open_]), strict=True):
        copy.model.left(tickets, is_over=True)
    assert changes(copies[1]) == ["an update lost by worker 1"]
    assert copies[0].told != copies[1].told


NAMED = "workers 0 and 1 disagree about clock 3 of table 'model': "


def test_an_error_of_schedules_says_what_parts_them() -> None:
    rates = str(explained(InvalidConfig(f"{NAMED}lr: 0.1 and 0.09")))
    assert rates.startswith(f"{NAMED}lr: 0.1 and 0.09; expected the same at every worker")
    assert "If a schedule steps only where GradScaler did not skip, step it every time" in rates
    assert "last_epoch=optimizer.clock - 1" in rates
    others = str(explained(InvalidConfig(f"{NAMED}momentum: 0.1 and 0.09")))
    assert "expected the same at every worker" in others
    assert "GradScaler" not in others
    assert "client.restore" in others
    assert "last_epoch" not in others
    error = InvalidConfig("lr: is 5")
    assert explained(error) is error


class Late(torch.optim.SGD):
    """Made in a worker that joins others at their third step."""

    clock = 3


def test_the_remedy_for_a_schedule_that_began_anew_works_as_it_is_written() -> None:
    words = str(explained(InvalidConfig(f"{NAMED}lr: 0.1 and 0.09")))
    schedule, begins = re.findall(r"group\.setdefault\(.*?\]\)|LambdaLR\(.*? - 1\)", words)
    optimizer = Late([parameter(1.0)], lr=0.5)
    for group in optimizer.param_groups:
        eval(begins, {"group": group})  # noqa: S307 - our own words
    made = {"LambdaLR": LambdaLR, "optimizer": optimizer, "rate": lambda step: 0.5**step}
    begun = eval(schedule, made)  # noqa: S307
    assert begun.get_last_lr() == [0.5 * 0.5**3]
