"""One worker on a cluster against one process with torch.optim: the same bits, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

import ps_worker as ps
from tests.integration.hybrid_jobs import InterruptingRate
from tests.integration.training_models import (
    BLOCK,
    Branched,
    batches,
    differing,
    seeded,
    twin,
    values,
)

pytestmark = pytest.mark.slow

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def client() -> Iterator[ps.Client]:
    with (
        ps.local_cluster(servers=2, workers=1) as cluster,
        ps.connect(cluster.address, request_deadline_s=20.0) as client,
    ):
        yield client


class Pair:
    """A model on the cluster and its twin in this process, trained with the same batches."""

    def __init__(
        self,
        client: ps.Client,
        name: str,
        ours: Any,
        theirs: Callable[[Any], torch.optim.Optimizer],
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.model: Any = seeded(Branched) if model is None else model
        self.twin = twin(self.model)
        options = {"kernels": "exact", "block_elements": BLOCK, **options}
        self.optimizer = ps.DistributedOptimizer(client, self.model, ours, name=name, **options)
        self.reference = theirs(self.twin.parameters())

    @property
    def sides(self) -> tuple[tuple[Any, torch.optim.Optimizer], ...]:
        return (self.model, self.optimizer), (self.twin, self.reference)

    def check(self, what: object = "") -> None:
        wrong = differing(values(self.model), values(self.twin))
        assert not wrong, f"{what}: {wrong}"


def squared(model: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x).square().mean()
    return result


CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.3, "amsgrad": True, "maximize": True}),
    ("Adagrad", {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    ("Adagrad", {"lr": 0.05, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{CASES[n][0]}-{n}")
def test_each_optimizer_with_unused_parameters_equals_torch(client: ps.Client, number: int) -> None:
    name, options = CASES[number]
    torchs = partial(getattr(torch.optim, name), **options)
    pair = Pair(client, f"case-{number}", getattr(ps, name)(**options), torchs)
    for step, x in enumerate(batches(5)):
        for model, optimizer in pair.sides:
            optimizer.zero_grad()
            model(x, is_long=step % 2 == 1).square().mean().backward()
            optimizer.step()
        pair.check(step)


@pytest.mark.parametrize("kernels", ["fast", "exact"])
@pytest.mark.parametrize("consistency", [ps.BSP(), ps.ASP()], ids=["bsp", "asp"])
@pytest.mark.parametrize("mode", ["sealed", "eager"])
def test_each_mode_equals_torch(
    client: ps.Client, kernels: str, consistency: ps.Consistency, mode: str
) -> None:
    name = f"mode-{kernels}-{consistency}-{mode}"
    pair = Pair(
        client, name, ps.AdamW(lr=0.01), partial(torch.optim.AdamW, lr=0.01),
        kernels=kernels, consistency=consistency, mode=mode,
    )  # fmt: skip
    for x in batches(4):
        for model, optimizer in pair.sides:
            optimizer.zero_grad()
            squared(model, x).backward()
            optimizer.step()
    for mine, reference in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)
    if kernels == "exact":
        pair.check()


def test_clipping_by_norm_equals_torch(client: ps.Client) -> None:
    pair = Pair(client, "clip", ps.SGD(lr=0.5), partial(torch.optim.SGD, lr=0.5))
    for step, x in enumerate(batches(5)):
        for model, optimizer in pair.sides:
            optimizer.zero_grad()
            squared(model, x).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        pair.check(step)


@pytest.mark.parametrize("clips", [False, True])
def test_gradient_scaler_with_an_overflow_equals_torch(client: ps.Client, clips: bool) -> None:
    pair = Pair(client, f"amp-{clips}", ps.Adam(lr=0.01), partial(torch.optim.Adam, lr=0.01))
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in "ab"]
    for step, x in enumerate(batches(6)):
        for (model, optimizer), scaler in zip(pair.sides, scalers, strict=True):
            optimizer.zero_grad()
            factor = float("inf") if step == 2 else 1.0
            scaler.scale(squared(model, x) * factor).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        pair.check(step)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert not hasattr(pair.optimizer, "found_inf")


@pytest.mark.parametrize("clips", [False, True])
def test_a_loss_scale_does_not_outlive_a_step_that_raises(client: ps.Client, clips: bool) -> None:
    """Steps that are refused or interrupted, and taken by the next call, and one that is not."""
    pair = Pair(client, f"raise-{clips}", ps.SGD(lr=0.1), partial(torch.optim.SGD, lr=0.1))
    group = pair.optimizer.param_groups[0]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in "ab"]
    refused, interrupting = ("fast", ps.InvalidConfig), InterruptingRate(0.1)
    wrong: dict[int, tuple[object, type[BaseException]]] = {
        1: refused,
        2: (interrupting, KeyboardInterrupt),
        3: refused,
    }
    interrupting.left = 1
    for step, x in enumerate(batches(5)):
        for (model, optimizer), scaler in zip(pair.sides, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(squared(model, x)).backward()
            if clips or step == 3:
                scaler.unscale_(optimizer)
            if step in wrong and optimizer is pair.optimizer:
                group["lr"], error = wrong[step]
                with pytest.raises(error):
                    scaler.step(optimizer)
                group["lr"] = 0.1
            if step != 3:
                scaler.step(optimizer)
            scaler.update()
        pair.check(step)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("mode", ["sealed", "eager"])
def test_accumulation_equals_torch(client: ps.Client, accumulate: int, mode: str) -> None:
    pair = Pair(
        client, f"accumulate-{accumulate}-{mode}", ps.SGD(lr=0.1, momentum=0.9),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9), accumulate=accumulate, mode=mode,
    )  # fmt: skip
    for step in range(3):
        for model, optimizer in pair.sides:
            optimizer.zero_grad()
            for x in batches(3, rank=step):
                (squared(model, x) / 3).backward()
            if mode == "eager" and accumulate == 1 and optimizer is pair.optimizer:
                with pytest.raises(ps.GradientChangedAfterPush, match=r"of '.*accumulate="):
                    optimizer.step()
                return
            optimizer.step()
        pair.check(step)


SCHEDULES: list[tuple[Any, Any, Callable[[torch.optim.Optimizer], LRScheduler]]] = [
    (
        ps.SGD(lr=0.1, momentum=0.9),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.3, total_steps=8),
    ),
    (
        ps.Adam(lr=0.1),
        partial(torch.optim.Adam, lr=0.1),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.3, total_steps=8),
    ),
    (
        ps.RMSprop(lr=0.1),
        partial(torch.optim.RMSprop, lr=0.1),
        lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
    ),
]


@pytest.mark.parametrize("mode", ["sealed", pytest.param("eager", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("number", range(len(SCHEDULES)))
def test_schedules_equal_torch(client: ps.Client, number: int, mode: str) -> None:
    ours, theirs, make = SCHEDULES[number]
    pair = Pair(client, f"schedule-{number}-{mode}", ours, theirs, mode=mode, consistency=ps.ASP())
    schedules = [make(optimizer) for _, optimizer in pair.sides]
    for step, x in enumerate(batches(8)):
        for (model, optimizer), schedule in zip(pair.sides, schedules, strict=True):
            optimizer.zero_grad()
            squared(model, x).backward()
            optimizer.step()
            if step < 7:
                schedule.step()
        pair.check(step)


def test_a_closure_and_gradients_kept_as_zeros_equal_torch(client: ps.Client) -> None:
    pair = Pair(
        client, "closure", ps.SGD(lr=0.1, momentum=0.9, weight_decay=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    )  # fmt: skip

    def closure(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
        optimizer.zero_grad(set_to_none=False)
        loss = squared(model, x)
        loss.backward()
        return loss

    for step, x in enumerate(batches(3)):
        losses = [
            optimizer.step(partial(closure, model, optimizer, x)) for model, optimizer in pair.sides
        ]
        assert losses[0] == losses[1]
        pair.check(step)


@pytest.mark.parametrize("theirs", ["NAdam", "SGD"])
def test_aggregate_equals_torch(client: ps.Client, theirs: str) -> None:
    factory = partial(getattr(torch.optim, theirs), lr=0.05, weight_decay=0.1)
    pair = Pair(client, f"aggregate-{theirs}", ps.Aggregate(factory), factory)
    schedules = [StepLR(optimizer, 2, gamma=0.5) for _, optimizer in pair.sides]
    for step, x in enumerate(batches(5)):
        for (model, optimizer), schedule in zip(pair.sides, schedules, strict=True):
            optimizer.zero_grad()
            model(x, is_long=step % 2 == 1).square().mean().backward()
            optimizer.step()
            schedule.step()
        pair.check(step)
    assert pair.model.sometimes.weight.grad is None  # absent from the sum of the last step
    state = pair.optimizer.state_dict()
    assert state["state"].keys() == pair.reference.state_dict()["state"].keys()
    pair.optimizer.load_state_dict(state)
    pair.optimizer.param_groups[0]["lr"] = pair.reference.param_groups[0]["lr"] = 0.001
    for x in batches(2, rank=7):
        for model, optimizer in pair.sides:
            optimizer.zero_grad()
            squared(model, x).backward()
            optimizer.step()
    pair.check("after load_state_dict")


def test_state_dict_has_the_hyperparameters(client: ps.Client) -> None:
    pair = Pair(client, "state", ps.SGD(lr=0.1), partial(torch.optim.SGD, lr=0.1))
    state = pair.optimizer.state_dict()
    assert state["state"] == {}
    assert state["param_groups"][0]["lr"] == 0.1
    state["param_groups"][0]["lr"] = 0.7
    pair.optimizer.load_state_dict(state)
    pair.reference.param_groups[0]["lr"] = 0.7
    for model, optimizer in pair.sides:
        squared(model, next(batches(1))).backward()
        optimizer.step()
    pair.check()
    pair.optimizer.param_groups[0]["nesterov"] = True
    with pytest.raises(ps.InvalidConfig, match="'nesterov' of table"):
        pair.optimizer.step()
