"""Tables as values: specs, blocks, and the layout of tensors.

Rules:
    - A dense table is a flat vector; its tensors follow each other without gap, C-contiguous.
    - Block b holds elements [b * block_elements, min((b + 1) * block_elements, element_count)).
    - A segment is the overlap of one tensor with one block; presence bits of a block number its
      segments, in layout order.

Invariants:
    TAB-1  The segments of all blocks cover every element exactly once.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from ps_core import limits
from ps_core.change import Join, TableChange, TableCut
from ps_core.consistency import Consistency, Mode, StalePolicy
from ps_core.errors import InvalidConfig, InvalidKeys, InvalidTensor
from ps_core.keys import RangeId, TableId, range_of_slot, slot_of_ordinal

ResultT = TypeVar("ResultT")


class TupleCache(Generic[ResultT]):
    """A cache of results for the newest few tuples, by identity: to look through a layout of a
    hundred thousand tensors takes a tenth of a second. It has at most `most`. Thread-safe.
    """

    __slots__ = ("_found", "_most")

    def __init__(self, most: int = 64) -> None:
        self._found: dict[int, tuple[tuple[Any, ...], ResultT]] = {}
        self._most = most

    def find(self, of: tuple[Any, ...]) -> ResultT | None:
        """The result for this very tuple, or None."""
        found = self._found.get(id(of))
        return None if found is None else found[1]

    def put(self, of: tuple[Any, ...], result: ResultT) -> ResultT:
        """Store a result. The tuple is kept alive, so that its id stays its own."""
        for old in list(self._found)[: max(0, len(self._found) + 1 - self._most)]:
            self._found.pop(old, None)
        self._found[id(of)] = of, result
        return result


class DType(Enum):
    """Element type of a table, as its workers see it."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"

    __hash__ = object.__hash__  # members are unique: Enum's own hash costs a Python call


class Codec(Enum):
    """Encoding of a payload's elements: raw little-endian arrays."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP64 = "fp64"

    __hash__ = object.__hash__

    @property
    def element_bytes(self) -> int:
        return _CODEC_BYTES[self]


_CODEC_BYTES = {Codec.FP32: 4, Codec.FP16: 2, Codec.BF16: 2, Codec.FP64: 8}

NATIVE_CODEC = {
    DType.FLOAT32: Codec.FP32,
    DType.FLOAT16: Codec.FP16,
    DType.BFLOAT16: Codec.BF16,
    DType.FLOAT64: Codec.FP64,
}
"""The codec of a table's own dtype."""


def check_length(payload_bytes: int, codec: Codec, element_count: int) -> None:
    """Raise InvalidTensor unless the payload has the length of `element_count` elements."""
    expected = element_count * codec.element_bytes
    if payload_bytes != expected:
        raise InvalidTensor(
            f"payload has {payload_bytes} bytes; expected {expected} "
            f"({element_count} elements of {codec.value})"
        )


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


class Reduction(Enum):
    """Combination of contributions."""

    MEAN = "mean"
    SUM = "sum"


class InitializerKind(Enum):
    """Values of a table before its first update."""

    ZEROS = "zeros"
    CONSTANT = "constant"
    INLINE = "inline"
    FROM_RANK_ZERO = "from_rank_zero"
    UNIFORM = "uniform"
    NORMAL = "normal"


class Eviction(Enum):
    """The rows that leave if there are too many: the oldest; the least updated, and of these so."""

    LRU = "lru"
    LFU = "lfu"


@dataclass(frozen=True, slots=True)
class Initializer:
    """First values of a table: `constant` for CONSTANT, `inline` bytes of its dtype for INLINE; of
    rows: UNIFORM is drawn from [-scale, scale), NORMAL has mean 0 and standard deviation `scale`.
    """

    kind: InitializerKind = InitializerKind.ZEROS
    constant: float = 0.0
    inline: bytes = b""
    scale: float = 0.0


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

