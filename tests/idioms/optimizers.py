"""Optimizers and their options."""

from __future__ import annotations

import copy
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import nn

import ps_worker as ps
from tests.idioms.kit import IDIOMS, Idiom, Kit, batches, fit, idiom, loss_of, perceptron

_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD with momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "SGD with Nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD with dampening": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "SGD with weight decay": ("SGD", {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.01}),
    "SGD that maximizes": ("SGD", {"lr": 0.01, "maximize": True}),
    "Adam": ("Adam", {"lr": 0.01}),
    "Adam with betas and eps": ("Adam", {"lr": 0.01, "betas": (0.7, 0.95), "eps": 1e-4}),
    "Adam with weight decay": ("Adam", {"lr": 0.01, "weight_decay": 0.02}),
    "Adam with amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True}),
    "Adam that maximizes": ("Adam", {"lr": 0.01, "maximize": True}),
    "AdamW": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW with amsgrad": ("AdamW", {"lr": 0.01, "amsgrad": True}),
    "Adagrad": ("Adagrad", {"lr": 0.05}),
    "Adagrad with decay": ("Adagrad", {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.01}),
    "Adagrad with an initial sum": ("Adagrad", {"lr": 0.05, "initial_accumulator_value": 0.2}),
    "RMSprop": ("RMSprop", {"lr": 0.01}),
    "RMSprop, centered, with momentum": (
        "RMSprop",
        {"lr": 0.01, "centered": True, "momentum": 0.6, "alpha": 0.9},
    ),
}


def _fits(kit: Kit, *, kind: str, numbers: dict[str, Any]) -> Any:
    model = perceptron()
    return fit(model, kit.optimizer(model, kind, **numbers), 4), model


IDIOMS.extend(
    Idiom(name, partial(_fits, kind=kind, numbers=numbers))
    for name, (kind, numbers) in _OPTIONS.items()
)


@idiom("the optimizer is made of model.parameters()")
def of_parameters(kit: Kit) -> Any:
    model = perceptron()
    return fit(model, kit.optimizer(model.parameters(), "Adam", lr=0.01)), model


@idiom("the optimizer is made of named_parameters()")
def of_named_parameters(kit: Kit) -> Any:
    model = perceptron()
    return fit(model, kit.optimizer(model.named_parameters(), "Adam", lr=0.01)), model


@idiom("groups with learning rates of their own")
def of_groups(kit: Kit) -> Any:
    model = perceptron()
    groups = [
        {"params": model[0].parameters(), "lr": 0.2},
        {"params": model[2].parameters(), "momentum": 0.9},
    ]
    return fit(model, kit.optimizer(groups, module=model, lr=0.05)), model


@idiom("no decay for biases")
def no_decay(kit: Kit) -> Any:
    model = perceptron()
    decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return fit(model, kit.optimizer(groups, "AdamW", module=model, lr=0.01)), model


@idiom("a group is added while it trains")
def group_is_added(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model[0].parameters(), module=model, lr=0.1)
    losses = fit(model, optimizer, 2)
    model[2].zero_grad()  # its gradients have summed up: nobody cleared them
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
    return losses, fit(model, optimizer, 2), model


@idiom("part of a model is trained")
def part_of_a_model(kit: Kit) -> Any:
    model = perceptron()
    return fit(model, kit.optimizer(model[2].parameters(), lr=0.1)), model


@idiom("two optimizers for two parts of a model")
def two_optimizers(kit: Kit) -> Any:
    model = perceptron()
    first = kit.optimizer(model[0], lr=0.1)
    second = kit.optimizer(model[2], "Adam", lr=0.01)
    losses = []
    for batch in batches(3):
        first.zero_grad()
        second.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        first.step()
        second.step()
        losses.append(loss.item())
    return losses, model


