"""A table as its creator describes it: dtype, layout of tensors or rows, optimizer, consistency."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Generic, TypeVar

from ps_core import limits
from ps_core.consistency import Consistency, Mode, StalePolicy
from ps_core.errors import InvalidConfig, check_config
from ps_core.tables.elements import NATIVE_CODEC, Codec, DType, Initializer, InitializerKind
from ps_core.tables.optimizers import (
    ONLY_ROW_OPTIMIZERS,
    ROW_OPTIMIZERS,
    Kernels,
    OptimizerKind,
    OptimizerSpec,
    check_flags,
    check_row_hyperparameters,
)

ResultT = TypeVar("ResultT")

_CACHED_COUNT = 64
"""Tuples that a `TupleCache` has, at most."""


class TupleCache(Generic[ResultT]):
    """A cache of results for the newest few tuples, by identity: to look through a layout of a
    hundred thousand tensors takes a tenth of a second. Thread-safe.
    """

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[int, tuple[tuple[Any, ...], ResultT]] = {}

    def find(self, of: tuple[Any, ...]) -> ResultT | None:
        """The result for this very tuple, or None."""
        found = self._found.get(id(of))
        return None if found is None else found[1]

    def put(self, of: tuple[Any, ...], result: ResultT) -> ResultT:
        """Store a result. The tuple is kept alive, so that its id stays its own."""
        for old in list(self._found)[: max(0, len(self._found) + 1 - _CACHED_COUNT)]:
            self._found.pop(old, None)
        self._found[id(of)] = of, result
        return result


class Reduction(Enum):
    """Combination of contributions."""

    MEAN = "mean"
    SUM = "sum"


class Eviction(Enum):
    """The rows that leave if there are too many: the oldest; the least updated, and of these so."""

    LRU = "lru"
    LFU = "lfu"


class RowStorage(Enum):
    """Values of rows in a server's memory: as the table's dtype, or rounded to fewer bits."""

    FULL = "full"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


_ROW_INITIALIZERS = frozenset(
    (
        InitializerKind.ZEROS,
        InitializerKind.CONSTANT,
        InitializerKind.UNIFORM,
        InitializerKind.NORMAL,
    )
)


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
        partition_count: 0, where the scheduler is to choose; a table that exists has some.
        max_row_count: rows of the whole table; each partition has its share. 0: any number.
        evict_after: a row is evicted that so many updates of its partition had no gradient of.
        admit_after: a row is made by the so manieth update of its partition with a gradient of it.
        storage: of the values; each update rounds what it has changed.
    """

    partition_count: int = 0
    seed: int = 0
    max_row_count: int = 0
    eviction: Eviction = Eviction.LRU
    evict_after: int = 0
    admit_after: int = 1
    storage: RowStorage = RowStorage.FULL

    def check(self, table: str) -> None:
        """InvalidConfig if a value is out of bounds, or does nothing."""
        for name, low, high in (
            ("partition_count", 0, limits.MAX_PARTITION_COUNT),
            ("seed", 0, 2**64 - 1),
            ("max_row_count", 0, 2**63 - 1),
            ("evict_after", 0, limits.MAX_ROW_AGE_COUNT),
            ("admit_after", 1, limits.MAX_ROW_AGE_COUNT),
        ):
            value = getattr(self, name)
            words = f"table '{table}': {name} is {value}; expected {low} to {high}"
            check_config(low <= value <= high, words)
        check_config(
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
        check_config(
            1 <= name_bytes <= limits.MAX_TABLE_NAME_BYTES,
            f"table name has {name_bytes} bytes; expected 1 to {limits.MAX_TABLE_NAME_BYTES}",
        )
        check_config(self.element_count >= 1, f"table '{self.name}': element_count is below 1")
        block = self.block_elements or limits.DEFAULT_BLOCK_ELEMENTS
        check_config(
            limits.BLOCK_ALIGNMENT_ELEMENTS <= block <= limits.MAX_BLOCK_ELEMENTS
            and block % limits.BLOCK_ALIGNMENT_ELEMENTS == 0,
            f"table '{self.name}': block_elements is {block}; expected a multiple of "
            f"{limits.BLOCK_ALIGNMENT_ELEMENTS} up to {limits.MAX_BLOCK_ELEMENTS}",
        )
        tensors = self.tensors or (TensorSpec(self.name, (self.element_count,), 0),)
        _check_layout(self.name, tensors, self.element_count)
        kind, policy = self.optimizer.kind, self.consistency.policy
        check_config(
            kind is not OptimizerKind.AGGREGATE
            or (self.mode is Mode.BSP and not self.consistency.backup_workers),
            f"table '{self.name}': AGGREGATE needs BSP without backup workers: every worker takes "
            "every sum",
        )
        check_config(
            kind is not OptimizerKind.ASSIGN or policy is StalePolicy.ACCEPT,
            f"table '{self.name}': ASSIGN takes values, not gradients; expected no policy for "
            "stale ones",
        )
        check_config(
            kind is not OptimizerKind.ADD or policy is not StalePolicy.COMPENSATE,
            f"table '{self.name}': ADD takes deltas, not gradients; expected no compensation",
        )
        check_config(
            not self.optimizer.inner_steps or policy is not StalePolicy.COMPENSATE,
            f"table '{self.name}': inner_steps is {self.optimizer.inner_steps}, so pushes are no "
            "gradients; expected no compensation",
        )
        fragment_count, setting = self.optimizer.fragment_count, self.consistency
        check_config(
            fragment_count <= 1 or not setting.backup_workers,
            f"table '{self.name}': fragment_count is {fragment_count} with {setting}; expected no "
            "backup workers: one that was left out never learns how far the others are",
        )
        try:
            self.consistency.validated()
        except InvalidConfig as error:
            raise InvalidConfig(f"table '{self.name}': {error.message}") from None
        self._check_rows()
        inline = self.initializer.inline
        expected = self.element_count * NATIVE_CODEC[self.dtype].element_bytes
        check_flags(self.name, self.optimizer)
        self._check_constant()
        if self.initializer.kind is InitializerKind.INLINE:
            check_config(
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
            check_config(
                kind not in ONLY_ROW_OPTIMIZERS,
                f"table '{name}': {kind.value} is for tables of rows",
            )
            check_config(
                start.kind not in (InitializerKind.UNIFORM, InitializerKind.NORMAL),
                f"table '{name}': {start.kind.value} is for tables of rows; a model's parameters "
                "start from rank 0's",
            )
            return
        self.rows.check(name)
        check_config(
            self.element_count <= limits.MAX_ROW_ELEMENTS,
            f"table '{name}': a row has {self.element_count} elements; expected at most "
            f"{limits.MAX_ROW_ELEMENTS}",
        )
        check_config(
            self.dtype in (DType.FLOAT32, DType.FLOAT64),
            f"table '{name}': dtype is {self.dtype.value}; a table of rows is of float32 or "
            "float64",
        )
        check_config(
            kind in ROW_OPTIMIZERS
            and self.optimizer.kernels is Kernels.FAST
            and not (kind is OptimizerKind.ADAM and self.optimizer.amsgrad),
            f"table '{name}': the optimizer is {self.optimizer.label}; a table of rows has sgd, "
            "adam, adagrad, rowwise_adagrad or ftrl, with fast kernels and without amsgrad",
        )
        check_config(
            self.rows.storage is RowStorage.FULL
            or (self.dtype is DType.FLOAT32 and not self.allow_non_finite),
            f"table '{name}': storage is {self.rows.storage.value}; expected full, or a table of "
            "finite float32",
        )
        check_row_hyperparameters(self.optimizer.label, self.optimizer.merged(()))
        check_config(
            start.kind in _ROW_INITIALIZERS,
            f"table '{name}': the initializer is {start.kind.value}; rows start with zeros, a "
            "constant, or numbers of a uniform or normal distribution",
        )
        check_config(
            math.isfinite(start.scale) and 0.0 <= start.scale <= limits.MAX_FLOAT32,
            f"table '{name}': the initializer's scale is {start.scale}; expected finite, from 0",
        )
        check_config(
            self.consistency.policy is not StalePolicy.COMPENSATE,
            f"table '{name}': a table of rows keeps no reader's values; expected no compensation",
        )

    def _check_constant(self) -> None:
        constant = self.initializer.constant
        largest = math.inf if self.dtype is DType.FLOAT64 else limits.MAX_FLOAT32
        check_config(
            abs(constant) <= largest if math.isfinite(constant) else self.allow_non_finite,
            f"table '{self.name}': its initial value is {constant}; expected a finite number that "
            f"{self.dtype.value} tables can hold",
        )


_WELL_FORMED = TupleCache[int]()
"""Valid layouts, and their elements."""


def _check_layout(table: str, tensors: tuple[TensorSpec, ...], element_count: int) -> None:
    if _WELL_FORMED.find(tensors) == element_count:
        return
    check_config(
        len(tensors) <= limits.MAX_TENSOR_COUNT,
        f"table '{table}' has {len(tensors)} tensors; expected at most {limits.MAX_TENSOR_COUNT}",
    )
    end = 0
    for tensor in tensors:
        # Before the product, which for ten thousand sizes has ten thousand digits.
        check_config(
            len(tensor.shape) <= limits.MAX_TENSOR_DIMENSION_COUNT,
            f"table '{table}': tensor '{tensor.name}' has {len(tensor.shape)} dimensions; expected "
            f"at most {limits.MAX_TENSOR_DIMENSION_COUNT}",
        )
        check_config(
            tensor.offset == end,
            f"table '{table}': tensor '{tensor.name}' starts at {tensor.offset}; expected {end}",
        )
        end += tensor.element_count
    check_config(
        end == element_count,
        f"table '{table}': its tensors have {end} elements; element_count is {element_count}",
    )
    check_config(
        len({tensor.name for tensor in tensors}) == len(tensors),
        f"table '{table}' has two tensors of one name",
    )
    _WELL_FORMED.put(tensors, element_count)
