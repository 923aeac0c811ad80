"""A script's settings of a table: consistency, initial values, options.

Rules:
    - Each setting is a small frozen value; `table_spec` turns them into a validated `TableSpec`.
    - A layout is a sequence of (name, shape): tensors follow each other in that order, without gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, TypedDict

from ps_core import limits
from ps_core.consistency import Consistency, Mode, StalePolicy, moving, parsed
from ps_core.errors import InvalidConfig
from ps_core.tables.elements import DType, Initializer, InitializerKind
from ps_core.tables.optimizers import Kernels, OptimizerSpec
from ps_core.tables.table_spec import (
    Eviction,
    Reduction,
    RowsSpec,
    RowStorage,
    TableSpec,
    TensorSpec,
)
from ps_worker.spec.optimizers import check_optimizer
from ps_worker.spec.values import Values, raw_of


def BSP(*, backup_workers: int = 0, grace_s: float = 0.0) -> Consistency:  # noqa: N802
    """Bulk-synchronous: every update has a step of every worker; all pull the same version.

    Args:
        backup_workers: the number of workers whose steps may be missing from an update; 0 waits
            for all. A step that comes too late is discarded, and its worker goes on from the
            newest clock.
        grace_s: seconds that an update waits for the others once enough steps are there.

    Raises:
        InvalidConfig: a number is out of its bounds.
    """
    most_s = limits.MAX_GRACE_MS / 1000
    if not 0.0 <= grace_s <= most_s:
        raise InvalidConfig(f"grace_s is {grace_s}; expected 0 to {most_s:g} seconds")
    grace_ms = round(grace_s * 1000)
    return Consistency(backup_workers=backup_workers, grace_ms=grace_ms).validated()


def SSP(staleness: int, *, most: int | None = None) -> Consistency:  # noqa: N802
    """Stale-synchronous: every step is applied when it arrives; a pull waits until no worker is
    more than `staleness` clocks behind.

    Args:
        staleness: the bound.
        most: the bound adapts between `staleness`, where it begins, and this, to the workers' waits
            and losses (CONSISTENCY.md has the rule); None means that it is fixed.

    Raises:
        InvalidConfig: a bound is negative or too large, or `most` is not above `staleness`.
    """
    if most is not None:
        return moving(staleness, most)
    return Consistency(Mode.SSP, staleness=staleness).validated()


def ASP(  # noqa: N802
    *,
    reject: int | None = None,
    damp: float | None = None,
    divide: bool = False,
    compensate: float | None = None,
    adaptive: bool = False,
) -> Consistency:
    """Asynchronous: every step is applied when it arrives; no worker waits. At most one of:

    Args:
        reject: refuse blocks that are staler than this many updates; see `StepResult.rejected`.
        damp: multiply a gradient that is tau updates stale by 1 / (1 + damp * tau).
        divide: multiply it by 1 / max(1, tau).
        compensate: apply a gradient g that was computed at w' to w as
            g + compensate * g * g * (w - w') (DC-ASGD); servers keep each worker's pulled values.
        adaptive: with `compensate`: divide it by the root of the running mean of g * g.

    Raises:
        InvalidConfig: two of them, or a number out of its bounds.
    """
    choices = {"reject": reject, "damp": damp, "compensate": compensate}
    given = [name for name, value in choices.items() if value is not None] + ["divide"] * divide
    if len(given) > 1:
        raise InvalidConfig(f"ASP has {' and '.join(given)}; expected at most one of them")
    return Consistency(
        Mode.ASP,
        policy=StalePolicy(given[0]) if given else StalePolicy.ACCEPT,
        bound=reject or 0,
        alpha=damp or 0.0,
        strength=compensate or 0.0,
        adaptive=adaptive,
    ).validated()


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
    """The worker of rank 0 gives the values with `client.assign`; pulls wait until then."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """Each element of a row is drawn from [-scale, scale)."""

    scale: float


@dataclass(frozen=True, slots=True)
class Normal:
    """Each element of a row is drawn from a normal distribution of mean 0, cut off at 3.5 standard
    deviations.
    """

    scale: float = 1.0


Initial = Zeros | Constant | Inline | FromRank0
RowsInitial = Zeros | Constant | Uniform | Normal
Layout = int | Sequence[int] | Sequence[tuple[str, Sequence[int]]]


class SupportsSpec(Protocol):
    """An optimizer of `ps_worker.spec.optimizers`, or anything with the same `spec`."""

    def spec(self, kernels: Kernels = ...) -> OptimizerSpec: ...


class TableOptions(TypedDict, total=False):
    """The keyword arguments of `Client.create_table`, which describes them."""

    dtype: str
    consistency: Consistency | str
    reduction: str
    init: Initial
    block_elements: int
    allow_non_finite: bool
    gate_bytes: int
    kernels: str
    push_codec: str | None
    pull_codec: str | None
    timeout_s: float | None


class RowsOptions(TypedDict, total=False):
    """The keyword arguments of `Client.create_embedding`, which describes them."""

    dtype: str
    consistency: Consistency | str
    reduction: str
    init: RowsInitial
    partitions: int
    seed: int
    max_rows: int
    eviction: str
    evict_after: int
    admit_after: int
    storage: str
    allow_non_finite: bool
    gate_bytes: int
    timeout_s: float | None


class EmbeddingOptions(RowsOptions, total=False):
    """The keyword arguments of `Embedding`, which describes those that are not of the table."""

    cache_rows: int
    cache_steps: int


TABLE_DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "reduction": "mean",
    "init": Zeros(),
    "block_elements": 0,
    "allow_non_finite": False,
    "gate_bytes": 0,
    "kernels": "fast",
    "timeout_s": None,
}
"""The defaults of `TableOptions`; that of the consistency is the client's."""

ROWS_DEFAULTS: dict[str, Any] = {
    **{
        name: TABLE_DEFAULTS[name] for name in TABLE_DEFAULTS if name in RowsOptions.__annotations__
    },
    "partitions": 0,
    "seed": 0,
    "max_rows": 0,
    "eviction": "lru",
    "evict_after": 0,
    "admit_after": 1,
    "storage": "full",
}
"""As `TABLE_DEFAULTS`, of `RowsOptions`."""


def table_spec(
    name: str,
    layout: Layout,
    optimizer: SupportsSpec | OptimizerSpec,
    options: TableOptions | RowsOptions,
    *,
    has_rows: bool = False,
) -> TableSpec:
    """The validated spec of a table; if it `has_rows`, the layout is that of one row."""
    function, known = "create_table", TableOptions.__annotations__
    if has_rows:
        function, known = "create_embedding", RowsOptions.__annotations__
    check_options(function, options, known)
    check_kinds(options)
    given = {**TABLE_DEFAULTS, **ROWS_DEFAULTS, "consistency": Consistency(), **options}
    dtype = _choice(DType, "dtype", given["dtype"])
    kernels = _choice(Kernels, "kernels", given["kernels"])
    tensors = tensors_of(name, layout)
    if isinstance(optimizer, OptimizerSpec):
        spec = optimizer
    else:
        if isinstance(optimizer, type) or not hasattr(optimizer, "spec"):
            check_optimizer(optimizer)
        spec = optimizer.spec(kernels)
    return TableSpec(
        name=name,
        dtype=dtype,
        element_count=sum(tensor.element_count for tensor in tensors),
        optimizer=spec,
        block_elements=given["block_elements"],
        tensors=tensors,
        consistency=consistency_of(given["consistency"]),
        initializer=_initializer(given["init"], dtype),
        reduction=_choice(Reduction, "reduction", given["reduction"]),
        allow_non_finite=given["allow_non_finite"],
        gate_bytes=given["gate_bytes"],
        rows=_rows_spec(given) if has_rows else None,
    ).validated()


def _rows_spec(given: Mapping[str, Any]) -> RowsSpec:
    for name in ("partitions", "seed", "max_rows", "evict_after", "admit_after"):
        if not isinstance(given[name], int):
            raise InvalidConfig(f"{name} is {given[name]!r}; expected a whole number, an int")
    return RowsSpec(
        given["partitions"],
        given["seed"],
        given["max_rows"],
        _choice(Eviction, "eviction", given["eviction"]),
        given["evict_after"],
        given["admit_after"],
        _choice(RowStorage, "storage", given["storage"]),
    )


def tensors_of(name: str, layout: Layout) -> tuple[TensorSpec, ...]:
    """The tensors of a table: one named as the table for a count or a shape, else those listed."""
    if not isinstance(layout, Integral | Iterable):
        raise InvalidConfig(
            f"table '{name}': the layout is {layout!r}; expected a number of elements, a shape, or "
            "(tensor name, shape) of each tensor"
        )
    entries: Sequence[Any] = [layout] if isinstance(layout, Integral) else list(layout)
    if all(isinstance(entry, Integral) for entry in entries):
        entries = [(name, entries)]
    tensors = []
    offset = 0
    for entry in entries:
        if not (isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[0], str)):
            raise InvalidConfig(
                f"table '{name}': the layout has {entry!r}; expected (tensor name, shape)"
            )
        shape = tuple(_size(entry[0], size) for size in entry[1])
        tensor = TensorSpec(entry[0], shape, offset)
        tensors.append(tensor)
        offset += tensor.element_count
    return tuple(tensors)


