"""Trainings whose parameters say which steps are in them, drawn by a seed.

Each worker process has a column of its own in every tensor. Its step number s has the gradient
4^(s-1) there, SGD of lr 1 takes it off, and all of that is exact in float32: a digit of the value
is 1 where the step is in it once, 0 where it is not, 2 where it counts twice.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch

import ps_worker as ps
from ps_worker.spec.optimizers import ServerOptimizer
from tests.combinations.faults import MOMENTS, Fault, drawn_faults

STEPS, COLUMNS = 12, 8
SAMPLES, SHARD, BATCH, PASSES = 44, 6, 3, 2

_SGD = functools.partial(torch.optim.SGD, lr=1.0)
OPTIMIZERS: dict[str, ServerOptimizer] = {
    "sgd": ps.SGD(lr=1.0),
    "add": ps.Add(_SGD),
    "aggregate": ps.Aggregate(_SGD),
    "outer": ps.Outer(_SGD, inner_steps=2, lr=1.0, momentum=0.0, nesterov=False),
    "fragments": ps.Outer(_SGD, inner_steps=4, lr=1.0, momentum=0.0, nesterov=False, fragments=2),
    "overlap": ps.Outer(
        _SGD, inner_steps=6, lr=1.0, momentum=0.0, nesterov=False, fragments=3, overlap=1
    ),
}
INNER_STEPS = {"outer": 2, "fragments": 2, "overlap": 2}
"""From one outer step, of a fragment or of all, to the next."""

_SETTINGS = ("bsp", "bsp", "ssp:0", "ssp:1", "ssp:3", "ssp:1..4", "asp", "asp")


@dataclass(frozen=True, slots=True)
class Death:
    """A worker is killed at a moment of its step, and another comes in its place."""

    rank: int
    step: int
    moment: str


@dataclass(frozen=True, slots=True)
class Counted:
    """A training.

    Attributes:
        optimizer: of `OPTIMIZERS`.
        groups: each worker's, to aggregate within; empty: none.
        frozen: the steps in which a layer is frozen at all workers.
        changes: steps after which the consistency changes, and to which.
        skips: the (rank, step) whose loss scale finds an infinity.
        is_sparse: a layer is in no backward pass of every third step of a worker.
        has_shards: the steps are those that a data set's shards give.
        late: the step of worker 0 before which another one joins; 0: none does.
    """

    seed: int
    workers: int
    optimizer: str
    options: dict[str, Any]
    groups: tuple[str, ...]
    frozen: range
    changes: tuple[tuple[int, str], ...]
    skips: frozenset[tuple[int, int]]
    is_sparse: bool
    has_rows: bool
    has_shards: bool
    late: int
    deaths: tuple[Death, ...]
    servers: int
    replicas: int
    has_logs: bool
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        names = (
            name
            for name in self.__slots__
            if getattr(self, name) not in (False, 0, (), range(0), frozenset())
        )
        return "\n".join(f"    {name}: {getattr(self, name)}" for name in names)


def counted(seed: int) -> Counted:
    """The training of a seed."""
    draw = random.Random(f"counted {seed}")
    workers = draw.choice((2, 2, 3))
    has_shards = draw.random() < 0.2
    optimizer = "sgd" if has_shards else draw.choice(["sgd", "sgd", *OPTIMIZERS])
    has_groups = optimizer == "sgd" and not has_shards and draw.random() < 0.3
    is_bsp = has_groups or optimizer == "aggregate"
    setting = "asp" if has_shards else "bsp" if is_bsp else draw.choice(_SETTINGS)
    changes: tuple[tuple[int, str], ...] = ()
    if not (has_shards or is_bsp) and draw.random() < 0.35:
        steps = sorted(draw.sample(range(1, STEPS), draw.choice((1, 2))))
        changes = tuple((step, draw.choice(_SETTINGS)) for step in steps)
    is_whole = not is_bsp and draw.random() < 0.6  # workers may come and go
    late = draw.randrange(1, STEPS) if is_whole and draw.random() < 0.6 else 0
    deaths = tuple(
        Death(rank, draw.randrange(2, STEPS), draw.choice(MOMENTS))
        for rank in sorted(
            draw.sample(range(workers), draw.choice((0, 1, 1, 2)) if is_whole else 0)
        )
    )
    is_fixed = not (late or deaths)
    skips = {(draw.randrange(workers), draw.randrange(1, STEPS + 1)) for _ in range(3)}
    frozen_from = draw.randrange(1, STEPS - 2)
    replicas = draw.choice((1, 2))
    servers = draw.randrange(replicas, 5)
    has_logs = draw.random() < 0.2
    spare = servers - 1 if replicas == 2 else 0
    is_local = optimizer != "sgd"
    is_eager = draw.random() < 0.2 and not is_local
    if has_shards or (is_eager and (setting != "bsp" or changes)):  # what came is not skipped
        skips.clear()
    return Counted(
        seed,
        workers,
        optimizer,
        options={
            "block_elements": 64,
            "consistency": setting,
            "reduction": "sum",
            "kernels": draw.choice(("fast", "exact")),
            "mode": "eager" if is_eager else "sealed",
            "accumulate": draw.choice((1, 1, 2)),
            "overlap_pull": draw.random() < 0.25 and not is_local,
        },
        groups=_groups(draw, workers) if has_groups else (),
        frozen=range(frozen_from, frozen_from + draw.randrange(1, 5))
        if is_fixed and draw.random() < 0.3
        else range(0),
        changes=changes,
        skips=frozenset(skips if draw.random() < 0.3 else ()),
        is_sparse=draw.random() < 0.3,
        has_rows=draw.random() < 0.3 and optimizer in ("sgd", "add") and not has_groups,
        has_shards=has_shards,
        late=late,
        deaths=deaths,
        servers=servers,
        replicas=replicas,
        has_logs=has_logs,
        faults=drawn_faults(draw, [], range(1, STEPS + 1), workers, has_logs, spare),
    )


def _groups(draw: random.Random, workers: int) -> tuple[str, ...]:
    """Groups of one or two: a mean of three is not exact."""
    names = ["a", "a", "b"][:workers]
    draw.shuffle(names)
    return tuple(names)
