"""Runs a drawn training, whole or in parts, and compares the two."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ps_worker as ps
from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_runtime.launch.cluster_shape import NO_UPDATE_LOG, CheckpointPlan, UpdateLogPlan
from ps_worker.client.checkpoints import CheckpointTicket
from tests.combinations.drawn import STEPS, Drawn, Part
from tests.combinations.faults import Faults
from tests.integration.replicated_cluster import replicated_cluster
from tests.integration.resumed_training import Position, together

LEASE_S = 3.0
DEADLINE_S = 90.0
WIDTH, CLASSES, ROWS = 10, 4, 50

History = dict[int, dict[str, str]]
"""By step: digests of the values that a worker has after it."""


class Refused(Exception):
    """The features do not go together, and a page or an error says so."""


class _Net(nn.Module):
    def __init__(self, rows: ps.Embedding | None) -> None:
        super().__init__()
        self.rows = rows
        self.hidden = nn.Linear(WIDTH, 24)
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.rows is not None:
            x = x + self.rows(ids)
        out: torch.Tensor = self.head(self.norm(self.hidden(x)).relu())
        return out


_one_at_a_time = threading.Lock()
"""Workers are threads here, and torch's generator is one for all."""


class _Worker:
    """One worker's script."""

    def __init__(self, client: ps.Client, training: Drawn) -> None:
        self.client, self.drawn = client, training
        rows = None
        if training.has_rows:
            rows = ps.Embedding(client, "ids", WIDTH, **training.rows)
        with _one_at_a_time:
            torch.manual_seed(5)
            self.model = _Net(rows)
            self.second = nn.Linear(WIDTH, CLASSES) if training.trains_two else None
        self.hidden = [*self.model.hidden.parameters()]  # to ask the model would read them
        self.position = Position()  # the steps that it has taken
        client.attach_state("position", self.position, per_rank=True)
        groups: list[dict[str, Any]] = [
            {"params": [*self.model.hidden.parameters(), *self.model.norm.parameters()]}
        ]
        self.head: dict[str, Any] = {"params": [*self.model.head.parameters()], "lr": 5e-3}
        seen = 0 if training.adds_late else self.position.seen
        self.has_head = seen >= training.adds_at
        if self.has_head:
            groups.append(self.head)
        with_codecs = {k: v for k, v in training.options.items() if k != "reduction"}
        self.optimizers = [
            ps.DistributedOptimizer(
                client, groups, training.optimizer, module=self.model, **training.options
            )
        ]
        if self.second is not None:
            second = ps.DistributedOptimizer(
                client, self.second, ps.SGD(lr=0.05), name="second", **with_codecs
            )
            self.optimizers.append(second)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 4, 0.5)
        self.scaler = torch.amp.GradScaler(
            "cpu",
            enabled=training.not_finite is not None,
            init_scale=2.0**6,
            growth_interval=4,
        )
        client.attach_state("schedule", self.schedule, per_rank=True)
        if training.not_finite is not None:
            client.attach_state("scaler", self.scaler, per_rank=True)

    def step(self, before_it_ends: Callable[[], None]) -> None:
        """Take the next step."""
        drawn, number = self.drawn, self.position.seen + 1
        for parameter in self.hidden:
            parameter.requires_grad_(number not in drawn.frozen)
        if number >= drawn.adds_at and not self.has_head:
            self.optimizers[0].add_param_group(self.head)
            self.has_head = True
        if number in drawn.loads:
            self._load()
        if number in drawn.edits and self.has_head:
            self.model.head.bias.data.mul_(0.5).add_(0.01)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for part in range(drawn.options["accumulate"]):
            draw = torch.Generator().manual_seed(1000 * number + 10 * part + self.client.rank)
            x = torch.randn(8, WIDTH, generator=draw)
            ids = torch.randint(ROWS, (8,), generator=draw)
            wanted = torch.randint(CLASSES, (8,), generator=draw)
            loss = nn.functional.cross_entropy(self.model(x, ids), wanted)
            if drawn.not_finite and number in drawn.not_finite:
                loss = loss * math.inf
            if self.second is not None:
                loss = loss + nn.functional.cross_entropy(self.second(x), wanted)
            self.scaler.scale(loss).backward()
        before_it_ends()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.schedule.step()
        if number in drawn.synchronizes:
            for optimizer in self.optimizers:
                optimizer.synchronize()
        self.position.seen = number

    def _load(self) -> None:
        """Load what the model and the optimizer have, changed."""
        for module in (self.model.hidden, *([self.model.head] if self.has_head else [])):
            module.load_state_dict({name: 0.75 * v for name, v in module.state_dict().items()})
        state = self.optimizers[0].state_dict()
        for entry in state["state"].values():
            for name, value in entry.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    entry[name] = 0.5 * value
        self.optimizers[0].load_state_dict(state)

    def digests(self, *, looks: bool) -> dict[str, str]:
        """Of everything that a step may have changed; the parameters only if it `looks`."""
        state = dict(self.model.state_dict()) if looks else {}
        if self.second is not None and looks:
            state |= {f"second.{name}": value for name, value in self.second.state_dict().items()}
        if self.model.rows is not None:
            state["rows"] = self.model.rows(torch.arange(ROWS)).detach()
        found = {name: _digest(value) for name, value in state.items()}
        groups = [group for each in self.optimizers for group in each.param_groups]
        found["rates"] = str([group["lr"] for group in groups])
        found["scale"] = str(self.scaler.get_scale())
        return found


