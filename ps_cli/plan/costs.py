"""The processor's share of a step, as measured: CPU seconds of workers and servers.

A GB is 10^9 bytes of float32, whatever its bytes in a codec are.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ps_core.codecs.choices import LOW_RANK, NONE, TOP_K
from ps_core.errors import InvalidConfig
from ps_core.tables.elements import Codec

_Cost = TypeVar("_Cost")

_NAMES = {Codec.FP32: NONE, Codec.SPARSE: TOP_K, Codec.LOW_RANK: LOW_RANK}
"""Names of codecs that are measured under another one."""


@dataclass(frozen=True, slots=True)
class Ends:
    """CPU seconds at the two ends of a push or a pull."""

    worker_s: float
    server_s: float


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU seconds of one thread, by what it does.

    Attributes:
        machine: the processor that they were measured on.
        push: a GB pushed, by codec: encoded, sent; received, decoded, checked, accumulated.
        pull: a GB pulled, by codec.
        push_block: a block pushed, beside its bytes: its messages, its share of a seal.
        pull_block: a block pulled, beside its bytes.
        update_s: a GB of updates, by optimizer.
        replica_s: a GB of updates sent to a backup, received and applied there: both ends.
        staged_s: a GB of gradients in `DistributedOptimizer`, beside its push, while backward runs.
        loaded_s: a GB of parameters in its `step`, beside its pull: looked at, and loaded.
        call_s: seconds, not of CPU, of a call without payload, there and back on one host.
    """

    machine: str
    push: dict[str, Ends]
    pull: dict[str, Ends]
    push_block: Ends
    pull_block: Ends
    update_s: dict[str, float]
    replica_s: float
    staged_s: float
    loaded_s: float
    call_s: float

    def of(self, way: str, codec: Codec) -> Ends:
        """A GB in that codec, pushed or pulled; raises InvalidConfig as `update_of`."""
        found: dict[str, Ends] = getattr(self, way)
        return _known(found, _NAMES.get(codec, codec.value), f"a {way} in the codec")

    def update_of(self, optimizer: str) -> float:
        """A GB updated; InvalidConfig if that was not measured."""
        return _known(self.update_s, optimizer, "the optimizer")

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def costs_of(text: str, source: str) -> Costs:
    """The inverse of `Costs.document`, from JSON; InvalidConfig names `source` if it is another's.

    Args:
        text: the JSON.
        source: the file, for the error.
    """
    try:
        given = json.loads(text)
        ends = {
            name: {codec: Ends(**each) for codec, each in given[name].items()}
            for name in ("push", "pull")
        }
        blocks = {name: Ends(**given[name]) for name in ("push_block", "pull_block")}
        costs = Costs(**{**given, **ends, **blocks})
        figures = [*_figures(costs.document())]
        if not all(math.isfinite(each) and each >= 0 for each in figures):
            raise ValueError(figures)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidConfig(
            f"{source} has no costs ({error!r}); expected a file that `pushpull plan --measure "
            "FILE` wrote"
        ) from None
    return costs


def _known(costs: dict[str, _Cost], name: str, what: str) -> _Cost:
    if name not in costs:
        raise InvalidConfig(f"{what} {name} has no measured cost; expected {', '.join(costs)}")
    return costs[name]


def _figures(value: Any) -> Any:
    for each in value.values():
        if isinstance(each, dict):
            yield from _figures(each)
        elif not isinstance(each, str):
            yield float(each)


REFERENCE = Costs(
    machine="Intel Xeon Processor, 2 cores",
    push={
        "none": Ends(0.2408, 0.3959),
        "bf16": Ends(0.4494, 0.3661),
        "fp16": Ends(0.5984, 0.3661),
        "int8": Ends(0.6878, 0.3065),
        "sign": Ends(1.135, 0.4853),
        "topk": Ends(1.85, 0.3065),
        "lowrank": Ends(0.9549, 0.4417),
    },
    pull={
        "none": Ends(0.329, 0.5829),
        "bf16": Ends(0.2992, 0.3743),
        "fp16": Ends(0.3588, 0.3445),
        "int8": Ends(0.1502, 0.2849),
    },
    push_block=Ends(2.875e-05, 8.938e-05),
    pull_block=Ends(3e-05, 4.5e-05),
    update_s={
        "sgd": 0.2341,
        "adam": 0.3831,
        "adamw": 0.3887,
        "adagrad": 0.2881,
        "rmsprop": 0.585,
    },
    replica_s=1.281,
    staged_s=0.3591,
    loaded_s=0.5722,
    call_s=0.0003831,
)
"""The costs of the reference machine, as --measure wrote them there."""
