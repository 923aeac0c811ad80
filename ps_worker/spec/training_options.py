"""The options of a `DistributedOptimizer`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast

from ps_core import limits
from ps_core.consistency import Consistency, Mode
from ps_core.errors import InvalidConfig
from ps_core.tables.optimizers import Kernels
from ps_core.tables.table_spec import Reduction
from ps_worker.spec.settings import BSP, check_kinds, check_options, consistency_of, require_one_of

HOST = "host"
"""The `aggregate_within` of the workers of one machine."""


class OptimizerOptions(TypedDict, total=False):
    """The keyword arguments of `DistributedOptimizer`, which describes them."""

    name: str
    consistency: Consistency | str
    reduction: str
    mode: str
    buffers: str | None
    kernels: str
    accumulate: int
    block_elements: int
    allow_non_finite: bool
    gate_bytes: int
    clip_norm: float | None
    recompute: int
    push_codec: str | None
    pull_codec: str | None
    aggregate_within: str | None
    overlap_pull: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """The options of a `DistributedOptimizer`, which describes them, checked."""

    name: str = "model"
    consistency: Consistency = field(default_factory=BSP)
    reduction: str = "mean"
    mode: str = "sealed"
    buffers: str | None = "rank0"
    kernels: str = "fast"
    accumulate: int = 1
    block_elements: int = 0
    allow_non_finite: bool = False
    gate_bytes: int = 0
    clip_norm: float | None = None
    recompute: int = 3
    push_codec: str | None = None
    pull_codec: str | None = None
    aggregate_within: str | None = None
    overlap_pull: bool = False

    def __post_init__(self) -> None:
        require_one_of("mode", self.mode, ("sealed", "eager"))
        require_one_of("buffers", self.buffers, ("rank0", "mean", None))
        require_one_of("kernels", self.kernels, (kind.value for kind in Kernels))
        require_one_of("reduction", self.reduction, (kind.value for kind in Reduction))
        if self.accumulate < 1:
            raise InvalidConfig(f"accumulate is {self.accumulate}; expected 1 or more")
        if not 0 <= self.recompute <= limits.MAX_RECOMPUTE_COUNT:
            raise InvalidConfig(
                f"recompute is {self.recompute}; expected 0 to {limits.MAX_RECOMPUTE_COUNT} rounds"
            )
        if self.clip_norm is not None and not 0.0 < self.clip_norm < math.inf:
            raise InvalidConfig(
                f"clip_norm is {self.clip_norm}; expected a finite number above 0, or None"
            )
        if self.clip_norm is not None and self.is_eager:
            raise InvalidConfig(
                f"clip_norm is {self.clip_norm:g} in 'eager' mode, where gradients leave before "
                "all of them, and so their norm, are there; expected mode='sealed' (the default)"
            )
        if not self.name or "/" in self.name:
            raise InvalidConfig(f"name is {self.name!r}; expected a name without '/'")
        if self.buffers == "mean" and not self.is_bsp:
            raise InvalidConfig(
                f"buffers is 'mean' under {self.consistency}, where nothing is averaged; expected "
                "BSP"
            )
        if self.aggregate_within is not None:
            self._check_aggregates()

    def _check_aggregates(self) -> None:
        given = f"aggregate_within is {self.aggregate_within!r}"
        if not self.aggregate_within:
            raise InvalidConfig(f"{given}; expected '{HOST}', the name of a group, or None")
        if not self.is_in_lockstep:
            raise InvalidConfig(
                f"{given} under {self.consistency}, where workers are not at one step; expected "
                "BSP without backup workers"
            )
        if self.overlap_pull:
            raise InvalidConfig(
                f"{given} with overlap_pull, but the group gets its values together; expected one "
                "of the two"
            )
        if self.is_eager:
            raise InvalidConfig(
                f"{given} in 'eager' mode, where gradients leave before workers have reduced them; "
                "expected mode='sealed' (the default)"
            )

    @classmethod
    def of(cls, given: OptimizerOptions, default: Consistency) -> TrainingOptions:
        """The caller's options, with defaults for the rest; `default` is the consistency's."""
        check_options("DistributedOptimizer", given, OptimizerOptions.__annotations__)
        check_kinds(given)
        consistency = consistency_of(given.get("consistency", default))
        return cls(**cast("dict[str, Any]", {**given, "consistency": consistency}))

    @property
    def is_eager(self) -> bool:
        """True if gradients are final when their hooks fire."""
        return self.mode == "eager"

    @property
    def applies_on_arrival(self) -> bool:
        """True if the servers apply blocks before the step is sealed: eager steps, except BSP."""
        return self.is_eager and not self.is_bsp

    @property
    def is_bsp(self) -> bool:
        return self.consistency.mode is Mode.BSP

    @property
    def is_in_lockstep(self) -> bool:
        """True if all workers of the model are at one clock, which backup workers do not ensure."""
        return self.is_bsp and not self.consistency.backup_workers