@idiom("generator and discriminator")
def adversaries(kit: Kit) -> Any:
    torch.manual_seed(3)
    generator, critic = (
        nn.Linear(4, 12),
        nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1)),
    )
    makes, judges = kit.optimizer(generator, "Adam"), kit.optimizer(critic, "Adam")
    losses = []
    for x, _ in batches(3):
        noise = x[:, :4]
        judges.zero_grad()
        (critic(generator(noise).detach()) - critic(x)).mean().backward()
        judges.step()
        makes.zero_grad()
        loss = -critic(generator(noise)).mean()
        loss.backward()
        makes.step()
        losses.append(loss.item())
    return losses, generator, critic


@idiom("step with a closure")
def with_a_closure(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "Adam", lr=0.01)
    losses = []
    for batch in batches(3):

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        losses.append(torch.as_tensor(optimizer.step(closure)).item())
    return losses, model


@idiom("a step without a backward pass")
def step_without_backward(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "Adam", lr=0.01)
    losses = fit(model, optimizer, 2)
    optimizer.zero_grad()
    optimizer.step()
    return losses, fit(model, optimizer, 1), model


@idiom("step is called twice for one backward pass")
def step_twice(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, momentum=0.9, lr=0.05)
    for batch in batches(2):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.step()
    return model


@idiom("hooks of the optimizer")
def optimizer_hooks(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    heard: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    return fit(model, optimizer, 2), heard, model


@idiom("each worker's own torch optimizer behind the servers' sums")
def aggregate(kit: Kit) -> Any:
    model = perceptron()
    return fit(model, kit.local(model, ps.Aggregate, torch.optim.NAdam, lr=0.01)), model


@idiom("an optimizer that torch alone has, behind the servers' sums")
def aggregate_adamax(kit: Kit) -> Any:
    model = perceptron()
    return fit(model, kit.local(model, ps.Aggregate, torch.optim.Adamax, lr=0.01)), model


@idiom("learning rates as tensors")
def tensor_rates(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "SGD", lr=0.1)
    losses = fit(model, optimizer, 1)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.05)
    return losses, fit(model, optimizer, 2), model


@idiom("optimizer state is thrown away", refused=r"To begin anew, .* load_state_dict")
def state_thrown_away(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "Adam", lr=0.01)
    losses = fit(model, optimizer, 2)
    optimizer.state = defaultdict(dict)
    return losses, fit(model, optimizer, 2), model


@idiom("optimizer state begins anew by load_state_dict")
def state_begins_anew(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "Adam", lr=0.01)
    losses = fit(model, optimizer, 2)
    optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
    return losses, fit(model, optimizer, 2), model


@idiom("the state of a local optimizer is thrown away")
def local_state_thrown_away(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.local(model, ps.Aggregate, torch.optim.Adam, lr=0.01)
    losses = fit(model, optimizer, 2)
    optimizer.state = defaultdict(dict)
    losses += fit(model, optimizer, 2)
    optimizer.state.clear()
    return losses, fit(model, optimizer, 2), model


@idiom("state by names, as torch.distributed.checkpoint has it")
def state_by_names(kit: Kit) -> Any:
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model: Any = perceptron(3)
    first: Any = kit.optimizer(model[0], "Adam", lr=0.01)
    second = kit.local(model[2], ps.Aggregate, torch.optim.SGD, lr=0.1, momentum=0.9)
    if kit.client is not None:  # torch takes a step to make state
        for optimizer, part in ((first, model[0]), (second, model[2])):
            assert get_optimizer_state_dict(part, optimizer)["state"] == {}
            assert optimizer.clock == 0
    for batch in batches(2):
        first.zero_grad()
        second.zero_grad()
        loss_of(model, batch).backward()
        first.step()
        second.step()
    saved = copy.deepcopy(get_optimizer_state_dict(model[0], first))  # torch gives its own tensors
    losses = fit(model[0], first, 2)
    set_optimizer_state_dict(model[0], first, copy.deepcopy(saved))
    return losses, fit(model[0], first, 2), saved["state"], model
