"""Optimizers of tables as values: kinds, hyperparameters and their bounds, names of state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from ps_core import limits
from ps_core.errors import InvalidConfig, check_config


class OptimizerKind(Enum):
    """Treatment of an update by the servers."""

    SGD = "sgd"
    ADAM = "adam"
    ADAMW = "adamw"
    ADAGRAD = "adagrad"
    RMSPROP = "rmsprop"
    AGGREGATE = "aggregate"
    ADD = "add"
    ASSIGN = "assign"
    CUSTOM = "custom"
    ROWWISE_ADAGRAD = "rowwise_adagrad"
    FTRL = "ftrl"


class Kernels(Enum):
    """Implementation of an optimizer's arithmetic."""

    FAST = "fast"
    EXACT = "exact"


HYPERPARAMETER_DEFAULTS: dict[OptimizerKind, dict[str, float]] = {
    OptimizerKind.SGD: {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0},
    OptimizerKind.ADAM: {
        "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0,
    },
    OptimizerKind.ADAMW: {
        "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2,
    },
    OptimizerKind.ADAGRAD: {
        "lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10,
        "initial_accumulator_value": 0.0,
    },
    OptimizerKind.RMSPROP: {
        "lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0,
    },
    OptimizerKind.AGGREGATE: {},
    OptimizerKind.ADD: {},
    OptimizerKind.ASSIGN: {},
    OptimizerKind.ROWWISE_ADAGRAD: {"lr": 1e-2, "eps": 1e-10, "initial_accumulator_value": 0.0},
    OptimizerKind.FTRL: {"lr": 0.1, "l1": 0.0, "l2": 0.0, "beta": 1.0},
}  # fmt: skip
"""Hyperparameters of each optimizer, with torch.optim's defaults; CUSTOM's are the update's."""


_HYPERPARAMETER_BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("beta1", "beta2"), (0.0, 1.0)),
    **dict.fromkeys(("momentum", "alpha", "eps", "weight_decay", "lr_decay"), (0.0, math.inf)),
    **dict.fromkeys(("initial_accumulator_value", "l1", "l2", "beta"), (0.0, math.inf)),
}
"""Bounds of torch.optim's constructors, [low, high): outside, its arithmetic divides by zero or
takes roots of negative numbers. A learning rate may have any sign and size within
MAX_HYPERPARAMETER_MAGNITUDE, because learning rate schedules set it so."""


_FTRL_BOUNDS = {
    **_HYPERPARAMETER_BOUNDS,
    "lr": (1.0 / limits.MAX_HYPERPARAMETER_MAGNITUDE, math.inf),
}
"""FTRL divides by its learning rate."""


CLAMP_NAMES = ("clamp_min", "clamp_max")


ROW_OPTIMIZERS = frozenset(
    (
        OptimizerKind.SGD,
        OptimizerKind.ADAM,
        OptimizerKind.ADAGRAD,
        OptimizerKind.ROWWISE_ADAGRAD,
        OptimizerKind.FTRL,
    )
)
"""Optimizers of tables of rows."""


ONLY_ROW_OPTIMIZERS = frozenset((OptimizerKind.ROWWISE_ADAGRAD, OptimizerKind.FTRL))
"""Those that dense tables do not have."""


_ROW_HYPERPARAMETERS = frozenset(
    ("lr", "beta1", "beta2", "eps", "initial_accumulator_value", "l1", "l2", "beta")
)
"""Hyperparameters that an update of rows uses; the others must be 0, as torch's optimizers want
them to be with sparse gradients."""


_STATE_ARRAYS: dict[OptimizerKind, tuple[str, ...]] = {
    OptimizerKind.SGD: ("momentum_buffer",),
    OptimizerKind.ADAM: ("exp_avg", "exp_avg_sq"),
    OptimizerKind.ADAMW: ("exp_avg", "exp_avg_sq"),
    OptimizerKind.ADAGRAD: ("sum",),
    OptimizerKind.RMSPROP: ("square_avg", "momentum_buffer"),
}
"""State arrays of each optimizer; `amsgrad` and `centered` add one each."""


CLAMPED = frozenset(_STATE_ARRAYS)
"""Optimizers whose values can be clamped after an update, by the hyperparameters `CLAMP_NAMES`."""


