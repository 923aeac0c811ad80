"""Contributions: a worker's gradient for one block, from payload to reduced sum, with few copies.

Rules:
    - A payload of the table's own float32 or float64 is read where it lies. One of fewer bits is
      converted once, into a pooled buffer, which then serves as accumulator.
    - Elements of absent tensors may hold anything.
    - A sum is taken in the order of the calls, over the workers that have the tensor. Absent is
      zero: a tensor of one worker of three is summed over one and divided by three.

Invariants:
    CON-1  Memory that is not `is_owned` is never written to.
    CON-2  An owned buffer has the padded length, with zeros behind the block's end.
    CON-3  A sum is of one block.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ps_core.codecs import payloads
from ps_core.errors import InvalidKeys, InvariantViolation
from ps_core.tables.elements import Codec, presence_bytes
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.mutations import Elements
from ps_server.values.optimizers import Mask, padded_length

TORCH_DTYPE = {
    Codec.FP32: torch.float32,
    Codec.FP16: torch.float16,
    Codec.BF16: torch.bfloat16,
    Codec.FP64: torch.float64,
}
"""The dtype of a codec's elements, where a payload is an array of them."""

with warnings.catch_warnings():
    # Torch has no read-only tensor, and warns about the first view of read-only memory; CON-1 keeps
    # the promise instead.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


@dataclass(slots=True, eq=False)
class Contribution:
    """A gradient, or a sum of gradients, for one block. It is not changed, though not frozen: one
    is made for every block that comes, and frozen it would cost 0.6 us more.

    Shapes:
        length: elements of the block.
        values: flat; the block's length, or padded to a multiple of 64 if `is_owned`.
        present: a mask over the block's segments; None means all.
        bounds: as in `BlockState`.
    """

    block: int
    length: int
    values: Tensor
    present: Mask | None
    bounds: npt.NDArray[np.int64]
    is_owned: bool

    @property
    def byte_count(self) -> int:
        return self.values.nbytes


def view(payload: bytes | memoryview, codec: Codec) -> Tensor:
    """The payload as a flat tensor of the codec's dtype, which must not be written to: where it is
    aligned it shares the payload's memory, and keeps it alive.
    """
    dtype = TORCH_DTYPE[codec]
    values = torch.frombuffer(payload, dtype=dtype)
    if values.data_ptr() % dtype.itemsize:
        values = torch.frombuffer(bytearray(payload), dtype=dtype)
    return values


def decode(payload: bytes | memoryview, codec: Codec, target: Tensor) -> bool:
    """Write a payload's elements to `target`, of as many elements and any dtype. True: all are
    finite, which most payloads say without a look at each element. False: that is not known.

    Raises:
        InvalidTensor: as `payloads.decode`.
    """
    if codec.is_raw:
        target.copy_(view(payload, codec))
        return False
    raw = _aligned(np.frombuffer(payload, np.uint8))
    if target.dtype is torch.float32:
        payloads.decode(codec, raw, target.numpy())
    else:
        elements = np.empty(target.numel(), np.float32)
        payloads.decode(codec, raw, elements)
        target.copy_(torch.from_numpy(elements))
    return payloads.is_finite(codec, raw, target.numel())


