"""What a script does to its parameters between two steps, and workers that do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker as ps
from tests.integration.training_jobs import Values, optimizer_for
from tests.integration.training_models import Branched, batches, seeded, values


def load(model: nn.Module) -> None:
    """Values of another model."""
    model.load_state_dict(seeded(Branched, seed=77).state_dict())


def fill(model: Any) -> None:
    """Past autograd's version counter."""
    model.first.weight.data.fill_(0.25)


def initialise(model: Any) -> None:
    """Anew, as every rank does with one seed."""
    torch.manual_seed(5)
    nn.init.orthogonal_(model.sometimes.weight)
    nn.init.zeros_(model.last.bias)


def clamp(model: nn.Module) -> None:
    """All of it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)


def swap_data(model: Any) -> None:
    """Another tensor's memory, laid out otherwise."""
    model.sometimes.weight.data = torch.linspace(-0.5, 0.5, 400).reshape(20, 20).t()


def copy_average(model: nn.Module) -> None:
    """An average of weights becomes the weights."""
    averaged = torch.optim.swa_utils.AveragedModel(seeded(Branched, seed=3))
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), averaged.module.parameters(), strict=True):
            ours.copy_((ours + theirs) / 2)


EDITS: dict[str, Callable[[Any], None]] = {
    "load_state_dict": load,
    "data.fill_": fill,
    "nn.init": initialise,
    "clamp_": clamp,
    "data = other": swap_data,
    "copy_": copy_average,
}


def train_edited(
    client: ps.Client, name: str, edits: dict[int, str], *, late: bool = False, **options: Any
) -> list[Values]:
    """The parameters after each of four steps.

    Args:
        client: the worker's.
        name: the optimizer's.
        edits: before which steps what is done.
        late: it is done after backward, when gradients have left.
        options: the optimizer's.
    """
    model = seeded(Branched, seed=client.rank)
    optimizer = optimizer_for(client, model, name=name, **options)
    history = []
    for step, x in enumerate(batches(4, rank=client.rank)):
        optimizer.zero_grad()
        if step in edits and not late:
            EDITS[edits[step]](model)
        model(x, is_long=(step * client.rank) % 2 == 0).square().mean().backward()
        if step in edits and late:
            EDITS[edits[step]](model)
        optimizer.step()
        history.append(values(model))
    optimizer.close()
    return history


def mask(model: Any) -> None:
    """Prune a part of a parameter, whose other elements stay as they are."""
    with torch.no_grad():
        model.first.weight[:4] = 0.0


def train_masked(
    client: ps.Client, name: str, dtype: torch.dtype, update: Any, **options: Any
) -> Values:
    """The parameters after twenty steps, with the mask before each."""
    model = seeded(Branched).to(dtype)
    optimizer = ps.DistributedOptimizer(
        client, model, update, name=name, kernels="exact", block_elements=64, **options
    )
    for x in batches(20, rank=client.rank):
        mask(model)
        optimizer.zero_grad()
        model(x.to(dtype)).square().mean().backward()
        optimizer.step()
    optimizer.close()
    return values(model)


def one_step(model: Any, optimizer: ps.DistributedOptimizer, x: torch.Tensor) -> str:
    """What a step was refused with; empty if it was taken."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    try:
        optimizer.step()
    except ps.EditRefused as error:
        return str(error)
    return ""


def differ(
    client: ps.Client, name: str, edits: dict[int, str], remedy: str, **options: Any
) -> tuple[str, Values, Values, list[str], Values]:
    """Each rank has its own edit before the second of five steps, and what mends it after that.

    Returns:
        What it was told; the parameters right after that, and before the step; what the next two
        steps were told; the parameters in the end.
    """
    model = seeded(Branched)
    optimizer = optimizer_for(client, model, name=name, **options)
    inputs = list(batches(5, rank=client.rank))
    one_step(model, optimizer, inputs[0])
    undone = values(model)
    if client.rank in edits:
        EDITS[edits[client.rank]](model)
    edited = values(model)
    told = one_step(model, optimizer, inputs[1])
    after = values(model)
    if remedy != "undo":
        EDITS[remedy](model)
    elif client.rank in edits:
        model.load_state_dict(undone)
    later = [one_step(model, optimizer, x) for x in inputs[2:]]
    optimizer.close()
    return told, edited, after, later, values(model)


def train_clamped(client: ps.Client, name: str, **options: Any) -> tuple[list[Values], int]:
    """The parameters after each of four steps, clamped by the servers and, to no effect, by the
    script; and the clock in the end.
    """
    model = seeded(Branched)
    optimizer = optimizer_for(client, model, name=name, **options)
    history = []
    for x in batches(4, rank=client.rank):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        clamp(model)
        history.append(values(model))
    clock = optimizer.clock
    optimizer.close()
    return history, clock


def edit_frozen(client: ps.Client, name: str, how: str) -> tuple[Values, Values, str]:
    """What this worker has, and what the servers have, once frozen parameters were changed; and
    what was refused.

    Args:
        client: the worker's.
        name: the optimizer's.
        how: "load": with all others; "apart": by rank 1 alone; "thaw": past autograd, and then they
            are frozen no more; "meet": past autograd, and synchronize has refused it before.
    """
    model = seeded(Branched)
    model.first.requires_grad_(False)
    optimizer = optimizer_for(client, model, name=name)
    refused = ""
    for step, x in enumerate(batches(4)):
        optimizer.zero_grad()
        if step == 2 and how == "load":
            load(model)
        if step == 2 and how == "apart" and client.rank == 1:
            nn.init.zeros_(model.first.weight)
        if step == 2 and how == "thaw":
            fill(model)
            model.first.requires_grad_(True)
        if step == 2 and how == "meet":
            model.first.weight.data.fill_(0.25)
            with pytest.raises(ps.EditRefused, match="or take a step"):
                optimizer.synchronize()
        model(x).square().mean().backward()
        try:
            optimizer.step()
        except ps.EditRefused as error:
            refused = error.message
            break
        if how == "meet":
            optimizer.synchronize()
    served: Values = {}
    if not refused:
        served = {
            entry.name: torch.as_tensor(client.pull(table.handle, slice=entry.name))
            for table in optimizer._tables
            for entry in table.layout.placed
        }
    return values(model), served, refused


def load_and_train(client: ps.Client, state: dict[str, Any] | None) -> list[Values]:
    """The parameters after each of four steps of a worker that loads, first of all, a model, and
    optimizer state if there is any; then it ends as one that failed.
    """
    model = seeded(Branched)
    optimizer = optimizer_for(client, model, optimizer=ps.AdamW(lr=0.01))
    load(model)
    if state is not None:
        optimizer.load_state_dict(state)
    history = []
    for x in batches(4, rank=client.rank):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        history.append(values(model))
    client.abandon("to be started again")
    return history
