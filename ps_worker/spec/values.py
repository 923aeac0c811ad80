"""The values of a push or a pull: arrays and tensors as the raw bytes of a table, cut into blocks.

Rules:
    - A value's dtype must be the table's, because a silent conversion would surprise the caller.
    - Raw bytes are C-contiguous little-endian; numpy lacks bfloat16, which needs torch.
    - A push gives whole segments (a segment is a tensor's elements in one block); segments that it
      leaves out are absent, like a tensor without a gradient.

Invariants:
    CUT-1  The blocks of a region are exactly those with one of its elements.
    CUT-2  Payloads of blocks that one run covers are views of it; others are assembled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ps_core.errors import InvalidConfig, InvalidKeys, InvalidTensor
from ps_core.tables.elements import NATIVE_CODEC, DType, pack_presence, unpack_presence
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TensorSpec

if TYPE_CHECKING:
    import torch

    Values: TypeAlias = npt.NDArray[Any] | torch.Tensor | Sequence[Any] | float
    Array: TypeAlias = npt.NDArray[Any] | torch.Tensor
else:
    Values = Any
    Array = Any

Raw: TypeAlias = npt.NDArray[np.uint8]
"""A flat view of bytes."""

_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.FLOAT32: np.dtype("<f4"),
    DType.FLOAT16: np.dtype("<f2"),
    DType.FLOAT64: np.dtype("<f8"),
}


def element_bytes(dtype: DType) -> int:
    return NATIVE_CODEC[dtype].element_bytes


def is_tensor(values: object) -> bool:
    """True for a torch tensor; does not import torch."""
    return any(
        kind.__name__ == "Tensor" and kind.__module__.partition(".")[0] == "torch"
        for kind in type(values).__mro__
    )


def shape_of(values: Values) -> tuple[int, ...]:
    found = getattr(values, "shape", None)
    return np.shape(values) if found is None else tuple(found)


def raw_of(values: Values, dtype: DType, what: str) -> Raw:
    """The bytes of `values`: a view if they are C-contiguous in host memory, else a copy.

    Plain numbers and sequences of them, which have no dtype of their own, are converted. `what`
    names the values in the InvalidTensor for another dtype.
    """
    if not isinstance(values, np.ndarray | np.generic):
        if is_tensor(values):
            return _raw_of_tensor(values, dtype, what)
        if dtype is DType.BFLOAT16:
            raise InvalidTensor(
                f"{what} is a {type(values).__name__}; expected a torch.bfloat16 tensor"
            )
        values = np.asarray(values, dtype=_NUMPY[dtype])
    expected = _NUMPY.get(dtype)
    if expected is None or values.dtype != expected:
        hint = " (a torch tensor: numpy has no bfloat16)" if expected is None else ""
        raise InvalidTensor(f"{what} has dtype {values.dtype}; expected {dtype.value}{hint}")
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _raw_of_tensor(values: Any, dtype: DType, what: str) -> Raw:
    import torch

    expected = getattr(torch, dtype.value)
    if values.dtype != expected:
        raise InvalidTensor(f"{what} has dtype {values.dtype}; expected {expected}")
    if values.layout is not torch.strided:
        raise InvalidTensor(f"{what} has layout {values.layout}; expected a dense tensor")
    flat = values.detach().to("cpu").contiguous().reshape(-1)
    raw: Raw = flat.view(torch.uint8).numpy()
    return raw


def writable_raw_of(out: Array, dtype: DType, what: str) -> Raw:
    """The writable bytes of the caller's own array, which is C-contiguous and on the host."""
    if not isinstance(out, np.ndarray):
        if not is_tensor(out):
            kind = type(out).__name__
            raise InvalidTensor(f"{what} is a {kind}; expected a numpy array or a tensor")
        if out.device.type != "cpu" or not out.is_contiguous():
            raise InvalidTensor(
                f"{what} is on {out.device}, contiguous: {out.is_contiguous()}; expected a "
                "contiguous tensor on the CPU"
            )
        return _raw_of_tensor(out, dtype, what)
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise InvalidTensor(f"{what} is not C-contiguous and writable")
    return raw_of(out, dtype, what)


def empty(shape: tuple[int, ...], dtype: DType) -> Array:
    """An uninitialised numpy array; a torch tensor for bfloat16."""
    if dtype is DType.BFLOAT16:
        import torch

        return torch.empty(shape, dtype=torch.bfloat16)
    return np.empty(shape, dtype=_NUMPY[dtype])


class Region(NamedTuple):
    """Elements `begin` to `end` (exclusive) of a table, and their shape for the caller."""

    begin: int
    end: int
    shape: tuple[int, ...]

    @property
    def element_count(self) -> int:
        return self.end - self.begin


@dataclass(slots=True, eq=False)
class ElementRun:
    """Elements `begin` to `end` of a table and their bytes."""

    begin: int
    end: int
    raw: Raw


class BlockValues(NamedTuple):
    """A push's values of one block, and the presence of its segments."""

    block: int
    payload: memoryview
    """C-contiguous bytes, the whole block's."""
    presence: bytes = b""
    """Packed by `ps_core.tables.elements.pack_presence`; empty means all segments."""


def tensor_named(table: Table, name: str) -> TensorSpec:
    """The tensor of that name; InvalidKeys if the table has none."""
    for tensor in table.spec.tensors:
        if tensor.name == name:
            return tensor
    known = ", ".join(f"'{tensor.name}'" for tensor in table.spec.tensors[:8])
    raise InvalidKeys(f"table '{table.spec.name}' has no tensor '{name}'; it has {known}")


