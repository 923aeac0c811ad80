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
from tests.combinations.drawn import drawn_looks
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

_CODECS = ("none", "none", "none", "topk:0.1", "topk:0.3", "randomk:0.2")
"""Those that send some elements as they are, and keep the others exactly."""
BACKUP = "bsp:backup=1"
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
        unfrozen: the clock from which a layer trains that is frozen when the optimizer is made; 0:
            from the first.
        grows: that layer is not the optimizer's before, and comes as a group of its own.
        changes: steps after which the consistency changes, and to which.
        skips: the (rank, step) whose loss scale finds an infinity.
        is_sparse: a layer is in no backward pass of every third step of a worker.
        trains_two: a second model takes a step after each of the first.
        is_read: a reader reads the model again and again.
        edits: the steps before which all change a parameter.
        synchronizes: the steps after which all take the common model.
        has_shards: the steps are those that a data set's shards give.
        late: the step of worker 0 before which another one joins; 0: none does.
        looks: the steps after which a worker tells of its values, which it does not read else.
        has_sampler: the steps are those of a DistributedSampler's epochs.
        saves_after: the step after which all make a checkpoint, from which `later` workers go on
            with steps that count from 1, and with what `late`, `deaths` and `faults` say; 0: none.
    """

    seed: int
    workers: int
    optimizer: str
    options: dict[str, Any]
    groups: tuple[str, ...]
    frozen: range
    unfrozen: int
    grows: bool
    changes: tuple[tuple[int, str], ...]
    skips: frozenset[tuple[int, int]]
    is_sparse: bool
    has_rows: bool
    trains_two: bool
    is_read: bool
    edits: frozenset[int]
    synchronizes: frozenset[int]
    looks: frozenset[int]
    has_shards: bool
    has_sampler: bool
    saves_after: int
    later: int
    late: int
    deaths: tuple[Death, ...]
    servers: int
    replicas: int
    has_logs: bool
    faults: tuple[Fault, ...]

    @property
    def counts_samples(self) -> bool:
        """The samples are counted, and no steps."""
        return self.has_shards or self.has_sampler

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
    saves_after = 0 if has_shards or draw.random() < 0.5 else draw.randrange(1, STEPS - 4)
    later = workers if optimizer in INNER_STEPS else draw.randrange(1, 4)
    is_bsp = has_groups or optimizer == "aggregate"
    setting, changes = ("asp" if has_shards else "bsp"), tuple[tuple[int, str], ...]()
    if not (has_shards or is_bsp):
        setting, changes = _setting(draw, optimizer)
    later = workers if setting == BACKUP else later
    last, most = STEPS - saves_after, min(workers, later) if saves_after else workers
    late, deaths = _comings(draw, last, most)
    if is_bsp or draw.random() < 0.4:
        late, deaths = 0, ()
    is_fixed = not (late or deaths)
    has_sampler = is_fixed and not has_shards and draw.random() < 0.3
    skips = {(draw.randrange(workers), draw.randrange(1, STEPS + 1)) for _ in range(3)}
    unfrozen = draw.randrange(2, STEPS) if draw.random() < 0.3 else 0
    may_have_rows = optimizer in ("sgd", "add") and not (has_groups or setting == BACKUP)
    replicas, has_logs = draw.choice((1, 2)), draw.random() < 0.2
    servers = draw.randrange(replicas, 5)
    spare = servers - 1 if replicas == 2 else 0
    codec, is_plain = draw.choice(_CODECS), optimizer == "sgd" and not has_groups
    is_eager = draw.random() < 0.2 and is_plain
    is_applied_on_arrival = is_eager and (setting not in ("bsp", BACKUP) or changes)
    if has_shards or has_sampler or codec != "none" or is_applied_on_arrival:
        skips.clear()
    unfrozen = 0 if optimizer in INNER_STEPS else unfrozen
    grows = not (has_shards or has_sampler) and _grows(seed, unfrozen, deaths, saves_after)
    return Counted(
        seed,
        workers,
        optimizer,
        options={
            "consistency": setting,
            "mode": "eager" if is_eager else "sealed",
            "overlap_pull": draw.random() < 0.5 and is_plain,
            "push_codec": codec,
            **_options(draw),
        },
        groups=_groups(draw) if has_groups else (),
        frozen=_frozen(draw) if is_fixed else range(0),
        unfrozen=unfrozen,
        grows=grows,
        changes=changes,
        skips=frozenset(skips if draw.random() < 0.3 else ()),
        is_sparse=draw.random() < 0.3,
        trains_two=draw.random() < 0.3 and not has_shards,
        is_read=draw.random() < 0.25 and optimizer != "aggregate" and not grows,
        edits=_some(draw, last, is_fixed and setting == "bsp" and not (changes or saves_after)),
        synchronizes=_some(draw, last, is_fixed and not has_shards),
        looks=drawn_looks(seed),
        has_rows=draw.random() < 0.3 and may_have_rows,
        has_shards=has_shards,
        has_sampler=has_sampler,
        saves_after=saves_after,
        later=later,
        late=late,
        deaths=deaths,
        servers=servers,
        replicas=replicas,
        has_logs=has_logs,
        faults=drawn_faults(draw, [], range(1, last), most, has_logs, spare),
    )


def _some(draw: random.Random, last: int, may_be: bool) -> frozenset[int]:
    steps = draw.sample(range(2, last), 2)
    return frozenset(steps if may_be and draw.random() < 0.4 else ())


def _grows(seed: int, unfrozen: int, deaths: tuple[Death, ...], saves_after: int) -> bool:
    """True if the unfrozen layer is added. Never if rank 0, which gives its values, dies before:
    the run would be lost.
    """
    if not unfrozen or any(d.rank == 0 and d.step + saves_after <= unfrozen for d in deaths):
        return False
    return random.Random(f"growth of {seed}").random() < 0.7


def _frozen(draw: random.Random) -> range:
    begin = draw.randrange(1, STEPS - 2)
    return range(begin, begin + draw.randrange(1, 5)) if draw.random() < 0.3 else range(0)


def _options(draw: random.Random) -> dict[str, Any]:
    return {
        "block_elements": 64,
        "reduction": "sum",
        "kernels": draw.choice(("fast", "exact")),
        "accumulate": draw.choice((1, 1, 2)),
    }


def _setting(draw: random.Random, optimizer: str) -> tuple[str, tuple[tuple[int, str], ...]]:
    """A consistency, and what it changes to."""
    if optimizer in ("sgd", "add", "outer") and draw.random() < 0.1:
        return BACKUP, ()
    steps = sorted(draw.sample(range(1, STEPS), draw.choice((0, 0, 0, 1, 2))))
    return draw.choice(_SETTINGS), tuple((step, draw.choice(_SETTINGS)) for step in steps)


def _comings(draw: random.Random, last: int, most: int) -> tuple[int, tuple[Death, ...]]:
    """The step at which a worker joins, and those of `most` workers that die."""
    late = draw.randrange(1, last) if draw.random() < 0.6 else 0
    dying = draw.sample(range(most), min(most, draw.choice((0, 1, 1, 2))))
    deaths = (Death(rank, draw.randrange(2, last), draw.choice(MOMENTS)) for rank in sorted(dying))
    return late, tuple(deaths)


def _groups(draw: random.Random) -> tuple[str, ...]:
    """Groups of one or two: a mean of three is not exact. There may be more workers later."""
    names = ["a", "a", "b"]
    draw.shuffle(names)
    return tuple(names)
