"""What a script says when it makes a table: consistency, initial values, options.

Rules:
    - Each setting is a small frozen value; `table_spec` turns them into a validated `TableSpec`.
    - A layout is a sequence of (name, shape): tensors follow each other in that order, without gap.

What it deliberately does not do: talk to anybody, or keep state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

from ps_core.errors import InvalidConfig
from ps_core.tables import (
    DType,
    Initializer,
    InitializerKind,
    Kernels,
    Mode,
    OptimizerSpec,
    Reduction,
    TableSpec,
    TensorSpec,
)
from ps_worker.values import Values, raw_of


@dataclass(frozen=True, slots=True)
class BSP:
    """Bulk-synchronous: every update has a step of every worker; all read the same version."""


@dataclass(frozen=True, slots=True)
class ASP:
    """Asynchronous: every step is applied when it arrives; nobody waits."""


@dataclass(frozen=True, slots=True)
class Zeros:
    """The table starts with zeros."""


@dataclass(frozen=True, slots=True)
class Constant:
    """The table starts with one value everywhere."""

    value: float


@dataclass(frozen=True, slots=True, eq=False)
class Inline:
    """The table starts with these values, which travel in the request: at most 1 MiB.

    Shapes:
        values: all elements of the table, in the table's dtype.
    """

    values: Values


@dataclass(frozen=True, slots=True)
class FromRank0:
    """The worker of rank 0 gives the values with `client.assign`; until then everybody waits."""


Consistency = BSP | ASP
Initial = Zeros | Constant | Inline | FromRank0
Layout = int | Sequence[int] | Sequence[tuple[str, Sequence[int]]]


class SupportsSpec(Protocol):
    """An optimizer of `ps_worker.optimizers`, or anything that describes itself the same way."""

    def spec(self, kernels: Kernels = ...) -> OptimizerSpec:
        """The optimizer as a table's setting."""
        ...


class TableOptions(TypedDict, total=False):
    """The keyword arguments of `Client.create_table`.

    Attributes:
        dtype: "float32" (default), "float64", "float16" or "bfloat16": the element type of pushes
            and pulls. The two halves keep float32 values on the servers.
        consistency: `BSP()` (default) or `ASP()`.
        reduction: "mean" (default: sum in rank order, one multiply by 1 / contributors) or "sum".
            Under ASP each step is applied whole in both cases.
        init: `Zeros()` (default), `Constant(value)`, `Inline(values)` or `FromRank0()`.
        block_elements: elements a block, a multiple of 64; 0 (default) means 262144.
        allow_non_finite: accept gradients with infinities and NaNs; False (default) refuses them.
        gate_bytes: the bound of memory for waiting steps on each server; 0 (default) means the
            server's own.
        kernels: "fast" (default) or "exact": bit-equal with torch.optim.
        timeout_s: how long to wait for the cluster's servers; None (default) means the client's
            request_deadline_s.
    """

    dtype: str
    consistency: Consistency
    reduction: str
    init: Initial
    block_elements: int
    allow_non_finite: bool
    gate_bytes: int
    kernels: str
    timeout_s: float | None


def table_spec(
    name: str, layout: Layout, optimizer: SupportsSpec | OptimizerSpec, options: TableOptions
) -> TableSpec:
    """The validated spec of a table.

    Raises:
        InvalidConfig: naming the field, what came and what was expected.
    """
    unknown = set(options) - set(TableOptions.__annotations__)
    if unknown:
        raise InvalidConfig(
            f"create_table has no option {', '.join(sorted(unknown))}; it has "
            f"{', '.join(sorted(TableOptions.__annotations__))}"
        )
    dtype = _choice(DType, "dtype", options.get("dtype", "float32"))
    kernels = _choice(Kernels, "kernels", options.get("kernels", "fast"))
    tensors = tensors_of(name, layout)
    spec = optimizer if isinstance(optimizer, OptimizerSpec) else optimizer.spec(kernels)
    return TableSpec(
        name=name,
        dtype=dtype,
        element_count=sum(tensor.element_count for tensor in tensors),
        optimizer=spec,
        block_elements=options.get("block_elements", 0),
        tensors=tensors,
        mode=_mode(options.get("consistency", BSP())),
        initializer=_initializer(options.get("init", Zeros()), dtype),
        reduction=_choice(Reduction, "reduction", options.get("reduction", "mean")),
        allow_non_finite=options.get("allow_non_finite", False),
        gate_bytes=options.get("gate_bytes", 0),
    ).validated()


def tensors_of(name: str, layout: Layout) -> tuple[TensorSpec, ...]:
    """The tensors of a table: one named as the table for a count or a shape, else those listed.

    Raises:
        InvalidConfig: the layout is none of the three forms.
    """
    if isinstance(layout, int):
        return (TensorSpec(name, (_size(name, layout),), 0),)
    if all(isinstance(entry, int) for entry in layout):
        shape = tuple(_size(name, entry) for entry in layout)
        return (TensorSpec(name, shape, 0),)
    tensors = []
    offset = 0
    for entry in layout:
        tensor = TensorSpec(*_named_shape(name, entry), offset)
        tensors.append(tensor)
        offset += tensor.element_count
    return tuple(tensors)


def _named_shape(table: str, entry: object) -> tuple[str, tuple[int, ...]]:
    """One entry of a layout, whatever the script gave."""
    if isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[0], str):
        return entry[0], tuple(_size(entry[0], size) for size in entry[1])
    raise InvalidConfig(f"table '{table}': the layout has {entry!r}; expected (tensor name, shape)")


def _size(name: str, size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise InvalidConfig(f"'{name}': a dimension is {size!r}; expected a number of 0 or more")
    return size


def _mode(consistency: Consistency) -> Mode:
    if isinstance(consistency, BSP):
        return Mode.BSP
    if isinstance(consistency, ASP):
        return Mode.ASP
    raise InvalidConfig(f"consistency is {consistency!r}; expected BSP() or ASP()")


def _initializer(initial: Initial, dtype: DType) -> Initializer:
    if isinstance(initial, Zeros):
        return Initializer(InitializerKind.ZEROS)
    if isinstance(initial, Constant):
        return Initializer(InitializerKind.CONSTANT, constant=float(initial.value))
    if isinstance(initial, FromRank0):
        return Initializer(InitializerKind.FROM_RANK_ZERO)
    if isinstance(initial, Inline):
        raw = raw_of(initial.values, dtype, "the inline initializer")
        return Initializer(InitializerKind.INLINE, inline=raw.tobytes())
    raise InvalidConfig(
        f"init is {initial!r}; expected Zeros(), Constant(value), Inline(values) or FromRank0()"
    )


def _choice(kind: Any, field: str, given: object) -> Any:
    """The member of an enum by its value, or the member itself."""
    if isinstance(given, kind):
        return given
    names = [member.value for member in kind]
    if given not in names:
        raise InvalidConfig(f"{field} is {given!r}; expected one of {', '.join(map(repr, names))}")
    return kind(given)