STEP_ARRAY = "step"
"""Steps that each tensor has taken, as an array of its elements."""


VALUES_ARRAY = "values"
"""The values, where they are loaded together with optimizer state."""


MAX_LOADED_STEP_COUNT = 2**24
"""End of torch.optim's step counter: in float32, one more is the same number."""


Hyperparameters = tuple[tuple[str, float], ...]
"""Sorted (name, value) pairs: comparable and hashable."""


DELAY_MEAN_SQUARE = "delay_mean_square"
"""The state that adaptive delay compensation adds to a block, beside the optimizer's."""

DISAGREE = "disagree about clock"
"""The words of an error that is about workers whose seals of one clock differ."""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer and its settings; `hyperparameters` is complete and sorted after `validated`.

    AGGREGATE has none itself. Steps bring those of the workers' own optimizers, by any names, so
    that these can be compared.

    CUSTOM runs the servers' update `custom_update` (`ps_core.update_offer`), whose hyperparameters
    the scheduler completes. With `inner_steps` a push is a pseudo-gradient, the distance that so
    many steps at the worker moved its parameters (SEMANTICS S12); 0: a gradient. Above 1,
    `fragment_count` says that each clock has the blocks of one fragment of so many.
    """

    kind: OptimizerKind
    hyperparameters: Hyperparameters = ()
    nesterov: bool = False
    amsgrad: bool = False
    centered: bool = False
    maximize: bool = False
    kernels: Kernels = Kernels.FAST
    custom_update: str = ""
    inner_steps: int = 0
    fragment_count: int = 0

    @property
    def state_arrays(self) -> tuple[str, ...]:
        """State arrays by torch.optim's names; none for an optimizer that torch lacks. With
        `STEP_ARRAY` they are the whole state.
        """
        more = ((self.amsgrad, "max_exp_avg_sq"), (self.centered, "grad_avg"))
        return (*_STATE_ARRAYS.get(self.kind, ()), *(name for is_set, name in more if is_set))

    def has_array(self, name: str) -> bool:
        """True if it has state of that name, `STEP_ARRAY` and `VALUES_ARRAY` included."""
        names = self.state_arrays
        return name in names or (bool(names) and name in (STEP_ARRAY, VALUES_ARRAY))

    @property
    def label(self) -> str:
        """Name for messages."""
        return f"custom:{self.custom_update}" if self.custom_update else self.kind.value

    def merged(self, given: Hyperparameters) -> Hyperparameters:
        """The hyperparameters with those `given` put over them, sorted; InvalidConfig for a name
        or a value that the optimizer does not have.
        """
        is_custom = self.kind is OptimizerKind.CUSTOM
        merged = dict(self.hyperparameters if is_custom else HYPERPARAMETER_DEFAULTS[self.kind])
        if self.kind is OptimizerKind.AGGREGATE:
            merged = dict(given)
        is_ftrl = self.kind is OptimizerKind.FTRL
        bounds = {} if is_custom else _FTRL_BOUNDS if is_ftrl else _HYPERPARAMETER_BOUNDS
        others = CLAMP_NAMES if self.kind in CLAMPED else ()
        for name, value in (*self.hyperparameters, *given):
            if name not in merged and name not in others:
                raise InvalidConfig(
                    f"{self.label} has no hyperparameter '{name}'; it has "
                    f"{', '.join(sorted({*merged, *others})) or 'none'}"
                )
            if not math.isfinite(value):
                raise InvalidConfig(f"hyperparameter '{name}' is {value}; expected a finite number")
            if abs(value) > limits.MAX_HYPERPARAMETER_MAGNITUDE:
                raise InvalidConfig(
                    f"hyperparameter '{name}' is {value}; expected a magnitude of at most "
                    f"{limits.MAX_HYPERPARAMETER_MAGNITUDE:g}"
                )
            low, high = bounds.get(name, (-math.inf, math.inf))
            if not low <= value < high:
                raise InvalidConfig(
                    f"hyperparameter '{name}' is {value}; expected at least {low}, below {high}"
                )
            merged[name] = value + 0.0  # -0.0 is 0.0: equal numbers are the same bits
        if others and merged.get("clamp_min", -math.inf) > merged.get("clamp_max", math.inf):
            raise InvalidConfig(
                f"clamp_min is {merged['clamp_min']}; expected at most clamp_max, "
                f"{merged['clamp_max']}"
            )
        return tuple(sorted(merged.items()))


class StepHyperparameters:
    """`OptimizerSpec.merged` of one table, for one step after the other: all ranges of a seal, and
    most often all workers, have the same hyperparameters, which are merged once.
    """

    __slots__ = ("_has_rows", "_last", "_spec")

    def __init__(self, spec: OptimizerSpec, *, has_rows: bool = False) -> None:
        self._spec = spec
        self._has_rows = has_rows
        self._last: tuple[Hyperparameters, Hyperparameters] = (), spec.merged(())

    def merged(self, given: Hyperparameters) -> Hyperparameters:
        """As `OptimizerSpec.merged`; merged ones are returned as they are."""
        last, merged = self._last
        if given != last and given != merged:
            merged = self._spec.merged(given)
            if self._has_rows:
                check_row_hyperparameters(self._spec.label, merged)
            self._last = given, merged
        return merged


def check_row_hyperparameters(label: str, merged: Hyperparameters) -> None:
    """Raises InvalidConfig if one is set that an update of rows does not have."""
    for name, value in merged:
        if value and name not in _ROW_HYPERPARAMETERS:
            raise InvalidConfig(
                f"hyperparameter '{name}' of {label} is {value:g} in a table of rows; expected 0: "
                "it would change rows that have no gradient"
            )


def array_words(optimizer: OptimizerSpec) -> str:
    """State arrays of an optimizer, for messages."""
    names = optimizer.state_arrays
    if not names:
        return f"none: {optimizer.label} has no state in torch.optim's layout"
    return ", ".join([*names, STEP_ARRAY])


def check_flags(table: str, optimizer: OptimizerSpec) -> None:
    """Check that the optimizer has each variant that is set."""
    numbers = dict(optimizer.merged(()))
    is_custom, named = optimizer.kind is OptimizerKind.CUSTOM, optimizer.custom_update
    check_config(
        is_custom == bool(named) and not (is_custom and optimizer.maximize),
        f"table '{table}': {optimizer.kind.value} with custom_update '{named}' and maximize "
        f"{optimizer.maximize}; expected a name with custom, maximize with all others",
    )
    check_config(
        len(named.encode()) <= limits.MAX_CUSTOM_UPDATE_NAME_BYTES,
        f"table '{table}': custom_update has {len(named.encode())} bytes; expected at most "
        f"{limits.MAX_CUSTOM_UPDATE_NAME_BYTES}",
    )
    steps, most = optimizer.inner_steps, limits.MAX_INNER_STEP_COUNT
    check_config(
        0 <= steps <= most and (not steps or optimizer.kind is OptimizerKind.SGD),
        f"table '{table}': {optimizer.kind.value} with inner_steps {steps}; expected 0 to {most:,} "
        "with sgd, 0 with all others",
    )
    count, most = optimizer.fragment_count, limits.MAX_FRAGMENT_COUNT
    check_config(
        0 <= count <= most and (count <= 1 or steps > 0),
        f"table '{table}': fragment_count is {count} with inner_steps {steps}; expected 0 to "
        f"{most:,} with inner steps, 0 without",
    )
    adaptive = (OptimizerKind.ADAM, OptimizerKind.ADAMW)
    for flag, is_set, kinds in (
        ("nesterov", optimizer.nesterov, (OptimizerKind.SGD,)),
        ("amsgrad", optimizer.amsgrad, adaptive),
        ("centered", optimizer.centered, (OptimizerKind.RMSPROP,)),
    ):
        check_config(
            not is_set or optimizer.kind in kinds,
            f"table '{table}': {optimizer.kind.value} has no {flag}; expected it with "
            f"{' or '.join(kind.value for kind in kinds)} only",
        )
    check_config(
        not optimizer.nesterov or (numbers["momentum"] > 0 and numbers["dampening"] == 0),
        f"table '{table}': nesterov needs momentum above 0 and no dampening",
    )
