"""Hugging Face Accelerate, as its users write it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset

from tests.idioms.framework_parts import enter, folder, loader, noisy
from tests.idioms.kit import Kit, batches, loss_of, perceptron


def _accelerator(**given: Any) -> Any:
    """One of this run alone: its settings are the process's otherwise."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **given)


def _prepared(kit: Kit, accelerator: Any, make: Callable[[], Any], data: Any) -> Any:
    model = make()
    optimizer = kit.optimizer(model, "Adam", lr=0.01)
    schedule = schedules.LambdaLR(optimizer, lambda n: 1.0 / (1 + n))
    return accelerator.prepare(model, optimizer, data, schedule)


def _trains(
    kit: Kit,
    *,
    make: Callable[[], Any] = perceptron,
    norm: float = 0.0,
    value: float = 0.0,
    every: int = 1,
    **given: Any,
) -> Any:
    accelerator = _accelerator(gradient_accumulation_steps=every, **given)
    model, optimizer, data, schedule = _prepared(kit, accelerator, make, loader())
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients and norm:
                accelerator.clip_grad_norm_(model.parameters(), norm)
            if accelerator.sync_gradients and value:
                accelerator.clip_grad_value_(model.parameters(), value)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
    return losses, schedule.get_last_lr(), accelerator.unwrap_model(model)


def _judges(kit: Kit) -> Any:
    """All of a validation whose last batch is a short one, between the epochs."""
    accelerator = _accelerator()
    model, optimizer, data, schedule = _prepared(kit, accelerator, noisy, loader(3))
    (rows,) = batches(1, rows=10, seed=9)
    judged = accelerator.prepare(DataLoader(TensorDataset(*rows), batch_size=4))
    found = []
    for _ in range(2):
        model.train()
        for batch in data:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            guesses = [accelerator.gather_for_metrics((model(x), y)) for x, y in judged]
        assert sum(len(guess) for guess, _ in guesses) == 10
        found.append(torch.cat([guess for guess, _ in guesses]))
    return found, accelerator.unwrap_model(model)


def _goes_back(kit: Kit) -> Any:
    """What was saved after two steps is loaded after four, and trained on from."""
    accelerator = _accelerator()
    model, optimizer, data, schedule = _prepared(kit, accelerator, noisy, loader())
    losses: list[float] = []

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())

    with folder() as path:
        for number, batch in enumerate(data):
            if number == 2:
                accelerator.save_state(str(path))
            if number == 4:
                accelerator.load_state(str(path))
            step(batch)
    return losses, schedule.get_last_lr(), accelerator.unwrap_model(model)


enter(
    {
        "Accelerate: prepare and backward": _trains,
        "Accelerate: batches are accumulated": partial(_trains, every=3),
        "Accelerate: clip_grad_norm_": partial(_trains, norm=0.1),
        "Accelerate: clip_grad_value_": partial(_trains, value=0.01),
        "Accelerate: batches are accumulated and clipped": partial(_trains, every=4, norm=0.1),
        "Accelerate: mixed precision": partial(_trains, mixed_precision="bf16", norm=0.1),
        "Accelerate: gather_for_metrics of a validation": _judges,
        "Accelerate: load_state in the middle": _goes_back,
    }
)