def _size(name: str, size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, Integral) or int(size) < 0:
        raise InvalidConfig(
            f"'{name}': a dimension is {size!r}; expected a whole number of 0 or more"
        )
    return int(size)


def consistency_of(given: Consistency | str) -> Consistency:
    """The setting of a `Consistency`, or of its short form ("ssp:4")."""
    if isinstance(given, str):
        return parsed(given)
    if isinstance(given, Consistency):
        return given.validated()
    raise InvalidConfig(f"consistency is {given!r}; expected BSP(), SSP(staleness) or ASP()")


def _initializer(initial: Initial | RowsInitial, dtype: DType) -> Initializer:
    match initial:
        case Zeros():
            return Initializer(InitializerKind.ZEROS)
        case Constant(value):
            return Initializer(InitializerKind.CONSTANT, constant=float(value))
        case Uniform(scale):
            return Initializer(InitializerKind.UNIFORM, scale=float(scale))
        case Normal(scale):
            return Initializer(InitializerKind.NORMAL, scale=float(scale))
        case FromRank0():
            return Initializer(InitializerKind.FROM_RANK_ZERO)
        case Inline(values):
            raw = raw_of(values, dtype, "the inline initializer")
            return Initializer(InitializerKind.INLINE, inline=raw.tobytes())
    raise InvalidConfig(
        f"init is {initial!r}; expected Zeros(), Constant(value), Inline(values) or FromRank0(); "
        "of rows: Zeros(), Constant(value), Uniform(scale) or Normal(scale)"
    )


