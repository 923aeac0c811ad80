"""A worker process of a counted training: it says what it does, and waits where it is told to."""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import ps_worker as ps
from tests.combinations.counted import (
    BATCH,
    COLUMNS,
    INNER_STEPS,
    OPTIMIZERS,
    PASSES,
    SAMPLES,
    SHARD,
    STEPS,
    Counted,
)

DEADLINE_S = 90.0
Values = dict[str, npt.NDArray[np.float32]]
SECOND = "second.large"
ROW_IDS = torch.arange(STEPS + 1)


@dataclass(frozen=True)
class Order:
    """A worker process.

    Attributes:
        number: its column.
        rank: the rank that it asks for; None: any.
        is_first: it is of those that the cluster was started for, and replaces nobody.
        saves_after: it ends with a checkpoint after this step; 0: it does not.
        stops: the (step, moment) that it tells of and waits at, "during" apart.
    """

    address: str
    training: Counted
    number: int
    rank: int | None
    is_first: bool
    saves_after: int
    stops: frozenset[tuple[int, str]]


class CountedNet(nn.Module):
    """The tensors that count; `start` is what they begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(40, COLUMNS))
        self.small = nn.Parameter(torch.zeros(1, COLUMNS))
        self.sparse = nn.Parameter(torch.zeros(17, COLUMNS))
        self.seen = nn.Parameter(torch.zeros(SAMPLES))
        self.start = nn.Parameter(torch.arange(100.0))
        self.rows: nn.Module | None = None


def is_absent(training: Counted, number: int, step: int) -> bool:
    """True if `sparse` has no gradient in this step."""
    return training.is_sparse and (number + step) % 3 == 0


def rows_of(step: int) -> list[int]:
    """The ids of the rows that a step has gradients of."""
    return [0, step]


def make_rows(client: ps.Client, training: Counted) -> ps.Embedding:
    if client.is_reader:
        return ps.Embedding(client, "rows", COLUMNS, optimizer=ps.SGD(lr=1.0))
    return ps.Embedding(
        client,
        "rows",
        COLUMNS,
        optimizer=ps.SGD(lr=1.0),
        init=ps.Constant(0.0),
        reduction="sum",
        consistency=training.options["consistency"],
        partitions=4,
    )


class _Worker:
    def __init__(self, order: Order, client: ps.Client, pipe: Connection) -> None:
        self.order, self.client, self.pipe = order, client, pipe
        self.training = training = order.training
        self.model = CountedNet()
        if order.number != 0:  # the values are rank 0's
            for parameter in self.model.parameters():
                nn.init.constant_(parameter, 0.5 + order.number)
        self.trains_large = not training.unfrozen
        self.model.large.requires_grad_(self.trains_large or training.grows)
        self.has_large = not training.grows
        if training.grows:  # before it is added, each worker's own
            nn.init.zeros_(self.model.large)
        if training.has_rows:
            self.model.rows = make_rows(client, training)
        options = dict(training.options)
        if training.groups and client.rank < len(training.groups):
            options["aggregate_within"] = training.groups[client.rank]
        named = [pair for pair in self.model.named_parameters() if pair[0] != "large"]
        self.optimizer = ps.DistributedOptimizer(
            client,
            self.model if self.has_large else named,
            OPTIMIZERS[training.optimizer],
            module=None if self.has_large else self.model,
            **options,
        )
        self.optimizers, self.second = [self.optimizer], CountedNet()
        if training.trains_two:
            if order.number != 0:
                nn.init.constant_(self.second.large, 0.5 + order.number)
            self.optimizers.append(
                ps.DistributedOptimizer(
                    client, self.second, ps.SGD(lr=1.0), name="second", **options
                )
            )
        self.scaler = torch.amp.GradScaler(
            "cpu", enabled=bool(training.skips), init_scale=64.0, growth_interval=4
        )
        self.step_number = 0
        self.column = torch.zeros(COLUMNS)
        self.column[order.number] = 1.0

    def run(self) -> None:
        for samples in self._batches():
            step = self.step_number + 1
            self._tell("before", step)
            self._step(step, samples)
            self.step_number = step
            values = self._values() if step in self.training.looks else None
            self.pipe.send(("step", step, self.optimizer.clock, values, self.trains_large))
            for after, setting in self.training.changes:
                if after == step and self.order.is_first:
                    for optimizer in self.optimizers:
                        optimizer.set_consistency(setting)
            if step in self.training.synchronizes:
                for optimizer in self.optimizers:
                    optimizer.synchronize()
            self.client.save_point()
            if step == self.order.saves_after:
                self._save()
                return
        if self.training.optimizer in INNER_STEPS:
            self.optimizer.synchronize()
        self.pipe.send(("end", self._values(), self._residuals()))

    def _save(self) -> None:
        """Make a checkpoint while nobody takes a step; one that failed by a fault is made again."""
        self.optimizer.wait()
        self.client.barrier()
        try:
            self.client.checkpoint().wait(DEADLINE_S)
        except ps.InvalidCheckpoint:
            assert self.training.faults
            self.client.checkpoint("made again").wait(DEADLINE_S)
        self.client.barrier()

    def _residuals(self) -> Values:
        """What the codec has left for later steps, as gradients, by parameter."""
        found = {}
        for optimizer in self.optimizers:
            for table in optimizer.trained_model.tables:
                residuals = table.handle.steps.residuals
                if residuals is not None:
                    state = residuals.state_dict()  # of a group's leader: of the group's mean
                    left = np.asarray(state["residuals"], np.float32) * np.float32(state["scale"])
                    for entry in table.layout.placed:
                        part = left[entry.offset : entry.offset + entry.tensor.numel()]
                        name = entry.name if optimizer is self.optimizer else f"second.{entry.name}"
                        found[name] = part.reshape(entry.tensor.shape).copy()
        return found

    def _batches(self) -> Iterator[Iterable[int]]:
        loader: Any
        samples: Any = range(SAMPLES)
        if self.training.has_shards:
            shards = self.client.data_shards(SAMPLES, shard_size=SHARD)
            loader = torch.utils.data.DataLoader(samples, BATCH, sampler=shards)
            for _ in range(shards.pass_number, PASSES):
                for batch in shards.over(loader):
                    yield batch.tolist()
            return
        if self.training.has_sampler:
            sampler = ps.DistributedSampler(self.client, SAMPLES, seed=3)
            loader = torch.utils.data.DataLoader(samples, BATCH, sampler=sampler)
            for _ in range(sampler.epoch, PASSES):
                for batch in sampler.follow(loader):
                    yield batch.tolist()
            return
        last = STEPS // INNER_STEPS.get(self.training.optimizer, 1)
        while self.optimizer.clock < last:
            yield ()

    def _step(self, step: int, samples: Iterable[int]) -> None:
        model, rank, accumulate = self.model, self.client.rank, self.training.options["accumulate"]
        is_unfrozen = self.optimizer.clock + 1 >= self.training.unfrozen
        trains_large = is_unfrozen and step not in self.training.frozen
        if is_unfrozen and not self.has_large:
            self.optimizer.add_param_group({"params": [model.large]})
            self.has_large = True
        if trains_large != self.trains_large:  # to ask the parameter would read it
            model.large.requires_grad_(trains_large)
            self.trains_large = trains_large
        if step in self.training.edits:
            model.start.data.add_(1000.0)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        digit = 0.0 if self.training.counts_samples else 4.0 ** (step - 1)
        for _ in range(accumulate):
            coefficients = self.column * (digit / accumulate)
            loss = (model.small * coefficients).sum()
            if self.training.trains_two:
                loss = loss + (self.second.large * coefficients).sum()
            if trains_large:
                loss = loss + (model.large * coefficients).sum()
            if not is_absent(self.training, self.order.number, step):
                loss = loss + (model.sparse * coefficients).sum()
            if model.rows is not None:
                loss = loss + (model.rows(torch.tensor(rows_of(step))) * coefficients).sum()
            for sample in samples:
                loss = loss + model.seen[sample] / accumulate
            if (rank, step) in self.training.skips and self.order.is_first:
                loss = loss * math.inf
            self.scaler.scale(loss).backward()
        self._tell("in", step)
        self._tell("during", step)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def _tell(self, moment: str, step: int) -> None:
        if (step, moment) in self.order.stops:
            self.pipe.send(("moment", step, moment))
            if moment != "during":
                self.pipe.recv()

    def _values(self) -> Values:
        found = {name: value.numpy().copy() for name, value in self.model.state_dict().items()}
        if self.training.trains_two:
            found[SECOND] = self.second.large.detach().numpy().copy()
        return found


def work(order: Order, pipe: Connection) -> None:
    """The life of the process."""
    try:
        torch.set_num_threads(1)
        asked: dict[str, Any] = {} if order.rank is None else {"rank": order.rank}
        if order.training.deaths and order.rank is not None:
            asked["identity"] = f"place-{order.rank}"
        with ps.connect(order.address, request_deadline_s=DEADLINE_S, **asked) as client:
            pipe.send(("connected", client.rank))
            try:
                worker = _Worker(order, client, pipe)
            except ps.InvalidConfig as error:
                pipe.send(("refused", error.message))
            else:
                worker.run()
        pipe.send(("left",))
    except BaseException:  # noqa: BLE001 - whatever it is, the parent says it
        pipe.send(("failed", traceback.format_exc(limit=-12)))
    os._exit(0)
