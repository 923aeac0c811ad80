"""What the workers of `test_worker_groups.py` run, each in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import ps_worker as ps
from ps_core.consistency import Mode
from ps_worker.training.among_workers import gradient_reduction
from tests.integration.edit_jobs import EDITS
from tests.integration.hybrid_jobs import refused
from tests.integration.lane_cluster import until
from tests.integration.training_jobs import EXACT, Values, normed
from tests.integration.training_models import Branched, batches, seeded, values

STEPS, MOST_STEPS = 4, 8
_kept: dict[str, Trainer] = {}


class Trainer:
    """A model in training; each worker gives the name of its group, if there are groups."""

    def __init__(
        self,
        client: ps.Client,
        name: str,
        groups: Sequence[str],
        make: Callable[[], nn.Module] = Branched,
        **options: Any,
    ) -> None:
        self.client = client
        self.model = seeded(make, seed=client.rank)
        self.inputs = list(batches(MOST_STEPS, rank=client.rank))
        ours = options.pop("optimizer", ps.SGD(lr=0.1, momentum=0.9))
        if groups:
            options["aggregate_within"] = groups[client.rank]
        self.optimizer = ps.DistributedOptimizer(
            client, self.model, ours, name=name, **{**EXACT, **options}
        )
        self.progress = client.progress()  # at first

    def loss(self, step: int) -> torch.Tensor:
        """Odd ranks leave out a branch in odd steps."""
        branch = {"is_long": is_long(step, self.client.rank)} if self.is_branched else {}
        loss: torch.Tensor = self.model(self.inputs[step], **branch).square().mean()
        return loss

    @property
    def is_branched(self) -> bool:
        return isinstance(self.model, Branched)

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.loss(step).backward()
            self.optimizer.step()

    def change(self) -> None:
        """As a schedule does between two steps."""
        for group in self.optimizer.param_groups:
            group["lr"] /= 2

    @property
    def values(self) -> Values:
        return values(self.model)

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Pushed and pulled since it was made."""
        now, first = self.client.progress(), self.progress
        return now.pushed_bytes - first.pushed_bytes, now.pulled_bytes - first.pulled_bytes


def is_long(step: int, rank: int) -> bool:
    return (step * rank) % 2 == 0


class Trained(NamedTuple):
    """The parameters after each step, and what moved."""

    history: list[Values]
    moved_bytes: tuple[int, int]


def train(client: ps.Client, steps: int, *, is_direct: bool = True, **options: Any) -> Trained:
    trainer = Trainer(client, **options)
    history, direct_bytes = [], gradient_reduction._DIRECT_BYTES
    try:
        gradient_reduction._DIRECT_BYTES = direct_bytes if is_direct else 0
        for step in range(steps):
            trainer.train(range(step, step + 1))
            history.append(trainer.values)
    finally:
        gradient_reduction._DIRECT_BYTES = direct_bytes
    return Trained(history, trainer.moved_bytes)


def share_out(client: ps.Client, name: str, groups: Sequence[str]) -> dict[int, int]:
    """The sizes of adaptive batches, where the last worker computes longer in each step."""
    trainer = Trainer(client, name, groups)
    batches = client.adaptive_batches(96, 8, bounds=(2, 12), every=2, name=name)
    matrix = torch.randn(256, 256)
    for _ in batches.over(batches):
        for _ in range(40 if client.rank == client.world_size - 1 else 0):
            matrix @ matrix
        trainer.optimizer.zero_grad()
        (batches.weight * trainer.loss(0)).backward()
        trainer.optimizer.step()
    return batches.sizes


def _is_seen(client: ps.Client, handle: ps.TableHandle, mode: Mode) -> bool:
    return client.consistency_of(handle).mode is mode