def _digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:12]


@dataclass
class _Run:
    """One cluster of a training."""

    drawn: Drawn
    part: Part
    faults: Faults
    looks: frozenset[int]

    def train(self, client: ps.Client) -> History:
        """A worker's steps in this cluster."""
        try:
            worker = _Worker(client, self.drawn)
        except InvalidConfig as error:
            raise Refused(error.message) from None
        history: History = {}
        ticket = None
        while worker.position.seen < self.part.ends_after:
            moment = partial(self.faults.at, client.rank, worker.position.seen + 1)
            moment("before")

            def in_step(moment: Callable[[str], None] = moment) -> None:
                moment("in")
                moment("during")

            worker.step(in_step)
            number = worker.position.seen
            history[number] = worker.digests(looks=number in self.looks)
            client.save_point()
            if number == self.part.saves_after:
                client.barrier()
                ticket = client.checkpoint(f"after step {number}")
        if ticket is not None:
            self._saved(client, ticket)
        return history

    def _saved(self, client: ps.Client, ticket: CheckpointTicket) -> None:
        """Wait for the checkpoint. One that failed by a fault is made again."""
        try:
            ticket.wait(DEADLINE_S)
        except InvalidCheckpoint:
            assert self.part.faults
            client.checkpoint("made again").wait(DEADLINE_S)


def run_whole(training: Drawn, folder: Path) -> list[History]:
    """The training in one cluster."""
    part = Part(servers=1, replicas=1, saves_after=0, ends_after=STEPS)
    return _run_part(training, part, folder, resume=False, looks=frozenset(range(1, STEPS + 1)))


def run_in_parts(training: Drawn, folder: Path) -> list[History]:
    """The training from checkpoint to checkpoint. A step that was taken again counts once it is."""
    found: list[History] = [{} for _ in range(training.workers)]
    for number, part in enumerate(training.parts):
        part_of = _run_part(training, part, folder, resume=number > 0, looks=training.looks)
        for history, later in zip(found, part_of, strict=True):
            history |= later
    return found


def _run_part(
    training: Drawn, part: Part, folder: Path, *, resume: bool, looks: frozenset[int]
) -> list[History]:
    url = str(folder)
    logs = UpdateLogPlan(f"{folder}-logs-{part.ends_after}", is_synced=True)
    with replicated_cluster(
        part.servers,
        training.workers,
        replica_count=part.replicas,
        lease_s=LEASE_S,
        checkpoints=CheckpointPlan(url=url, resume=url if resume else ""),
        update_log=logs if part.has_logs else NO_UPDATE_LOG,
        has_journal=True,
    ) as cluster:
        run = _Run(training, part, Faults(cluster, part.faults), looks)
        return together(cluster.address, training.workers, run.train, request_deadline_s=DEADLINE_S)


def differences(whole: Sequence[History], in_parts: Sequence[History]) -> list[str]:
    """Where the two differ first, at each worker."""
    found = []
    for rank, (one, other) in enumerate(zip(whole, in_parts, strict=True)):
        for step in range(1, STEPS + 1):
            if step not in one or step not in other:
                found.append(f"worker {rank} has not come to step {step}")
                break
            names = [name for name, value in other[step].items() if one[step].get(name) != value]
            if names:
                found.append(f"worker {rank} after step {step}: {', '.join(names)}")
                break
    return found


def check(training: Drawn, folder: Path) -> str:
    """Run both; returns words for what is wrong, empty if nothing is.

    Raises:
        Refused: the features do not go together.
    """
    whole = run_whole(training, folder / "whole")
    in_parts = partial(run_in_parts, training, folder / "parts")
    return "; ".join(differences(whole, in_parts()))