def check_options(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises InvalidConfig, which names the options `known`, for another that is given."""
    options = sorted(known)
    unknown = sorted(set(given) - set(options))
    if unknown:
        raise InvalidConfig(
            f"{function} has no option {', '.join(unknown)}; it has {', '.join(options)}"
        )


def _is_count(given: object) -> bool:
    return isinstance(given, Integral) and int(given) >= 0


def _is_text(given: object) -> bool:
    return isinstance(given, str)


_WHOLE = (lambda given: isinstance(given, Integral)), "a whole number"
_COUNT = _is_count, "a whole number of 0 or more"
_FLAG = (lambda given: given in (True, False)), "True or False"
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("accumulate", "recompute", "block_elements"), _WHOLE),
    **dict.fromkeys(("gate_bytes", "after_clock"), _COUNT),
    **dict.fromkeys(("allow_non_finite", "overlap_pull"), _FLAG),
    "clip_norm": ((lambda given: given is None or hasattr(given, "__float__")), "a number or None"),
    "name": (_is_text, "text"),
    "aggregate_within": ((lambda given: given is None or _is_text(given)), "text or None"),
}
"""The kind of what an option takes, with words for it; other options are checked by themselves."""


def check_kinds(options: Mapping[str, Any]) -> None:
    """Raises InvalidConfig, which names the option, for a value of another kind than it takes."""
    for field, given in options.items():
        fits, words = _KINDS.get(field, (None, ""))
        if fits is not None and not fits(given):
            raise InvalidConfig(f"{field} is {given!r}; expected {words}")


def _choice(kind: Any, field: str, given: object) -> Any:
    """The member of an enum by its value, or the member itself."""
    if isinstance(given, kind):
        return given
    require_one_of(field, given, [member.value for member in kind])
    return kind(given)


def require_one_of(field: str, given: object, allowed: Iterable[object]) -> None:
    """Raises InvalidConfig, which names the setting `field`, unless `given` is `allowed`."""
    values = list(allowed)
    if given not in values:
        raise InvalidConfig(f"{field} is {given!r}; expected one of {', '.join(map(repr, values))}")
