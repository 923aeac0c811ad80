"""The values of a push or a pull: arrays and tensors as the raw bytes of a table, cut into blocks.

Rules:
    - A value's dtype must be the table's: nothing is converted behind the caller's back.
    - Raw bytes are C-contiguous little-endian; numpy lacks bfloat16, so there torch carries it.
    - torch is imported only where a torch tensor is in play.
    - A region is a half-open interval of elements of a table.
    - A push gives whole segments (the part of a tensor that lies in one block): what it leaves out
      of a block is absent there, as a tensor without a gradient is.

Invariants:
    CUT-1  The blocks of a region are exactly those that hold one of its elements.
    CUT-2  Payloads of blocks that one piece covers are views of it; others are assembled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ps_core.errors import InvalidKeys, InvalidTensor
from ps_core.tables import NATIVE_CODEC, DType, Table, TensorSpec, pack_presence, unpack_presence

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
    """Bytes of one element."""
    return NATIVE_CODEC[dtype].element_bytes


def is_tensor(values: object) -> bool:
    """Whether `values` is a torch tensor; does not import torch to find out."""
    return any(
        kind.__name__ == "Tensor" and kind.__module__.partition(".")[0] == "torch"
        for kind in type(values).__mro__
    )


def shape_of(values: Values) -> tuple[int, ...]:
    """The shape of an array, a tensor, a sequence or a number."""
    found = getattr(values, "shape", None)
    return np.shape(values) if found is None else tuple(found)


def raw_of(values: Values, dtype: DType, what: str) -> Raw:
    """The bytes of `values`, as a view where they lie C-contiguous in host memory, else as a copy.

    Plain numbers and sequences of them, which have no dtype of their own, are converted.

    Raises:
        InvalidTensor: its dtype is not `dtype`; `what` names it in the message.
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
    """The bytes of the caller's own array, to be written into.

    Raises:
        InvalidTensor: another dtype, or memory that is not C-contiguous, on the host and writable.
    """
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


@dataclass(frozen=True, slots=True)
class Region:
    """Elements `begin` to `end` (exclusive) of a table, and the shape that a caller sees."""

    begin: int
    end: int
    shape: tuple[int, ...]

    @property
    def element_count(self) -> int:
        """Elements of the region."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Elements `begin` to `end` of a table and their bytes."""

    begin: int
    end: int
    raw: Raw


class BlockValues(NamedTuple):
    """What a push gives of one block: its payload, and which of its segments are present.

    Shapes:
        payload: C-contiguous bytes, the whole block's.
        presence: as `ps_core.tables.pack_presence` gives it; empty means all segments.
    """

    block: int
    payload: memoryview
    presence: bytes = b""


def tensor_named(table: Table, name: str) -> TensorSpec:
    """The tensor of that name.

    Raises:
        InvalidKeys: the table has none.
    """
    for tensor in table.spec.tensors:
        if tensor.name == name:
            return tensor
    known = ", ".join(f"'{tensor.name}'" for tensor in table.spec.tensors[:8])
    raise InvalidKeys(f"table '{table.spec.name}' has no tensor '{name}'; it has {known}")


def region_of(table: Table, part: slice | str | None) -> Region:
    """The elements that a caller means: all (None), one tensor (its name), or a slice of elements.

    Raises:
        InvalidKeys: outside the table, empty, or with a step.
    """
    spec = table.spec
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
    """The blocks that hold elements of the region (CUT-1)."""
    size = table.spec.block_elements
    if not region.element_count:
        return range(0)
    return range(region.begin // size, -(-region.end // size))


def pieces_of(
    table: Table, values: Values | Mapping[str, Values], part: slice | str | None
) -> list[Piece]:
    """A caller's values as pieces of the table: one, or one for each tensor that a mapping names.

    Raises:
        InvalidTensor: another dtype or shape than the region has.
        InvalidKeys: the region or a tensor is not in the table.
    """
    if not isinstance(values, np.ndarray) and isinstance(values, Mapping):
        if part is not None:
            raise InvalidKeys("a mapping of tensors says where it belongs; leave slice out")
        pieces = [_piece(table, given, name) for name, given in values.items()]
        pieces.sort(key=lambda piece: piece.begin)
    else:
        pieces = [_piece(table, values, part)]
    return [piece for piece in pieces if piece.raw.nbytes]


def _piece(table: Table, values: Values, part: slice | str | None) -> Piece:
    region = region_of(table, part)
    what = f"the value for table '{table.spec.name}'" + (f", {part!r}," if part is not None else "")
    check_shape(shape_of(values), region, what)
    return Piece(region.begin, region.end, raw_of(values, table.spec.dtype, what))


def check_shape(shape: tuple[int, ...], region: Region, what: str) -> None:
    """Refuse a shape that is neither the region's own nor flat.

    Raises:
        InvalidTensor: it is neither.
    """
    if shape not in (region.shape, (region.element_count,)):
        flat = "" if len(region.shape) == 1 else f" or ({region.element_count},)"
        raise InvalidTensor(f"{what} has shape {shape}; expected {region.shape}{flat}")


def cut(table: Table, pieces: Sequence[Piece]) -> Iterator[BlockValues]:
    """The blocks that the pieces (in order, apart from each other) give, whole or in part (CUT-2).

    Raises:
        InvalidKeys: a piece begins or ends inside a segment.
    """
    size, element_count = table.spec.block_elements, table.spec.element_count
    width = element_bytes(table.spec.dtype)
    block = first = 0
    while first < len(pieces):
        piece = pieces[first]
        block = max(block, piece.begin // size)
        begin = block * size
        end = min(begin + size, element_count)
        if piece.end <= begin:
            first += 1
        elif piece.begin <= begin and end <= piece.end:
            view = piece.raw.data
            start = (begin - piece.begin) * width
            yield BlockValues(block, view[start : start + (end - begin) * width])
            block += 1
        else:
            here = takewhile(lambda piece: piece.begin < end, islice(pieces, first, None))  # noqa: B023
            yield _assembled(table, block, here)
            block += 1


def _assembled(table: Table, block: int, pieces: Iterable[Piece]) -> BlockValues:
    """The part of a block of which the pieces give some tensors."""
    width = element_bytes(table.spec.dtype)
    start = block * table.spec.block_elements
    length = table.block_length(block)
    segments = table.segments(block)
    payload = np.zeros(length * width, dtype=np.uint8)
    present = [False] * len(segments)
    index = 0
    for piece in pieces:
        low, high = max(piece.begin - start, 0), min(piece.end - start, length)
        offset = (start + low - piece.begin) * width
        payload[low * width : high * width] = piece.raw[offset : offset + (high - low) * width]
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
    """Both parts of a block in one payload; where both are present, the newer counts."""
    width = element_bytes(table.spec.dtype)
    segments = table.segments(newer.block)
    before = unpack_presence(older.presence, len(segments))
    now = unpack_presence(newer.presence, len(segments))
    payload = np.array(older.payload)  # a copy: the older part may be on its way
    for segment, is_newer in zip(segments, now, strict=True):
        if is_newer:
            span = slice(segment.begin * width, segment.end * width)
            payload[span] = newer.payload[span]
    present = tuple(a or b for a, b in zip(before, now, strict=True))
    return BlockValues(newer.block, payload.data, pack_presence(present))