def region_of(table: Table, part: slice | str | None) -> Region:
    """A caller's region: all elements (None), one tensor (its name), or a slice of elements.
    InvalidConfig for a table of rows, which has no such.
    """
    spec = table.spec
    if spec.rows is not None:
        raise InvalidConfig(
            f"table '{spec.name}' is one of rows; expected `push_rows` and `pull_rows`, with ids"
        )
    if part is None:
        shape = spec.tensors[0].shape if len(spec.tensors) == 1 else (spec.element_count,)
        return Region(0, spec.element_count, shape)
    if isinstance(part, str):
        tensor = tensor_named(table, part)
        return Region(tensor.offset, tensor.offset + tensor.element_count, tensor.shape)
    if not isinstance(part, slice):
        raise InvalidKeys(f"slice is {part!r}; expected slice(begin, end) or a tensor's name")
    if part.step not in (None, 1):
        raise InvalidKeys(f"slice has step {part.step}; expected none")
    begin = 0 if part.start is None else int(part.start)
    end = spec.element_count if part.stop is None else int(part.stop)
    if not 0 <= begin < end <= spec.element_count:
        raise InvalidKeys(
            f"slice is [{begin}, {end}); table '{spec.name}' has elements [0, {spec.element_count})"
        )
    return Region(begin, end, (end - begin,))


def blocks_of(table: Table, region: Region) -> range:
    """The blocks with elements of the region (CUT-1)."""
    size = table.spec.block_elements
    if not region.element_count:
        return range(0)
    return range(region.begin // size, -(-region.end // size))


def runs_of(
    table: Table, values: Values | Mapping[str, Values], part: slice | str | None
) -> list[ElementRun]:
    """A caller's values as runs of elements: one, or one for each tensor of a mapping."""
    if not isinstance(values, np.ndarray) and isinstance(values, Mapping):
        if part is not None:
            raise InvalidKeys("a mapping of tensors names its elements; leave slice out")
        runs = [_run_of(table, given, name) for name, given in values.items()]
        runs.sort(key=lambda run: run.begin)
    else:
        runs = [_run_of(table, values, part)]
    return [run for run in runs if run.raw.nbytes]


def _run_of(table: Table, values: Values, part: slice | str | None) -> ElementRun:
    region = region_of(table, part)
    what = f"the value for table '{table.spec.name}'" + (f", {part!r}," if part is not None else "")
    check_shape(shape_of(values), region, what)
    return ElementRun(region.begin, region.end, raw_of(values, table.spec.dtype, what))


def check_shape(shape: tuple[int, ...], region: Region, what: str) -> None:
    """Raises InvalidTensor for a shape that is neither the region's nor flat."""
    if shape not in (region.shape, (region.element_count,)):
        flat = "" if len(region.shape) == 1 else f" or ({region.element_count},)"
        raise InvalidTensor(f"{what} has shape {shape}; expected {region.shape}{flat}")


def cut(table: Table, runs: Sequence[ElementRun]) -> Iterator[BlockValues]:
    """The blocks of runs that are in order and do not overlap (CUT-2)."""
    size, element_count = table.spec.block_elements, table.spec.element_count
    width = element_bytes(table.spec.dtype)
    block = first = 0
    while first < len(runs):
        run = runs[first]
        block = max(block, run.begin // size)
        begin = block * size
        end = min(begin + size, element_count)
        if run.end <= begin:
            first += 1
        elif run.begin <= begin and end <= run.end:
            view = run.raw.data
            start = (begin - run.begin) * width
            yield BlockValues(block, view[start : start + (end - begin) * width])
            block += 1
        else:
            here = takewhile(lambda run: run.begin < end, islice(runs, first, None))  # noqa: B023
            yield _assembled(table, block, here)
            block += 1


def _assembled(table: Table, block: int, runs: Iterable[ElementRun]) -> BlockValues:
    """The values of a block that runs cover in part."""
    width = element_bytes(table.spec.dtype)
    start = block * table.spec.block_elements
    length = table.block_length(block)
    segments = table.segments(block)
    payload = np.zeros(length * width, dtype=np.uint8)
    present = [False] * len(segments)
    index = 0
    for run in runs:
        low, high = max(run.begin - start, 0), min(run.end - start, length)
        offset = (start + low - run.begin) * width
        payload[low * width : high * width] = run.raw[offset : offset + (high - low) * width]
        while index < len(segments) and segments[index].end <= low:
            index += 1
        while index < len(segments) and segments[index].begin < high:
            segment = segments[index]
            if segment.begin < low or high < segment.end:
                name = table.spec.tensors[segment.tensor].name
                raise InvalidKeys(
                    f"the push cuts tensor '{name}' inside block {block} of table "
                    f"'{table.spec.name}' at elements [{start + low}, {start + high}); expected "
                    f"the edges of blocks ({table.spec.block_elements} elements) or of tensors"
                )
            present[index] = True
            index += 1
    return BlockValues(block, payload.data, pack_presence(tuple(present)))


def merged(table: Table, older: BlockValues, newer: BlockValues) -> BlockValues:
    """Both values of a block in one payload; the newer counts for segments that both have."""
    width = element_bytes(table.spec.dtype)
    segments = table.segments(newer.block)
    before = unpack_presence(older.presence, len(segments))
    now = unpack_presence(newer.presence, len(segments))
    payload = np.array(older.payload)  # a copy: the older payload may be in flight
    for segment, is_newer in zip(segments, now, strict=True):
        if is_newer:
            span = slice(segment.begin * width, segment.end * width)
            payload[span] = newer.payload[span]
    present = tuple(a or b for a, b in zip(before, now, strict=True))
    return BlockValues(newer.block, payload.data, pack_presence(present))
