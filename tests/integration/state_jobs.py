"""What workers do with optimizer state, and one process that does the same with torch alone."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import ps_worker as ps
from tests.integration.training_jobs import Values, optimizer_for
from tests.integration.training_models import Branched, batches, seeded, values

STEPS = 6
StateDict = dict[str, Any]

PAIRS: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (ps.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        ps.SGD(lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "adam": (ps.Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    "amsgrad": (
        ps.AdamW(lr=0.01, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    ),
    "adagrad": (
        ps.Adagrad(lr=0.05, initial_accumulator_value=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    ),
    "rmsprop": (
        ps.RMSprop(lr=0.01, momentum=0.5, centered=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    ),
}


def is_long(step: int, rank: int, first_at: int = 0) -> bool:
    """Whether a rank's step uses the branch: at first nobody's does, until step `first_at`."""
    return step >= first_at and (step * rank) % 2 == 0


@dataclass
class OneProcess:
    """All workers' gradients, and torch's own optimizer."""

    kind: str
    worker_count: int = 2
    first_at: int = 0
    model: Any = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.model = seeded(Branched)
        self.optimizer = PAIRS[self.kind][1](self.model.parameters())

    def train(self, first: int, last: int) -> list[Values]:
        """The parameters after each of these steps."""
        inputs = [list(batches(STEPS, rank=rank)) for rank in range(self.worker_count)]
        history = []
        for step in range(first, last):
            sums: dict[torch.Tensor, torch.Tensor] = {}
            for rank in range(self.worker_count):
                self.model.zero_grad()
                x, uses = inputs[rank][step], is_long(step, rank, self.first_at)
                self.model(x, is_long=uses).square().mean().backward()
                for p in self.model.parameters():
                    if p.grad is not None:
                        sums[p] = sums[p] + p.grad if p in sums else p.grad.clone()
            for p in self.model.parameters():
                p.grad = sums[p] * torch.tensor(1.0 / self.worker_count) if p in sums else None
            self.optimizer.step()
            history.append(values(self.model))
        return history


def checkpoint(client: ps.Client) -> None:
    """The cluster's own, of all workers' newest step."""
    client.checkpoint().wait()


def copied(state: Any) -> Any:
    """As a script's own torch.save and torch.load leave it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def train(
    client: ps.Client,
    name: str,
    kind: str,
    steps: tuple[int, int],
    *,
    saved: tuple[StateDict, StateDict] | None = None,
    first_at: int = 0,
    **options: Any,
) -> tuple[list[Values], StateDict, StateDict]:
    """The parameters after each step, and what a script saves in the end.

    Args:
        client: the worker's.
        name: the optimizer's.
        kind: which of `PAIRS`.
        steps: from which to which.
        saved: of the model, loaded before the optimizer is made, and of the optimizer.
        first_at: as `is_long`.
        options: the optimizer's.
    """
    model = seeded(Branched)
    if saved is not None:
        model.load_state_dict(saved[0])
    optimizer = optimizer_for(client, model, name=name, optimizer=PAIRS[kind][0], **options)
    if saved is not None:
        optimizer.load_state_dict(saved[1])
    history = []
    for step, x in list(enumerate(batches(STEPS, rank=client.rank)))[slice(*steps)]:
        optimizer.zero_grad()
        uses = is_long(step, client.rank, first_at)
        model(x, is_long=uses).square().mean().backward()
        optimizer.step()
        history.append(values(model))
    kept = copied({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    optimizer.close()
    return history, kept["model"], kept["optimizer"]


def one_step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> str:
    """What a step was refused with; empty if it was taken."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    try:
        optimizer.step()
    except ps.PushpullError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def load_apart(
    client: ps.Client, name: str, saved: dict[int, StateDict], common: StateDict, **options: Any
) -> tuple[list[str], list[StateDict]]:
    """Some ranks load before the second step; before the third all load the same.

    Returns:
        What each step, or the load before it, was refused with; the optimizer's state after each.
    """
    model = seeded(Branched)
    optimizer = optimizer_for(client, model, name=name, optimizer=PAIRS["adam"][0], **options)
    told, states = [], []
    for step, x in enumerate(batches(3, rank=client.rank)):
        try:
            if step and (step == 2 or client.rank in saved):
                optimizer.load_state_dict(common if step == 2 else saved[client.rank])
        except ps.EditRefused as error:
            told.append(f"load: {error}")
        told.append(one_step(model, optimizer, x))
        states.append(copied(optimizer.state_dict()))
    optimizer.close()
    return told, states


_kept: dict[str, tuple[Any, ps.DistributedOptimizer, Any]] = {}


def load_and_wait(client: ps.Client, name: str, saved: StateDict) -> str:
    """All load; only rank 0 takes the step."""
    model = seeded(Branched)
    optimizer = optimizer_for(client, model, name=name, optimizer=PAIRS["adam"][0])
    optimizer.load_state_dict(saved)
    inputs = list(batches(2, rank=client.rank))
    _kept[name] = model, optimizer, inputs
    return one_step(model, optimizer, inputs[0]) if client.rank == 0 else ""


def go_on(client: ps.Client, name: str) -> tuple[str, str, Values, StateDict]:
    """Rank 0's step is repeated, and another follows."""
    model, optimizer, inputs = _kept.pop(name)
    told = one_step(model, optimizer, inputs[0])
    told_next = one_step(model, optimizer, inputs[1])
    found = copied(optimizer.state_dict())
    optimizer.close()
    return told, told_next, values(model), found


def look(client: ps.Client, name: str, saved: StateDict) -> dict[str, Any]:
    """What a script sees of an optimizer without taking a step."""
    optimizer = optimizer_for(client, seeded(Branched), name=name, optimizer=PAIRS["adam"][0])
    schedule = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.5)
    fresh = copied(optimizer.state_dict())
    optimizer.load_state_dict(fresh)
    is_pending = optimizer._model.loaded is not None
    problems = {}
    acts: dict[str, Callable[[], Any]] = {
        "deepcopy": lambda: copy.deepcopy(optimizer),
        "torch.save": lambda: torch.save(optimizer, io.BytesIO()),
    }
    for what, act in acts.items():
        try:
            act()
        except TypeError as error:
            problems[what] = str(error)
    optimizer.load_state_dict(saved)
    loaded = copied(optimizer.state_dict())
    schedule.step()
    rate = optimizer.param_groups[0]["lr"]
    optimizer.close()
    return {
        "fresh": fresh, "is_pending": is_pending, "problems": problems, "loaded": loaded,
        "rate": rate,
    }  # fmt: skip


def refuse(client: ps.Client, name: str, saved: dict[str, StateDict], kind: str) -> dict[str, str]:
    """What each of these is refused with."""
    model = seeded(Branched)
    model.last.bias.requires_grad_(False)
    optimizer = optimizer_for(client, model, name=name, optimizer=PAIRS[kind][0])
    told = {}
    for what, state in saved.items():
        before = copy.deepcopy([{**g, "params": 0} for g in optimizer.param_groups])
        try:
            optimizer.load_state_dict(state)
            told[what] = ""
        except ps.PushpullError as error:
            told[what] = f"{type(error).__name__}: {error}"
            assert [{**g, "params": 0} for g in optimizer.param_groups] == before
            assert optimizer._model.loaded is None
    optimizer.close()
    return told


def train_halves(
    client: ps.Client, name: str, saved: dict[str, Any] | None
) -> tuple[list[Values], dict[str, Any]]:
    """bfloat16 parameters, two groups and a schedule; the module and all state are loaded after
    the optimizer was made.
    """
    model = seeded(Branched).to(torch.bfloat16)
    groups: list[dict[str, Any]] = [
        {"params": list(model.first.parameters()), "lr": 0.02},
        {"params": [*model.sometimes.parameters(), *model.last.parameters(), model.gain]},
    ]
    optimizer = ps.DistributedOptimizer(
        client, groups, ps.AdamW(lr=0.01), module=model, name=name, kernels="exact",
        block_elements=64,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.02], total_steps=STEPS)
    first = 0
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = 3
    history, kept = [], {}
    for step, x in enumerate(batches(STEPS, rank=client.rank)):
        if step < first:
            continue
        optimizer.zero_grad()
        model(x.to(torch.bfloat16)).square().mean().backward()
        optimizer.step()
        schedule.step()
        history.append(values(model))
        if step == 2:
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
            kept = copied({what: part.state_dict() for what, part in parts.items()})
    optimizer.close()
    return history, kept