def change_from_outside(client: ps.Client, name: str, groups: Sequence[str]) -> tuple[str, Values]:
    """The error of a step after somebody has changed the table's consistency; the parameters after
    a step for which it was set back.
    """
    trainer = Trainer(client, name, groups)
    trainer.train(range(1))
    handle = trainer.optimizer.trained_model.tables[0].handle
    told = ""
    for setting, mode in (("asp", Mode.ASP), ("bsp", Mode.BSP)):
        if client.rank == 0:
            client.set_consistency(handle, setting)
        until(partial(_is_seen, client, handle, mode), f"{mode} is seen")
        if mode is Mode.ASP:
            told = refused(lambda: trainer.train(range(1, 2)))
        client.barrier()
    trainer.optimizer.step()
    return told, trainer.values


def go_on(client: ps.Client, name: str, steps: range, **options: Any) -> Values:
    """Train a model of this process further; it is made when its first step comes."""
    if not steps.start:
        _kept[name] = Trainer(client, name=name, **options)
    _kept[name].train(steps)
    return _kept[name].values


def kept(
    client: ps.Client, name: str, groups: Sequence[str], ends: list[int], *, is_saved: bool = False
) -> list[Values]:
    """Train from where the cluster is, and checkpoint at the first end if `is_saved`; the values at
    first, and at each end.
    """
    trainer = Trainer(client, name, groups, push_codec="int8", pull_codec="bf16")
    found = [trainer.values]
    for end in ends:
        trainer.train(range(trainer.optimizer.clock, end))
        found.append(trainer.values)
        if is_saved and end == ends[0]:
            client.checkpoint().wait()
    return found


class Vector(nn.Module):
    """One parameter, at first zero."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(64))


class Attempts:
    """Steps of SGD(lr=1). The gradient of each attempt is 10 times as large as that of the last, at
    first 10 times the rank plus 1. The script zeroes it without the optimizer.

    Args:
        is_hooked: a backward pass computes it, and goes on if it is refused; else it is written.
        edited: the value of all parameters before the second step.
    """

    def __init__(
        self,
        client: ps.Client,
        name: str,
        groups: Sequence[str],
        *,
        is_hooked: bool,
        edited: float | None = None,
    ) -> None:
        self.model = seeded(Vector, seed=0)
        self.optimizer = ps.DistributedOptimizer(
            client, self.model, ps.SGD(lr=1.0), name=name, aggregate_within=groups[client.rank]
        )
        self._is_hooked = is_hooked
        self._edited = edited
        self._gradient = client.rank + 1.0
        self._count = 0

    def train(self, _steps: range) -> None:
        """Make an attempt."""
        self._count += 1
        self._gradient *= 10.0
        if self._edited is not None and self._count == 2:
            nn.init.constant_(self.model.values, self._edited)
        self.model.zero_grad()
        if self._is_hooked:
            with contextlib.suppress(ps.InvalidConfig):
                (self.model.values.sum() * self._gradient).backward()
        else:
            self.model.values.grad = torch.full((64,), self._gradient)
        self.optimizer.step()

    @property
    def values(self) -> Values:
        return values(self.model)


def push_in_part(
    client: ps.Client, name: str, groups: Sequence[str], steps: int
) -> list[torch.Tensor]:
    """In a new cluster push a gradient, in a restored one only what its codec has left, and make a
    checkpoint.

    Returns:
        What the codec has left at first and in the end, times its scale, and the parameters.
    """
    model = seeded(Vector, seed=0)
    options: dict[str, Any] = {"aggregate_within": groups[client.rank]} if groups else {}
    optimizer = ps.DistributedOptimizer(
        client, model, ps.SGD(lr=1.0), name=name, reduction="sum", push_codec="topk:0.1", **options
    )
    residuals = optimizer.trained_model.tables[0].handle.steps.residuals
    assert residuals is not None

    def left() -> torch.Tensor:
        state = residuals.state_dict()
        found: torch.Tensor = state["residuals"] * state["scale"]
        return found

    found = [left()]
    for step in range(steps):
        optimizer.zero_grad()
        is_first = not client.restored_from and not step
        model.values.grad = gradient_of(client.rank) if is_first else torch.zeros(64)
        optimizer.step()
    client.checkpoint().wait()
    return [*found, left(), model.values.detach().clone()]


def gradient_of(rank: int) -> torch.Tensor:
    return torch.arange(1.0, 65.0) * (rank + 1)


def train_normed(client: ps.Client, name: str, groups: Sequence[str], buffers: str) -> Values:
    trainer = Trainer(client, name, groups, normed, buffers=buffers)
    trainer.train(range(3))
    return trainer.values


def train_with_nan(
    client: ps.Client, name: str, groups: Sequence[str], bad_rank: int
) -> tuple[str, Values]:
    """One worker's gradient is not finite in the second of three steps; what each is told."""
    trainer, told = Trainer(client, name, groups), ""
    for step in range(3):
        trainer.optimizer.zero_grad()
        trainer.loss(step).backward()
        if (step, client.rank) == (1, bad_rank):
            trainer.model.last.weight.grad[0, 0] = float("nan")
        try:
            trainer.optimizer.step()
        except ps.InvalidTensor as error:
            told = error.message
    return told, trainer.values