_ROW_INITIALIZERS = frozenset(
    (
        InitializerKind.ZEROS,
        InitializerKind.CONSTANT,
        InitializerKind.UNIFORM,
        InitializerKind.NORMAL,
    )
)

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


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer and its settings; `hyperparameters` is complete and sorted after `validated`.

    CUSTOM runs the servers' update `custom_update` (`ps_core.update_offer`), whose hyperparameters
    the scheduler completes.
    """

    kind: OptimizerKind
    hyperparameters: Hyperparameters = ()
    nesterov: bool = False
    amsgrad: bool = False
    centered: bool = False
    maximize: bool = False
    kernels: Kernels = Kernels.FAST
    custom_update: str = ""

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


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a dense table; `offset` is in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def element_count(self) -> int:
        """Elements of the tensor; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class RowsSpec:
    """The spec of an embedding table beside its layout, which is that of one row.

    A partition is a block: ids are spread over them (`ps_core.rows.partition_of`), and a row is in
    no table before its first update. `seed` is that of the values that it has until then.

    Attributes:
        max_row_count: rows of the whole table; each partition has its share. 0: any number.
        evict_after: a row is evicted that so many updates of its partition had no gradient of.
        admit_after: a row is made by the so manieth update of its partition with a gradient of it.
    """

    partition_count: int = limits.DEFAULT_PARTITION_COUNT
    seed: int = 0
    max_row_count: int = 0
    eviction: Eviction = Eviction.LRU
    evict_after: int = 0
    admit_after: int = 1

    def check(self, table: str) -> None:
        """InvalidConfig if a value is out of bounds, or does nothing."""
        for name, low, high in (
            ("partition_count", 1, limits.MAX_PARTITION_COUNT),
            ("seed", 0, 2**64 - 1),
            ("max_row_count", 0, 2**63 - 1),
            ("evict_after", 0, limits.MAX_ROW_AGE_COUNT),
            ("admit_after", 1, limits.MAX_ROW_AGE_COUNT),
        ):
            value = getattr(self, name)
            words = f"table '{table}': {name} is {value}; expected {low} to {high}"
            _require(low <= value <= high, words)
        _require(
            self.eviction is Eviction.LRU or self.max_row_count > 0,
            f"table '{table}': eviction is {self.eviction.value} without max_rows, so no row is "
            "evicted by it; expected both, or neither",
        )


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table as its creator describes it. With `rows` the layout is that of one row."""

    name: str
    dtype: DType
    element_count: int
    optimizer: OptimizerSpec
    block_elements: int = limits.DEFAULT_BLOCK_ELEMENTS
    tensors: tuple[TensorSpec, ...] = ()
    consistency: Consistency = field(default_factory=Consistency)
    initializer: Initializer = field(default_factory=Initializer)
    reduction: Reduction = Reduction.MEAN
    allow_non_finite: bool = False
    gate_bytes: int = 0
    rows: RowsSpec | None = None

    @property
    def mode(self) -> Mode:
        return self.consistency.mode

    @property
    def size_words(self) -> str:
        """The size, for people."""
        one = f"{self.element_count:,} elements of {self.dtype.value}"
        return one if self.rows is None else f"rows of {one}"

    @property
    def accumulator_element_bytes(self) -> int:
        """Bytes of one element of an accumulator: 8 for float64 tables, else 4."""
        return 8 if self.dtype is DType.FLOAT64 else 4

    @property
    def arithmetic_codec(self) -> Codec:
        """The codec of accumulators and optimizer state."""
        return Codec.FP64 if self.dtype is DType.FLOAT64 else Codec.FP32

    def validated(self) -> TableSpec:
        """The spec with every default filled in; InvalidConfig if a field is wrong."""
        name_bytes = len(self.name.encode())
        _require(
            1 <= name_bytes <= limits.MAX_TABLE_NAME_BYTES,
            f"table name has {name_bytes} bytes; expected 1 to {limits.MAX_TABLE_NAME_BYTES}",
        )
        _require(self.element_count >= 1, f"table '{self.name}': element_count is below 1")
        block = self.block_elements or limits.DEFAULT_BLOCK_ELEMENTS
        _require(
            limits.BLOCK_ALIGNMENT_ELEMENTS <= block <= limits.MAX_BLOCK_ELEMENTS
            and block % limits.BLOCK_ALIGNMENT_ELEMENTS == 0,
            f"table '{self.name}': block_elements is {block}; expected a multiple of "
            f"{limits.BLOCK_ALIGNMENT_ELEMENTS} up to {limits.MAX_BLOCK_ELEMENTS}",
        )
        tensors = self.tensors or (TensorSpec(self.name, (self.element_count,), 0),)
        _check_layout(self.name, tensors, self.element_count)
        kind, policy = self.optimizer.kind, self.consistency.policy
        _require(
            kind is not OptimizerKind.AGGREGATE
            or (self.mode is Mode.BSP and not self.consistency.backup_workers),
            f"table '{self.name}': AGGREGATE needs BSP without backup workers: every worker takes "
            "every sum",
        )
        _require(
            kind is not OptimizerKind.ASSIGN or policy is StalePolicy.ACCEPT,
            f"table '{self.name}': ASSIGN takes values, not gradients; expected no policy for "
            "stale ones",
        )
        _require(
            kind is not OptimizerKind.ADD or policy is not StalePolicy.COMPENSATE,
            f"table '{self.name}': ADD takes deltas, not gradients; expected no compensation",
        )
        try:
            self.consistency.validated()
        except InvalidConfig as error:
            raise InvalidConfig(f"table '{self.name}': {error.message}") from None
        self._check_rows()
        inline = self.initializer.inline
        expected = self.element_count * NATIVE_CODEC[self.dtype].element_bytes
        _check_flags(self.name, self.optimizer)
        self._check_constant()
        if self.initializer.kind is InitializerKind.INLINE:
            _require(
                len(inline) == expected and expected <= limits.MAX_INLINE_INITIALIZER_BYTES,
                f"table '{self.name}': the inline initializer has {len(inline)} bytes; expected "
                f"{expected}, at most {limits.MAX_INLINE_INITIALIZER_BYTES}",
            )
        optimizer = replace(self.optimizer, hyperparameters=self.optimizer.merged(()))
        found = replace(self, block_elements=block, tensors=tensors, optimizer=optimizer)
        return replace(found, consistency=self.consistency.as_requested)

    def _check_rows(self) -> None:
        name, kind, start = self.name, self.optimizer.kind, self.initializer
        if self.rows is None:
            _require(
                kind not in ONLY_ROW_OPTIMIZERS,
                f"table '{name}': {kind.value} is for tables of rows",
            )
            _require(
                start.kind not in (InitializerKind.UNIFORM, InitializerKind.NORMAL),
                f"table '{name}': {start.kind.value} is for tables of rows; a model's parameters "
                "start from rank 0's",
            )
            return
        self.rows.check(name)
        _require(
            self.element_count <= limits.MAX_ROW_ELEMENTS,
            f"table '{name}': a row has {self.element_count} elements; expected at most "
            f"{limits.MAX_ROW_ELEMENTS}",
        )
        _require(
            self.dtype in (DType.FLOAT32, DType.FLOAT64),
            f"table '{name}': dtype is {self.dtype.value}; a table of rows is of float32 or "
            "float64",
        )
        _require(
            kind in ROW_OPTIMIZERS
            and self.optimizer.kernels is Kernels.FAST
            and not (kind is OptimizerKind.ADAM and self.optimizer.amsgrad),
            f"table '{name}': the optimizer is {self.optimizer.label}; a table of rows has sgd, "
            "adam, adagrad, rowwise_adagrad or ftrl, with fast kernels and without amsgrad",
        )
        check_row_hyperparameters(self.optimizer.label, self.optimizer.merged(()))
        _require(
            start.kind in _ROW_INITIALIZERS,
            f"table '{name}': the initializer is {start.kind.value}; rows start with zeros, a "
            "constant, or numbers of a uniform or normal distribution",
        )
        _require(
            math.isfinite(start.scale) and 0.0 <= start.scale <= limits.MAX_FLOAT32,
            f"table '{name}': the initializer's scale is {start.scale}; expected finite, from 0",
        )
        _require(
            self.consistency.policy is not StalePolicy.COMPENSATE,
            f"table '{name}': a table of rows keeps no reader's values; expected no compensation",
        )

    def _check_constant(self) -> None:
        constant = self.initializer.constant
        largest = math.inf if self.dtype is DType.FLOAT64 else limits.MAX_FLOAT32
        _require(
            abs(constant) <= largest if math.isfinite(constant) else self.allow_non_finite,
            f"table '{self.name}': its initial value is {constant}; expected a finite number that "
            f"{self.dtype.value} tables can hold",
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidConfig(message)


def _check_flags(table: str, optimizer: OptimizerSpec) -> None:
    """Check that the optimizer has each variant that is set."""
    numbers = dict(optimizer.merged(()))
    is_custom, named = optimizer.kind is OptimizerKind.CUSTOM, optimizer.custom_update
    _require(
        is_custom == bool(named) and not (is_custom and optimizer.maximize),
        f"table '{table}': {optimizer.kind.value} with custom_update '{named}' and maximize "
        f"{optimizer.maximize}; expected a name with custom, maximize with all others",
    )
    _require(
        len(named.encode()) <= limits.MAX_CUSTOM_UPDATE_NAME_BYTES,
        f"table '{table}': custom_update has {len(named.encode())} bytes; expected at most "
        f"{limits.MAX_CUSTOM_UPDATE_NAME_BYTES}",
    )
    adaptive = (OptimizerKind.ADAM, OptimizerKind.ADAMW)
    for flag, is_set, kinds in (
        ("nesterov", optimizer.nesterov, (OptimizerKind.SGD,)),
        ("amsgrad", optimizer.amsgrad, adaptive),
        ("centered", optimizer.centered, (OptimizerKind.RMSPROP,)),
    ):
        _require(
            not is_set or optimizer.kind in kinds,
            f"table '{table}': {optimizer.kind.value} has no {flag}; expected it with "
            f"{' or '.join(kind.value for kind in kinds)} only",
        )
    _require(
        not optimizer.nesterov or (numbers["momentum"] > 0 and numbers["dampening"] == 0),
        f"table '{table}': nesterov needs momentum above 0 and no dampening",
    )


_WELL_FORMED = TupleCache[int]()
"""Valid layouts, and their elements."""


def _check_layout(table: str, tensors: tuple[TensorSpec, ...], element_count: int) -> None:
    if _WELL_FORMED.find(tensors) == element_count:
        return
    _require(
        len(tensors) <= limits.MAX_TENSOR_COUNT,
        f"table '{table}' has {len(tensors)} tensors; expected at most {limits.MAX_TENSOR_COUNT}",
    )
    end = 0
    for tensor in tensors:
        # Before the product, which for ten thousand sizes has ten thousand digits.
        _require(
            len(tensor.shape) <= limits.MAX_TENSOR_DIMENSION_COUNT,
            f"table '{table}': tensor '{tensor.name}' has {len(tensor.shape)} dimensions; expected "
            f"at most {limits.MAX_TENSOR_DIMENSION_COUNT}",
        )
        _require(
            tensor.offset == end,
            f"table '{table}': tensor '{tensor.name}' starts at {tensor.offset}; expected {end}",
        )
        end += tensor.element_count
    _require(
        end == element_count,
        f"table '{table}': its tensors have {end} elements; element_count is {element_count}",
    )
    _require(
        len({tensor.name for tensor in tensors}) == len(tensors),
        f"table '{table}' has two tensors of one name",
    )
    _WELL_FORMED.put(tensors, element_count)


@dataclass(frozen=True, slots=True)
class TensorSegment:
    """The overlap of one tensor with one block; `begin` and `end` count from the block's start."""

    tensor: int
    begin: int
    end: int


