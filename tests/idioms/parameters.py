"""What scripts do to parameters beside training them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ps_worker as ps
from tests.idioms.kit import IDIOMS, Idiom, Kit, batches, fit, idiom, loss_of, perceptron


def _edited(kit: Kit, *, edit: Callable[[Any], object], kind: str = "SGD", **numbers: Any) -> Any:
    """Two steps, an edit, two steps."""
    model = perceptron()
    optimizer = kit.optimizer(model, kind, **numbers)
    losses = fit(model, optimizer, 2)
    with torch.no_grad():
        edit(model)
    return losses, fit(model, optimizer, 2), model


def _set_data(model: Any) -> None:
    model[0].weight.data = torch.full_like(model[0].weight, 0.125)


def _reset(model: Any) -> None:
    torch.manual_seed(11)
    model[2].reset_parameters()


def _initialize(model: Any) -> None:
    torch.manual_seed(11)
    nn.init.xavier_uniform_(model[0].weight)


_EDITS: dict[str, Callable[[Any], object]] = {
    "load_state_dict between steps": lambda m: m.load_state_dict(perceptron(seed=5).state_dict()),
    "load_state_dict of a part": lambda m: m.load_state_dict(
        {"0.bias": torch.ones(20)}, strict=False
    ),
    "fill_ past autograd": lambda m: m[0].weight.data.fill_(0.25),
    "another tensor as data": _set_data,
    "nn.init between steps": _initialize,
    "a layer is made anew": _reset,
    "clamp_ between steps": lambda m: [p.clamp_(-0.05, 0.05) for p in m.parameters()],
    "one row is set to zero": lambda m: m[0].weight[3].zero_(),
    "weights are renormed": lambda m: m[0].weight.copy_(m[0].weight.renorm(2, 0, 0.1)),
    "a vector is written back": lambda m: vector_to_parameters(
        parameters_to_vector(m.parameters()) * 0.5, m.parameters()
    ),
    "numpy writes into a parameter": lambda m: m[0].bias.numpy().fill(0.5),
}

IDIOMS.extend(
    Idiom(name, partial(_edited, edit=edit, kind="Adam", lr=0.01)) for name, edit in _EDITS.items()
)


@idiom("weights are clamped after every step")
def clamped(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "RMSprop", lr=0.01)
    losses = []
    for seed in range(3):
        losses += fit(model, optimizer, 1, seed=seed)
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)
    return losses, model


@idiom("an average of weights beside training")
def average(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    averaged = copy.deepcopy(model)
    for seed in range(3):
        fit(model, optimizer, 1, seed=seed)
        with torch.no_grad():
            for mine, theirs in zip(averaged.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
    return averaged, model


@idiom("AveragedModel with an exponential average")
def averaged_model(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for seed in range(3):
        fit(model, optimizer, 1, seed=seed)
        averaged.update_parameters(model)
    return averaged, model


@idiom("averaged weights are swapped in for an evaluation")
def swapped(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    averaged = [p.detach().clone() for p in model.parameters()]
    losses = []
    for seed in range(3):
        losses += fit(model, optimizer, 1, seed=seed)
        with torch.no_grad():
            kept = [p.clone() for p in model.parameters()]
            for p, mean in zip(model.parameters(), averaged, strict=True):
                mean.lerp_(p, 0.2)
                p.copy_(mean)
            losses.append(loss_of(model, next(batches(1))).item())
            for p, value in zip(model.parameters(), kept, strict=True):
                p.copy_(value)
    return losses, model


@idiom("averaged weights are copied back")
def copied_back(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "Adam", lr=0.01)
    averaged = AveragedModel(model)
    for seed in range(3):
        fit(model, optimizer, 1, seed=seed)
        averaged.update_parameters(model)
    model.load_state_dict(averaged.module.state_dict())
    return fit(model, optimizer, 2), model


@idiom("slow weights that look ahead")
def lookahead(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.2)
    slow = [p.detach().clone() for p in model.parameters()]
    for seed in range(2):
        fit(model, optimizer, 2, seed=seed)
        with torch.no_grad():
            for mine, p in zip(slow, model.parameters(), strict=True):
                mine.lerp_(p, 0.5)
                p.copy_(mine)
    return model


@idiom("the best weights are loaded again")
def best_again(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    fit(model, optimizer, 2)
    best = copy.deepcopy(model.state_dict())
    fit(model, optimizer, 2, seed=8)
    model.load_state_dict(best)
    return loss_of(model, next(batches(1))).item(), fit(model, optimizer, 1), model


@idiom("a model is saved and loaded in the middle")
def saved_model(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    fit(model, optimizer, 2)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    fit(model, optimizer, 1)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    return fit(model, optimizer, 2), model


@idiom("a whole model is saved")
def whole_model(kit: Kit) -> Any:
    model = perceptron()
    fit(model, kit.optimizer(model, lr=0.1), 2)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False), model


@idiom("a copy of the model is evaluated")
def copied(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    losses = fit(model, optimizer, 2)
    snapshot = copy.deepcopy(model)
    fit(model, optimizer, 1)
    return losses, loss_of(snapshot, next(batches(1))).item(), snapshot, model


@idiom("layers are frozen")
def frozen(kit: Kit) -> Any:
    model = perceptron()
    model[0].requires_grad_(False)
    return fit(model, kit.optimizer(model, "AdamW", lr=0.01)), model


@idiom("layers are frozen and thawed again")
def thawed(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "Adam", lr=0.01)
    losses = fit(model, optimizer, 1)
    model[0].requires_grad_(False)
    losses += fit(model, optimizer, 1)
    model[0].requires_grad_(True)
    return losses, fit(model, optimizer, 2), model


@idiom("only what is trainable is given to the optimizer")
def trainable_alone(kit: Kit) -> Any:
    model = perceptron()
    model[0].requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return fit(model, kit.optimizer(trainable, "Adam", module=model, lr=0.01)), model


@idiom("pruned weights")
def pruned(kit: Kit) -> Any:
    model = perceptron()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    losses = fit(model, kit.optimizer(model, lr=0.1))
    prune.remove(model[0], "weight")
    return losses, model


@idiom("weights in float64")
def doubles(kit: Kit) -> Any:
    model = perceptron().double()
    optimizer = kit.optimizer(model, "Adam", lr=0.01)
    for x, y in batches(3):
        optimizer.zero_grad()
        loss_of(model, (x.double(), y.double())).backward()
        optimizer.step()
    return model


@idiom("a parameter that is a number")
def scalar(kit: Kit) -> Any:
    model = perceptron()
    temperature = nn.Parameter(torch.tensor(1.5))
    groups = [*model.named_parameters(), ("temperature", temperature)]
    optimizer = kit.optimizer(groups, lr=0.1)
    for x, y in batches(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x) * temperature, y).backward()
        optimizer.step()
    return temperature, model


@idiom("a parameter without elements")
def empty(kit: Kit) -> Any:
    model = perceptron()
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 3)))
    return fit(model, kit.optimizer(model, lr=0.1)), model


@idiom("a parameter that is not contiguous")
def strided(kit: Kit) -> Any:
    model = perceptron()
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    return fit(model, kit.optimizer(model, "Adam", lr=0.01)), model


@idiom("complex parameters", refused="complex")
def complex_parameters(kit: Kit) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 2, dtype=torch.complex64)
    optimizer = kit.optimizer(model, lr=0.1)
    model(torch.randn(3, 4, dtype=torch.complex64)).abs().sum().backward()
    optimizer.step()
    return model


@idiom("gradients that a forward hook's tensor collects")
def watched(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    seen: list[torch.Tensor] = []
    model[1].register_forward_hook(lambda *args: seen.append(args[2].detach().clone()))
    return fit(model, optimizer), seen, model


@idiom("evaluation between steps")
def evaluated(kit: Kit) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = kit.optimizer(model, lr=0.1)
    found = []
    for seed in range(3):
        model.train()
        torch.manual_seed(seed)
        found += fit(model, optimizer, 1, seed=seed)
        model.eval()
        with torch.inference_mode():
            found.append(loss_of(model, next(batches(1))).item())
    return found, model


@idiom("a rate is searched for, and everything put back")
def rate_finder(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    kept, groups = copy.deepcopy(model.state_dict()), optimizer.param_groups[0]["lr"]
    found = []
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.01 * 4**step
        found += fit(model, optimizer, 1, seed=step)
    model.load_state_dict(kept)
    optimizer.param_groups[0]["lr"] = groups
    return found, fit(model, optimizer), model


@idiom("set_ swaps a parameter's storage")
def swapped_storage(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    losses = fit(model, optimizer, 1)
    with torch.no_grad():
        model[2].bias.set_(torch.ones(3))
    return losses, fit(model, optimizer, 2), model


@idiom("a parameter is replaced by another object")
def replaced_parameter(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    fit(model, optimizer, 1)
    model[0].weight = nn.Parameter(torch.zeros(20, 12))
    return fit(model, optimizer, 2), model


@idiom(
    "a parameter takes the place of another in its group", refused="close.* another with a name="
)
def replaced_in_group(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    fit(model, optimizer, 1)
    grown = nn.Parameter(torch.zeros(20, 12))
    optimizer.param_groups[0]["params"][0] = model[0].weight = grown
    return fit(model, optimizer, 2), model


@idiom("parameters are appended to a group", refused="Give further ones to add_param_group")
def appended_to_group(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.local(model[0], ps.Add, torch.optim.SGD, lr=0.1)
    fit(model, optimizer, 1)
    optimizer.param_groups[0]["params"].extend(model[2].parameters())
    return fit(model, optimizer, 2), model


@idiom(
    "a model is moved to another dtype after its optimizer was made",
    refused=r"model.double\(\).* before its optimizer is made",
)
def moved(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    model.double()
    for x, y in batches(2):
        optimizer.zero_grad()
        loss_of(model, (x.double(), y.double())).backward()
        optimizer.step()
    return model


@idiom("weights in a memory map that is shared")
def shared_memory(kit: Kit) -> Any:
    model = perceptron().share_memory()
    return fit(model, kit.optimizer(model, lr=0.1)), model


@idiom("parameters of an optimizer that is made anew half-way")
def made_anew(kit: Kit) -> Any:
    model = perceptron()
    losses = fit(model, kit.optimizer(model, "Adam", lr=0.01), 2)
    return losses, fit(model, kit.optimizer(model, lr=0.1), 2), model


@idiom("two models, one after the other")
def one_after_the_other(kit: Kit) -> Any:
    first, second = perceptron(), perceptron(8, seed=2)
    losses = fit(first, kit.optimizer(first, lr=0.1), 2)
    return losses, fit(second, kit.optimizer(second, "Adam", lr=0.01), 2), first, second


@idiom("weights in bfloat16, whose masters are float32")
def half_precision(kit: Kit) -> Any:
    """Where torch.optim would round every update to bfloat16, the servers keep float32 masters: as
    a script does that has a float32 copy of its own.
    """
    model = perceptron().bfloat16()
    has_masters = kit.client is not None
    masters = model if has_masters else copy.deepcopy(model).float()
    optimizer = kit.optimizer(masters, "Adam", lr=0.01)
    for x, y in batches(4):
        model.zero_grad()
        loss_of(model, (x.bfloat16(), y.bfloat16())).backward()
        if not has_masters:
            for p, master in zip(model.parameters(), masters.parameters(), strict=True):
                assert p.grad is not None
                master.grad = p.grad.float()
        optimizer.step()
        if not has_masters:
            model.load_state_dict(masters.state_dict())
    return model


@idiom("memory format changes after the optimizer was made")
def reformatted(kit: Kit) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 2), nn.Flatten(), nn.Linear(8, 3))
    optimizer = kit.optimizer(model, lr=0.1)
    model.to(memory_format=torch.channels_last)
    for x, y in batches(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.view(-1, 3, 2, 2)), y).backward()
        optimizer.step()
    return model


@idiom("the optimizer's state is saved and loaded")
def optimizer_state(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "Adam", lr=0.01)
    fit(model, optimizer, 2)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    fit(model, optimizer, 2, seed=9)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return fit(model, optimizer, 2), model


@idiom("frozen layers are loaded")
def frozen_loaded(kit: Kit) -> Any:
    model = perceptron()
    model[0].requires_grad_(False)
    optimizer = kit.optimizer(model, "Adam", lr=0.01)
    losses = fit(model, optimizer, 2)
    model.load_state_dict(perceptron(seed=5).state_dict())
    losses += fit(model, optimizer, 1)
    model[0].requires_grad_(True)
    return losses, fit(model, optimizer, 2), model


@idiom("every layer is frozen, and a head is put on")
def frozen_whole(kit: Kit) -> Any:
    model, head = perceptron(), nn.Linear(3, 3)
    nn.init.eye_(head.weight)
    nn.init.zeros_(head.bias)
    model.requires_grad_(False)
    both = nn.Sequential(model, head)
    optimizer = kit.optimizer(both, lr=0.1)
    losses = fit(both, optimizer, 2)
    with torch.no_grad():
        model[2].weight.mul_(0.5)
    return losses, fit(both, optimizer, 2), both