def train_with_scaler(
    client: ps.Client, name: str, groups: Sequence[str], bad_rank: int
) -> tuple[Values, float]:
    """Each worker has a loss scale of its own; that of one overflows in the second of three."""
    trainer = Trainer(client, name, groups)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + client.rank))
    for step in range(3):
        factor = float("inf") if (step, client.rank) == (1, bad_rank) else 1.0
        trainer.optimizer.zero_grad()
        scaler.scale(trainer.loss(step) * factor).backward()
        scaler.step(trainer.optimizer)
        scaler.update()
    return trainer.values, scaler.get_scale()


def take_again_with_scaler(
    client: ps.Client, name: str, groups: Sequence[str], dtype: torch.dtype
) -> tuple[str, torch.Tensor]:
    """Gradients of 2 ** -27 times the rank plus 1, which float16 has only with their loss scale, in
    a step that is refused, because one worker edits its parameters, and taken again.

    Returns:
        What the worker was told, and the parameters after a step of SGD(lr=2 ** 20).
    """
    model, told = seeded(Vector, seed=0).to(dtype), ""
    optimizer = ps.DistributedOptimizer(
        client, model, ps.SGD(lr=2.0**20), name=name, aggregate_within=groups[client.rank]
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (14 + client.rank))
    scaler.scale(model.values.float().sum() * (2.0**-27 * (client.rank + 1))).backward()
    if client.rank == 2:
        nn.init.ones_(model.values)
    try:
        scaler.step(optimizer)
    except ps.EditRefused as error:
        told = error.message
    if client.rank == 2:
        nn.init.zeros_(model.values)
    scaler.step(optimizer)
    return told, model.values.detach().float()


def train_beyond_half(
    client: ps.Client, name: str, groups: Sequence[str], bad_group: str
) -> tuple[list[str], torch.Tensor]:
    """Push in float16, by SGD(lr=1): gradients of 1, then of 1e5 in one group, then of 8 with a
    loss scale with which float16 has no room for them. A step with these that is refused, because
    one worker edits its parameters, is taken again, and then anew.

    Returns:
        What each call of `step` said, and the parameters.
    """
    told: list[str] = []
    model = seeded(Vector, seed=0)
    optimizer = ps.DistributedOptimizer(
        client,
        model,
        ps.SGD(lr=1.0),
        name=name,
        push_codec="fp16",
        aggregate_within=groups[client.rank],
    )
    second = 1e5 if groups[client.rank] == bad_group else 2.0
    large = 8.0, 2.0**16
    for step, (gradient, scale) in enumerate([(1.0, 1.0), (second, 1.0), large, large, large]):
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(model.values.sum() * gradient).backward()
        before = values(model)
        for is_edited in [True, False] if step == 3 else [False]:
            if is_edited and client.rank == 2:
                nn.init.ones_(model.values)
            try:
                scaler.step(optimizer)
                told.append("")
            except ps.PushpullError as error:
                told.append(f"{type(error).__name__}: {error.message}")
            if is_edited:
                model.load_state_dict(before)
    return told, model.values.detach()