@dataclass(frozen=True)
class Table:
    """A table as the cluster knows it.

    Attributes:
        table_id: never given twice.
        first_ordinal: global ordinal of its first block.
        change: the newest committed change of its consistency.
        proposed: the change that the servers are asked to prepare.
        joins: the newest join of each rank.
        cut: the newest cut.
        restored_clock: the clock at which it was restored, if it was.
    """

    table_id: TableId
    first_ordinal: int
    spec: TableSpec
    change: TableChange | None = None
    proposed: TableChange | None = None
    joins: tuple[Join, ...] = ()
    cut: TableCut | None = None
    restored_clock: int | None = None
    run: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Run and name: unique in the cluster."""
        return self.run, self.spec.name

    @property
    def title(self) -> str:
        """Name, with the run if that has one."""
        return f"{self.run}:{self.spec.name}" if self.run else self.spec.name

    @property
    def consistency(self) -> Consistency:
        """The newest setting."""
        return self.spec.consistency if self.change is None else self.change.consistency

    @property
    def cut_step(self) -> int | None:
        """Step of the cut; None if it is not cut, or each range was cut at its own moment."""
        if self.cut is None:
            return None
        after_clock, change = self.cut.after_clock, self.change
        is_newest = change is None or after_clock > change.after_clock
        is_asynchronous = is_newest and self.consistency.mode is Mode.ASP
        return None if is_asynchronous else after_clock

    @property
    def block_count(self) -> int:
        rows = self.spec.rows
        if rows is not None:
            return rows.partition_count
        return -(-self.spec.element_count // self.spec.block_elements)

    def block_length(self, block: int) -> int:
        """Elements of a block, fewer in the last one; of rows: of one row. InvalidKeys if it does
        not exist.
        """
        if not 0 <= block < self.block_count:
            raise InvalidKeys(
                f"table '{self.spec.name}' has blocks 0 to {self.block_count - 1}; got {block}"
            )
        if self.spec.rows is not None:
            return self.spec.element_count
        size = self.spec.block_elements
        return min(size, self.spec.element_count - block * size)

    def range_of_block(self, block: int, range_count: int) -> RangeId:
        """The range that holds a block."""
        return range_of_slot(slot_of_ordinal(self.first_ordinal + block), range_count)

    def deciding_range(self, range_count: int) -> RangeId:
        """The table's first range, whose primary ends a decided change (SEMANTICS S6)."""
        return next(iter(self.blocks_by_range(range_count)))

    def blocks_by_range(self, range_count: int) -> Mapping[RangeId, tuple[int, ...]]:
        """Blocks by range, ascending, without empty ranges; at first half a microsecond a block."""
        found = self._by_range.get(range_count)
        if found is None:
            found = _blocks_by_range(self.first_ordinal, self.block_count, range_count)
            self._by_range[range_count] = found
        return found

    def knows_ranges(self, range_count: int) -> bool:
        """True if `blocks_by_range` takes no time."""
        return range_count in self._by_range

    @cached_property
    def _by_range(self) -> dict[int, Mapping[RangeId, tuple[int, ...]]]:
        return {}

    @cached_property
    def step_hyperparameters(self) -> StepHyperparameters:
        return StepHyperparameters(self.spec.optimizer, has_rows=self.spec.rows is not None)

    @cached_property
    def _tensor_ends(self) -> tuple[int, ...]:
        return tuple(t.offset + t.element_count for t in self.spec.tensors)

    def segments(self, block: int) -> tuple[TensorSegment, ...]:
        """Overlaps of tensors with a block, in layout order. An empty tensor overlaps no block."""
        if self.spec.rows is not None:
            return (TensorSegment(0, 0, self.spec.element_count),)
        begin = block * self.spec.block_elements
        end = begin + self.block_length(block)
        first = bisect_right(self._tensor_ends, begin)
        beyond = bisect_left(self.spec.tensors, end, key=lambda tensor: tensor.offset)
        found = []
        for index in range(first, beyond):
            low = max(self.spec.tensors[index].offset, begin)
            high = min(self._tensor_ends[index], end)
            if low < high:
                found.append(TensorSegment(index, low - begin, high - begin))
        return tuple(found)