def _aligned(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return raw if raw.ctypes.data % 4 == 0 else raw.copy()


def take_padded(pool: BufferPool, length: int, dtype: torch.dtype) -> Tensor:
    """A pooled buffer for `length` elements, padded to a multiple of 64, zeros behind the end."""
    buffer = pool.take(padded_length(length), dtype)
    if buffer.numel() != length:
        buffer[length:] = 0
    return buffer


def element_mask(bounds: npt.NDArray[np.int64], present: Mask) -> npt.NDArray[np.bool_]:
    """The mask over the block's elements."""
    return np.repeat(present, np.diff(bounds))


def presence_mask(table: str, block: int, segment_count: int, presence: bytes) -> Mask | None:
    """The mask of segments that a bitmap has; None for all, as of an empty one. Raises InvalidKeys
    if it has the wrong length.
    """
    if not presence:
        return None
    expected = presence_bytes(segment_count)
    if len(presence) != expected:
        raise InvalidKeys(
            f"block {block} of table '{table}': presence has {len(presence)} bytes; "
            f"expected {expected} ({segment_count} tensors) or none"
        )
    bits = np.unpackbits(np.frombuffer(presence, np.uint8), bitorder="little")
    mask = bits[:segment_count].astype(np.bool_)
    return None if mask.all() else mask


def packed_presence(present: Mask) -> bytes:
    return np.packbits(present, bitorder="little").tobytes()


def elements(part: Contribution) -> Elements:
    """A view of the contribution, without padding, for another server."""
    presence = b"" if part.present is None else packed_presence(part.present)
    return Elements(part.block, presence, _array(part.values, part.length).data.cast("B"))


def copy_present(part: Contribution, target: Tensor) -> None:
    """Copy the elements of the present segments to `target`, of the block's length or padded."""
    if part.present is None:
        head(target, part.length).copy_(head(part.values, part.length))
        return
    mask = element_mask(part.bounds, part.present)
    np.copyto(_array(target, part.length), _array(part.values, part.length), where=mask)


def add_present(part: Contribution, target: Tensor) -> None:
    """Add the elements of the present segments to `target`, of the block's length or padded."""
    if part.present is None:
        head(target, part.length).add_(head(part.values, part.length))
        return
    sums, terms = _array(target, part.length), _array(part.values, part.length)
    with np.errstate(over="ignore", invalid="ignore"):  # as torch: infinity is a value too
        np.add(sums, terms, out=sums, where=element_mask(part.bounds, part.present))


def is_finite(values: Tensor) -> bool:
    # A sum is finite only if all its terms are, and costs a thirtieth of a test of each element; a
    # sum that overflowed is looked at again.
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def first_non_finite(part: Contribution) -> int | None:
    """The first present segment with a value that is not finite."""
    if is_finite(part.values):  # what is behind the end or absent is most often zeros
        return None
    broken = ~np.isfinite(_array(part.values, part.length))
    if part.present is not None:
        broken &= element_mask(part.bounds, part.present)
    at = np.searchsorted(part.bounds, broken.argmax(), side="right")
    return int(at) - 1 if broken.any() else None


def scaled(part: Contribution, scale: float, pool: BufferPool) -> Contribution:
    """`part` times `scale`, in its own memory if it owns that."""
    if scale == 1.0:
        return part
    if part.is_owned:
        part.values.mul_(scale)
        return part
    target = take_padded(pool, part.length, part.values.dtype)
    torch.mul(part.values, scale, out=head(target, part.length))
    return _with(part, target, part.present)


def owned(part: Contribution, pool: BufferPool) -> Contribution:
    """`part` in memory that may be written to: its own, or a copy."""
    if part.is_owned:
        return part
    target = take_padded(pool, part.length, part.values.dtype)
    head(target, part.length).copy_(part.values)
    return _with(part, target, part.present)


def added(total: Contribution, part: Contribution, pool: BufferPool) -> Contribution:
    """`total` plus `part`; the memory of both goes into the result or back to the pool."""
    if total.block != part.block:
        raise InvariantViolation("CON-3", f"block {part.block} added to {total.block}")
    if total.present is not None or part.present is not None:
        return _added_where_present(total, part, pool)
    length = total.length
    if total.is_owned:
        head(total.values, length).add_(head(part.values, length))
        release(part, pool)
        return total
    buffer = part.values if part.is_owned else take_padded(pool, length, total.values.dtype)
    torch.add(total.values, head(part.values, length), out=head(buffer, length))
    return _with(total, buffer, None)


def _added_where_present(total: Contribution, part: Contribution, pool: BufferPool) -> Contribution:
    have, comes = _mask(total), _mask(part)
    total = owned(total, pool)
    sums, terms = _array(total.values, total.length), _array(part.values, total.length)
    with np.errstate(over="ignore", invalid="ignore"):  # as torch: infinity is a value too
        np.add(sums, terms, out=sums, where=element_mask(total.bounds, have & comes))
    np.copyto(sums, terms, where=element_mask(total.bounds, comes & ~have))
    release(part, pool)
    present = have | comes
    return _with(total, total.values, None if present.all() else present)


def averaged(total: Contribution, contributor_count: int, pool: BufferPool) -> Contribution:
    """`total` times 1 / `contributor_count`: the one multiply of a mean; `total` itself for one."""
    return scaled(total, 1.0 / contributor_count, pool) if contributor_count > 1 else total


def square_sum(part: Contribution, pool: BufferPool) -> float:
    """The sum of the squares of the present values, in float64, where those of float32 are exact.
    numpy adds in one order whatever the processor does beside; torch's is that of its threads.
    """
    scratch = pool.take(part.values.numel(), torch.float64)
    squares = _array(scratch, part.length)
    with np.errstate(over="ignore", invalid="ignore"):
        np.square(_array(part.values, part.length), out=squares, dtype=np.float64)
        if part.present is not None:
            squares[~element_mask(part.bounds, part.present)] = 0.0
        found = float(squares.sum())
    pool.give_back(scratch)
    return found


def padded(part: Contribution, pool: BufferPool) -> Contribution:
    """`part` with at least the padded length: itself, but for a view of an odd last block."""
    return part if part.length == padded_length(part.length) else owned(part, pool)


def release(part: Contribution, pool: BufferPool) -> None:
    """Give the memory of `part` back, if it owns any."""
    if part.is_owned:
        pool.give_back(part.values)


def head(values: Tensor, length: int) -> Tensor:
    """The first `length` elements: `values` itself if it has no more (a slice costs 1 us)."""
    return values if values.numel() == length else values[:length]


def _array(values: Tensor, length: int) -> npt.NDArray[Any]:
    return values.numpy()[:length]


def _mask(part: Contribution) -> Mask:
    return np.ones(len(part.bounds) - 1, dtype=np.bool_) if part.present is None else part.present


def _with(part: Contribution, owned: Tensor, present: Mask | None) -> Contribution:
    return Contribution(part.block, part.length, owned, present, part.bounds, is_owned=True)