def read_state(client: ps.Client, name: str) -> None:
    """Under ASP; the optimizer is kept, with what it said of its state in the place of inputs."""
    model = seeded(Branched)
    ours = PAIRS["adam"][0]
    optimizer = optimizer_for(client, model, name=name, optimizer=ours, consistency="asp")
    _kept[name] = model, optimizer, optimizer.state_dict()


def step_alone(client: ps.Client, name: str) -> None:
    """Rank 0's."""
    model, optimizer, _ = _kept[name]
    if client.rank == 0:
        assert one_step(model, optimizer, next(batches(1))) == ""


def load_again(client: ps.Client, name: str) -> tuple[float, str, str]:
    """What was read, as Accelerate does it, and then something else.

    Returns:
        The steps of a tensor now; what each load was refused with.
    """
    _, optimizer, read = _kept.pop(name)
    told = []
    other = copied(read)
    other["state"][0] = {"step": 7, "exp_avg": torch.ones(()), "exp_avg_sq": torch.ones(())}
    for state in (read, other):
        try:
            optimizer.load_state_dict(state)
            told.append("")
        except ps.EditRefused as error:
            told.append(str(error))
    steps = float(optimizer.state_dict()["state"][0]["step"])
    optimizer.close()
    return steps, told[0], told[1]