@lru_cache(maxsize=64)
def _blocks_by_range(
    first_ordinal: int, block_count: int, range_count: int
) -> Mapping[RangeId, tuple[int, ...]]:
    """Blocks of a table by range, cached because a changed table has the same."""
    found: dict[RangeId, list[int]] = {}
    for block in range(block_count):
        range_id = range_of_slot(slot_of_ordinal(first_ordinal + block), range_count)
        found.setdefault(range_id, []).append(block)
    return MappingProxyType({range_id: tuple(found[range_id]) for range_id in sorted(found)})


def presence_bytes(segment_count: int) -> int:
    return (segment_count + 7) // 8


def pack_presence(present: tuple[bool, ...]) -> bytes:
    """The bitmap of `present`, lowest bit of the first byte first; empty if all are present."""
    if all(present):
        return b""
    bits = bytearray(presence_bytes(len(present)))
    for index, is_present in enumerate(present):
        if is_present:
            bits[index // 8] |= 1 << (index % 8)
    return bytes(bits)


def unpack_presence(bitmap: bytes, segment_count: int) -> tuple[bool, ...]:
    """The inverse of `pack_presence`; InvalidKeys if the segments need another length."""
    if not bitmap:
        return (True,) * segment_count
    expected = presence_bytes(segment_count)
    if len(bitmap) != expected:
        raise InvalidKeys(f"presence has {len(bitmap)} bytes; expected {expected}")
    return tuple(bool(bitmap[i // 8] >> (i % 8) & 1) for i in range(segment_count))
