"""What scripts do with gradients before the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.idioms.kit import Kit, batches, fit, idiom, loss_of, perceptron


def _fit_with(model: Any, optimizer: Any, change: Any, count: int = 3) -> list[float]:
    """`change` comes between the backward pass and the step."""
    losses = []
    for batch in batches(count):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        change()
        optimizer.step()
        losses.append(loss.item())
    return losses


@idiom("clip_grad_norm_")
def clip_norm(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.5)
    norms: list[torch.Tensor] = []

    def clip() -> None:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    return _fit_with(model, optimizer, clip), norms, model


@idiom("clip_grad_value_")
def clip_value(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.5)
    clip = lambda: nn.utils.clip_grad_value_(model.parameters(), 0.02)  # noqa: E731
    return _fit_with(model, optimizer, clip), model


@idiom("gradients are scaled by hand")
def scaled(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.5)

    def scale() -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(0.25)

    return _fit_with(model, optimizer, scale), model


@idiom("gradients are changed past autograd")
def changed_data(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.5)

    def negate() -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.data.neg_()

    return _fit_with(model, optimizer, negate), model


@idiom("gradients are replaced")
def replaced(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.5)

    def replace() -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad = torch.sign(p.grad)

    return _fit_with(model, optimizer, replace), model


@idiom("gradients are not contiguous")
def transposed(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.5)

    def transpose() -> None:
        weight = model[0].weight
        weight.grad = weight.grad.t().contiguous().t()

    return _fit_with(model, optimizer, transpose), model


@idiom("noise is added to gradients")
def noisy(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "Adam", lr=0.01)
    generator = torch.Generator().manual_seed(3)

    def add() -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad += 0.01 * torch.randn(p.shape, generator=generator)

    return _fit_with(model, optimizer, add), model


@idiom("some gradients are taken away")
def taken_away(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "Adam", lr=0.01, weight_decay=0.1)

    def drop() -> None:
        model[0].weight.grad = None

    return _fit_with(model, optimizer, drop), model


@idiom("gradients are set without a backward pass")
def without_backward(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    losses = []
    for batch in batches(3):
        loss = loss_of(model, batch)
        found = torch.autograd.grad(loss, list(model.parameters()))
        for p, grad in zip(model.parameters(), found, strict=True):
            p.grad = grad
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@idiom("torch.func.grad with functional_call")
def functional(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)

    def loss(named: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(torch.func.functional_call(model, named, (x,)), y)

    for batch in batches(3):
        named = {name: p.detach() for name, p in model.named_parameters()}
        for name, grad in torch.func.grad(loss)(named, *batch).items():
            model.get_parameter(name).grad = grad
        optimizer.step()
    return model


@idiom("accumulation over four batches")
def accumulated(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    losses = []
    for number, batch in enumerate(batches(8)):
        loss = loss_of(model, batch) / 4
        loss.backward()
        losses.append(loss.item())
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


@idiom("accumulation whose last part is short")
def accumulated_short(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    for number, batch in enumerate(batches(5)):
        (loss_of(model, batch) / 3).backward()
        if number % 3 == 2 or number == 4:
            optimizer.step()
            optimizer.zero_grad()
    return model


@idiom("gradients that nobody clears")
def never_cleared(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    for batch in batches(3):
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@idiom("zero_grad that keeps the tensors")
def zeroed(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "Adam", lr=0.01)
    losses = []
    for number, batch in enumerate(batches(3)):
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model, batch) if number else model[2](batch[0].repeat(1, 2)[:, :20]).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@idiom("model.zero_grad()")
def module_zero_grad(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    losses = []
    for batch in batches(3):
        model.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@idiom("zero_grad between forward and backward")
def zero_grad_in_between(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    for batch in batches(3):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@idiom("a backward pass that is thrown away")
def thrown_away(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "Adam", lr=0.01)
    for number, batch in enumerate(batches(4)):
        loss_of(model, batch).backward()
        if number % 2:
            optimizer.step()
        optimizer.zero_grad()
    return model


@idiom("two losses, two backward passes")
def two_losses(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    for batch in batches(3):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        (0.1 * loss).backward()
        optimizer.step()
    return model


@idiom("gradient penalty")
def penalty(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    for x, y in batches(3):
        optimizer.zero_grad()
        x.requires_grad_()
        loss = loss_of(model, (x, y))
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.square().sum()).backward()
        optimizer.step()
    return model


@idiom("backward with create_graph")
def create_graph(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    for batch in batches(2):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        torch.stack([grad.square().sum() for grad in grads]).sum().backward()
        optimizer.step()
    return model


@idiom("hooks on tensors change the gradient")
def tensor_hooks(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    model[0].weight.register_hook(lambda grad: grad * 0.5)
    return fit(model, optimizer), model


@idiom("hooks of parameters once their gradient is whole")
def accumulate_hooks(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)

    def halve(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    return fit(model, optimizer), model


@idiom("hooks of modules change what flows back")
def module_hooks(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    model[1].register_full_backward_hook(lambda *args: (args[1][0] * 2,))
    return fit(model, optimizer), model


@idiom("activation checkpoints")
def recomputed(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    for x, y in batches(3):
        optimizer.zero_grad()
        hidden = checkpoint(model[:2], x, use_reentrant=False)
        nn.functional.mse_loss(model[2](hidden), y).backward()
        optimizer.step()
    return model


@idiom("GradScaler")
def grad_scaler(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for batch in batches(4):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, scaler.get_scale(), model


@idiom("GradScaler, unscale_, clip")
def scaler_and_clip(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in batches(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), model


@idiom("GradScaler skips a step that overflows")
def scaler_skips(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "Adam", lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for number, batch in enumerate(batches(4)):
        optimizer.zero_grad()
        loss = loss_of(model, batch) * (float("inf") if number == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, model


@idiom("autocast to bfloat16")
def autocast(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    losses = []
    for batch in batches(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@idiom("a gradient that is not a number", refused="expected finite values")
def not_a_number(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    (loss_of(model, next(batches(1))) * float("nan")).backward()
    optimizer.step()
    return model


@idiom("anomaly detection")
def anomalies(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        return fit(model, optimizer, 2), model


@idiom("sharpness-aware minimization")
def sharpness_aware(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    for batch in batches(3):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        with torch.no_grad():
            moves = [0.05 * torch.sign(p.grad) for p in model.parameters() if p.grad is not None]
            kept = [p.clone() for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        with torch.no_grad():
            for p, value in zip(model.parameters(), kept, strict=True):
                p.copy_(value)
        optimizer.step()
    return model


@idiom("gradients of one task are projected off the other's")
def projected(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    weights = list(model.parameters())
    for x, y in batches(3):
        first = torch.autograd.grad(loss_of(model, (x, y)), weights)
        second = torch.autograd.grad(model(x).abs().mean(), weights)
        for p, a, b in zip(weights, first, second, strict=True):
            along = (a * b).sum().clamp(max=0) / b.square().sum().clamp(min=1e-6)
            p.grad = a - along * b + b
        optimizer.step()
    return model


@idiom("sparse gradients of an embedding", refused="sparse")
def sparse(kit: Kit) -> Any:
    torch.manual_seed(0)
    table = nn.Embedding(20, 4, sparse=True)
    optimizer = kit.optimizer(table, lr=0.1)
    for ids in ([1, 2, 2], [5, 1]):
        optimizer.zero_grad()
        table(torch.tensor(ids)).square().sum().backward()
        optimizer.step()
    return table


@idiom("gradients of another dtype than their parameter's")
def other_dtype(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    for batch in batches(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(model, batch).backward()
        norms = torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return norms, model


@idiom("gradients as views of one buffer")
def one_buffer(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    weights = list(model.parameters())
    buffer = torch.zeros(sum(p.numel() for p in weights))
    for batch in batches(3):
        buffer.zero_()
        at = 0
        for p in weights:
            p.grad = buffer[at : at + p.numel()].view_as(p)
            at += p.numel()
        loss_of(model, batch).backward()
        buffer.mul_(0.5)
        optimizer.step()
    return model


@idiom("gradients are centralized")
def centralized(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "Adam", lr=0.01)

    def center() -> None:
        for p in model.parameters():
            if p.grad is not None and p.dim() > 1:
                p.grad -= p.grad.mean(1, keepdim=True)

    return _fit_with(model, optimizer, center), model


@idiom("a step is left out when the loss is too high")
def left_out(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, "Adam", lr=0.05)
    taken = []
    for batch in batches(5):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if loss.item() < 1.2:
            optimizer.step()
            taken.append(loss.item())
    return taken, model


@idiom("an exception between backward and step, and on")
def exception_between(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    for number, batch in enumerate(batches(4)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        try:
            if number == 1:
                raise KeyError("the script's own")
        except KeyError:
            continue
        optimizer.step()
    return model


@idiom("a backward pass that raises in the middle, and on")
def backward_raises(kit: Kit) -> Any:
    model = perceptron()
    optimizer = kit.optimizer(model, lr=0.1)
    is_bad = [False]

    def fail(_: torch.Tensor) -> None:
        if is_bad[0]:
            raise MemoryError("out of memory, as a large batch may be")

    model[1].register_forward_hook(lambda *args: args[2].register_hook(fail) and None)
    for number, batch in enumerate(batches(4)):
        optimizer.zero_grad()
        is_bad[0] = number == 1
        try:
            loss_of(model, batch).backward()
        except MemoryError:
            optimizer.zero_grad()
            continue
        optimizer.step()
    return model
