"""Learning-rate schedules and hyperparameters that change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import lr_scheduler as schedules

from tests.idioms.kit import IDIOMS, Idiom, Kit, batches, fit, idiom, loss_of, perceptron


def _with(kit: Kit, *, make: Callable[[Any], Any], kind: str = "SGD", **numbers: Any) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, kind, **numbers)
    schedule = make(optimizer)
    losses, rates = [], []
    for batch in batches(6):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        rates.append([group["lr"] for group in optimizer.param_groups])
    return losses, rates, model


def _warm_then_cosine(optimizer: Any) -> Any:
    warm = schedules.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = schedules.CosineAnnealingLR(optimizer, 3)
    return schedules.SequentialLR(optimizer, [warm, cosine], [3])


def _chained(optimizer: Any) -> Any:
    return schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.5, 2), schedules.ExponentialLR(optimizer, 0.9)]
    )


_SCHEDULES: dict[str, tuple[Callable[[Any], Any], str, dict[str, Any]]] = {
    "StepLR": (lambda o: schedules.StepLR(o, 2), "SGD", {"lr": 0.1}),
    "MultiStepLR": (lambda o: schedules.MultiStepLR(o, [1, 3]), "Adam", {"lr": 0.01}),
    "ExponentialLR": (lambda o: schedules.ExponentialLR(o, 0.8), "AdamW", {"lr": 0.01}),
    "PolynomialLR": (lambda o: schedules.PolynomialLR(o, 5), "SGD", {"lr": 0.1}),
    "CosineAnnealingLR": (lambda o: schedules.CosineAnnealingLR(o, 4), "Adam", {"lr": 0.01}),
    "CosineAnnealingWarmRestarts": (
        lambda o: schedules.CosineAnnealingWarmRestarts(o, 2),
        "SGD",
        {"lr": 0.1},
    ),
    "LambdaLR": (lambda o: schedules.LambdaLR(o, lambda n: 1 / (n + 1)), "SGD", {"lr": 0.1}),
    "MultiplicativeLR": (
        lambda o: schedules.MultiplicativeLR(o, lambda _: 0.7),
        "SGD",
        {"lr": 0.1},
    ),
    "OneCycleLR, which moves momentum too": (
        lambda o: schedules.OneCycleLR(o, 0.2, total_steps=7),
        "SGD",
        {"lr": 0.1, "momentum": 0.9},
    ),
    "OneCycleLR, which moves Adam's betas": (
        lambda o: schedules.OneCycleLR(o, 0.02, total_steps=7),
        "Adam",
        {"lr": 0.01},
    ),
    "CyclicLR": (
        lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=2),
        "SGD",
        {"lr": 0.1, "momentum": 0.8},
    ),
    "a warm-up, then a cosine": (_warm_then_cosine, "AdamW", {"lr": 0.01}),
    "chained schedules": (_chained, "RMSprop", {"lr": 0.01}),
}

IDIOMS.extend(
    Idiom(name, partial(_with, make=make, kind=kind, **numbers))
    for name, (make, kind, numbers) in _SCHEDULES.items()
)


@idiom("ReduceLROnPlateau")
def plateau(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    schedule = schedules.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    rates = []
    for _ in range(3):
        schedule.step(fit(model, optimizer, 1)[0])
        rates.append(optimizer.param_groups[0]["lr"])
    return rates, model


@idiom("learning rates by hand")
def rates_by_hand(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, momentum=0.9, lr=0.1)
    losses = []
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.5**step
            group["momentum"] = 0.9 - 0.1 * step
        losses += fit(model, optimizer, 1, seed=step)
    return losses, model


@idiom("weight decay that changes")
def decay_changes(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "AdamW", lr=0.01)
    losses = []
    for decay in (0.0, 0.1, 0.5):
        optimizer.param_groups[0]["weight_decay"] = decay
        losses += fit(model, optimizer, 1)
    return losses, model


@idiom("a schedule for each group")
def schedule_of_groups(kit: Kit) -> Any:
    model = perceptron()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]
    optimizer = kit.optimizer(groups, module=model, lr=0.1)
    schedule = schedules.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 0.5**n])
    losses = []
    for seed in range(3):
        losses += fit(model, optimizer, 1, seed=seed)
        schedule.step()
    return losses, model


@idiom("a learning rate of zero")
def rate_of_zero(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.0, momentum=0.9)
    losses = fit(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.1
    return losses, fit(model, optimizer, 2), model


@idiom("a schedule is saved and loaded")
def schedule_is_loaded(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    schedule = schedules.CosineAnnealingLR(optimizer, 6)
    losses = []
    for seed in range(4):
        losses += fit(model, optimizer, 1, seed=seed)
        schedule.step()
        if seed == 1:
            saved = schedule.state_dict()
            schedule = schedules.CosineAnnealingLR(optimizer, 6)
            schedule.load_state_dict(saved)
    return losses, optimizer.param_groups[0]["lr"], model


@idiom("averaged weights with their own schedule")
def swa(kit: Kit) -> Any:
    from torch.optim.swa_utils import SWALR, AveragedModel

    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    averaged = AveragedModel(model)
    schedule = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    losses = []
    for seed in range(3):
        losses += fit(model, optimizer, 2, seed=seed)
        averaged.update_parameters(model)
        schedule.step()
    return losses, averaged, model