def edit(
    client: ps.Client, name: str, groups: Sequence[str], edited: Sequence[int]
) -> tuple[str, Values]:
    """These ranks clamp their parameters before the second of four steps. Who is refused undoes
    that, and takes the step; what it was told.
    """
    trainer, told = Trainer(client, name, groups), ""
    trainer.train(range(1))
    before = trainer.values
    trainer.optimizer.zero_grad()
    trainer.loss(1).backward()
    if client.rank in edited:
        EDITS["clamp_"](trainer.model)
    try:
        trainer.optimizer.step()
    except ps.EditRefused as error:
        told = error.message
        trainer.model.load_state_dict(before)
        trainer.train(range(1, 2))
    trainer.train(range(2, 4))
    return told, trainer.values


def load(client: ps.Client, name: str, groups: Sequence[str]) -> Values:
    """Train, and go back to the first step, with its state."""
    trainer = Trainer(client, name, groups, optimizer=ps.Adam(lr=0.01))
    trainer.train(range(1))
    before, state = trainer.values, trainer.optimizer.state_dict()
    trainer.train(range(1, 3))
    trainer.model.load_state_dict(before)
    trainer.optimizer.load_state_dict(state)
    trainer.train(range(1, 3))
    return trainer.values


def unfreeze(client: ps.Client, name: str, groups: Sequence[str]) -> Values:
    """Some parameters are trained from the third step on, and a group comes after the fourth."""

    def make() -> nn.Module:
        model = Branched()
        model.first.requires_grad_(False)
        return model

    trainer = Trainer(client, name, groups, make)
    late = nn.Linear(3, 3)
    trainer.train(range(2))
    trainer.model.first.requires_grad_(True)
    trainer.train(range(2, 4))
    trainer.optimizer.add_param_group({"params": late.parameters()})
    trainer.optimizer.zero_grad()
    late(trainer.model(trainer.inputs[4])).square().mean().backward()
    trainer.optimizer.step()
    trainer.optimizer.synchronize()
    return {**trainer.values, **values(late)}


def share_again(client: ps.Client, name: str, groups: Sequence[str]) -> Values:
    """Leaders wait for the end of a step again, as if a wait for its buffers had expired."""
    trainer = Trainer(client, name, groups)
    trainer.train(range(1))
    model, step = trainer.optimizer.trained_model, object()
    for _ in range(2 if model.group.is_leader else 1):
        with model.group.sharing(model.tables, step):
            pass
    trainer.train(range(1, STEPS))
    return trainer.values


def disagree(client: ps.Client, name: str, groups: Sequence[str]) -> None:
    """The last worker has another learning rate."""
    trainer = Trainer(client, name, groups)
    if client.rank == client.world_size - 1:
        trainer.optimizer.param_groups[0]["lr"] = 0.5
    trainer.train(range(1))


def refuse(client: ps.Client) -> list[str]:
    """What is wrong with some calls."""
    plain = nn.Linear(2, 2)
    rows = nn.Sequential(ps.Embedding(client, "refused rows", 2, optimizer=ps.SGD(lr=0.1)))

    def make(model: Any, optimizer: Any, **options: Any) -> ps.DistributedOptimizer:
        return ps.DistributedOptimizer(
            client, model, optimizer, name="refused", **{"aggregate_within": "host", **options}
        )

    sgd = ps.SGD(lr=0.1)
    calls: list[Callable[[], object]] = [
        lambda: make(plain, sgd, consistency="ssp:2"),
        lambda: make(plain, sgd, consistency=ps.BSP(backup_workers=1)),
        lambda: make(plain, sgd, mode="eager"),
        lambda: make(plain, sgd, overlap_pull=True),
        lambda: make(plain, ps.Add(torch.optim.SGD)),
        lambda: make(rows, sgd),
        lambda: make(plain, sgd, aggregate_within=""),
        lambda: make(plain, sgd).set_consistency("asp"),
        lambda: ps.HybridOptimizer(
            client, rows, torch.optim.SGD(plain.parameters()), aggregate_within="host"
        ),
    ]
    return [refused(call) for call in calls]
