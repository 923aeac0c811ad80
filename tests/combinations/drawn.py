"""The features of one training, drawn by a seed."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch

import ps_worker as ps
from ps_worker.spec.optimizers import ServerOptimizer
from tests.combinations.faults import Fault, drawn_faults

STEPS = 12

_ADAM = functools.partial(torch.optim.Adam, lr=1e-2)
_MOMENTUM = functools.partial(torch.optim.SGD, lr=2e-2, momentum=0.9)

_OPTIMIZERS: tuple[ServerOptimizer, ...] = (
    ps.SGD(lr=2e-2, momentum=0.9),
    ps.Adam(lr=1e-2),
    ps.AdamW(lr=1e-2, amsgrad=True),
    ps.Adagrad(lr=2e-2),
    ps.RMSprop(lr=1e-2, momentum=0.5, centered=True),
    ps.Aggregate(_ADAM),
    ps.Aggregate(_MOMENTUM),
    ps.Add(_ADAM),
    ps.Add(_MOMENTUM),
    ps.Outer(_ADAM, inner_steps=3, momentum=0.5),
    ps.Outer(_MOMENTUM, inner_steps=2),
    ps.Outer(_ADAM, inner_steps=4, momentum=0.5, fragments=2),
    ps.Outer(_ADAM, inner_steps=4, momentum=0.5, fragments=2, overlap=1),
    ps.Outer(_ADAM, inner_steps=3, lr=0.9, momentum=0.0, nesterov=False, elastic=0.45),
)

_LOCAL = ps.Aggregate | ps.Add | ps.Outer

_PUSH_CODECS = (
    "none",
    "bf16",
    "int8",
    "sign",
    "topk:0.1",
    "topk:0.1:6",
    "randomk:0.2",
    "lowrank:2",
)
_PULL_CODECS = ("none", "none", "bf16", "int8")
_ALONE = ("bsp", "ssp:2", "asp", "asp:damp=0.5")
"""Settings of a worker that trains alone: of several, only a run under BSP can be repeated."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a run: a cluster, which begins where the one before was saved.

    Attributes:
        saves_after: this worker's step after which a checkpoint is begun; 0: none.
        ends_after: the step at which it is stopped.
        faults: in the order of their steps.
        has_logs: its servers keep synced update logs.
    """

    servers: int
    replicas: int
    saves_after: int
    ends_after: int
    faults: tuple[Fault, ...] = ()
    has_logs: bool = False


@dataclass(frozen=True, slots=True)
class Drawn:
    """A training.

    Attributes:
        options: of the optimizer.
        frozen: the steps in which a layer is frozen.
        edits: steps before which all scripts change a parameter.
        synchronizes: steps after which all take the common model.
        not_finite: steps in which a loss scale finds an infinity at every worker; None: no scale.
        has_rows: the model has an Embedding, with these options.
        trains_two: a second model takes a step after each of the first.
        looks: steps after which a worker in parts looks at the parameters; after others forward is
            the first that reads them.
        loads: steps before which all load changed parameters and changed optimizer state.
        adds_at: the step before which the head's group is added; 0: it is there from the first.
        adds_late: a resumed script adds it, too; else it hands it over with the others.
    """

    seed: int
    workers: int
    optimizer: ServerOptimizer
    options: dict[str, Any]
    frozen: range
    edits: frozenset[int]
    synchronizes: frozenset[int]
    not_finite: frozenset[int] | None
    has_rows: bool
    rows: dict[str, Any]
    trains_two: bool
    looks: frozenset[int]
    loads: frozenset[int]
    adds_at: int
    adds_late: bool
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        names = (name for name in self.__slots__ if getattr(self, name) not in (False, range(0)))
        return "\n".join(f"    {name}: {getattr(self, name)}" for name in names)


def drawn(seed: int) -> Drawn:
    """The training of a seed."""
    draw = random.Random(seed)

    def some(share: float, count: int = 2) -> frozenset[int]:
        steps = draw.sample(range(2, STEPS), count)
        return frozenset(steps if draw.random() < share else ())

    workers, optimizer = draw.choice((1, 2, 2, 3)), draw.choice(_OPTIMIZERS)
    moves, is_local = isinstance(optimizer, ps.Add | ps.Outer), isinstance(optimizer, _LOCAL)
    clip_norm = draw.choice((None, None, 0.5))
    is_eager = draw.random() < 0.25 and not (moves or clip_norm)
    options: dict[str, Any] = {
        "block_elements": 64,
        "push_codec": draw.choice(_PUSH_CODECS) if draw.random() < 0.7 else "none",
        "pull_codec": draw.choice(_PULL_CODECS),
        "consistency": draw.choice(_ALONE) if workers == 1 else "bsp",
        "reduction": draw.choice(("mean", "mean", "sum")),
        "kernels": draw.choice(("fast", "exact")),
        "buffers": draw.choice(("rank0", "rank0", "mean", None)),
        "accumulate": draw.choice((1, 1, 2)),
        "clip_norm": clip_norm,
        "mode": "eager" if is_eager else "sealed",
        "overlap_pull": draw.random() < 0.5 and not is_local,
    }
    begin = draw.randrange(1, STEPS - 2)
    more = random.Random(f"more of {seed}")  # so that a seed's features stay its own
    arrives = options["mode"] == "eager" and options["consistency"] != "bsp"
    loads = frozenset(more.sample(range(2, STEPS), 2) if more.random() < 0.3 else ())
    adds_at = more.randrange(2, STEPS) if more.random() < 0.25 else 0
    return Drawn(
        seed,
        workers,
        optimizer,
        options,
        frozen=range(begin, begin + draw.randrange(1, 5)) if draw.random() < 0.3 else range(0),
        edits=some(0.3),
        synchronizes=some(0.3),
        not_finite=some(0.5) if draw.random() < 0.3 else None,
        has_rows=draw.random() < 0.25 and not isinstance(optimizer, ps.Outer),
        rows=_rows(random.Random(f"rows of {seed}"), options["consistency"]),
        trains_two=draw.random() < 0.2,
        looks=drawn_looks(seed),
        loads=frozenset() if arrives else loads,
        adds_at=adds_at,
        adds_late=more.random() < 0.5,
        parts=_parts(draw, random.Random(f"faults of {seed}"), workers),
    )


def drawn_looks(seed: int) -> frozenset[int]:
    """All steps, or some of them: values may be on their way until something reads them."""
    draw = random.Random(f"looks of {seed}")
    share = draw.choice((1.0, 0.3, 0.0))
    return frozenset(step for step in range(1, STEPS) if draw.random() < share) | {STEPS}


def _rows(draw: random.Random, consistency: str) -> dict[str, Any]:
    """Options of the Embedding."""
    found: dict[str, Any] = {
        "optimizer": draw.choice(
            (ps.Adagrad(lr=0.05), ps.RowwiseAdagrad(lr=0.05), ps.FTRL(lr=0.05), ps.Adam(lr=0.01))
        ),
        "init": draw.choice((ps.Normal(0.1), ps.Uniform(0.1), ps.Constant(0.01))),
        "partitions": draw.choice((1, 4, 16)),
        "storage": draw.choice(("full", "full", "int8", "float16", "bfloat16")),
        "consistency": consistency.split(":damp")[0],
    }
    limits = {"evict_after": 8, "admit_after": 2, "max_rows": 40, "cache_rows": 32}
    found |= {name: value for name, value in limits.items() if draw.random() < 0.3}
    if "max_rows" in found:
        found["eviction"] = draw.choice(("lru", "lfu"))
    return found


def _parts(draw: random.Random, harm: random.Random, workers: int) -> tuple[Part, ...]:
    """The parts; `harm` draws what was not drawn from the first: a seed's features stay its own."""
    saves = sorted(draw.sample(range(1, STEPS - 1), draw.choice((0, 1, 2))))
    parts, begins = [], 1
    for saved in [*saves, 0]:
        ends = min(saved + draw.randrange(3), STEPS) if saved else STEPS
        replicas = draw.choice((1, 2))
        is_hit = replicas == 2 and (draw.random() < 0.5 or not saves)
        loses = draw.randrange(begins, ends + 1) if is_hit else 0
        servers = draw.randrange(replicas, 4) + (1 if is_hit else 0)
        has_logs = harm.random() < 0.25
        spare = servers - (2 if is_hit else 1) if replicas == 2 else 0
        first = [Fault("server", loses)] if loses else []
        faults = drawn_faults(harm, first, range(begins, ends + 1), workers, has_logs, spare)
        parts.append(Part(servers, replicas, saved, ends, faults, has_logs))
        begins = saved + 1
    return tuple(parts)
