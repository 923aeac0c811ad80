"""Contributions: a worker's gradient for one block, from payload to reduced sum, with few copies.

Rules:
    - A payload of the table's own float32 or float64 is read where it lies. A 16-bit payload is
      converted once, into a pooled buffer, which then serves as accumulator.
    - Elements of absent tensors are never looked at: they may hold anything.
    - A sum is taken in the order of the calls, over the workers that have the tensor. Absent is
      zero: what one worker of three has is summed over one and divided by three.
    - A tensor that is absent everywhere is absent from the sum.

Invariants:
    CON-1  Memory that is not `is_owned` is never written to.
    CON-2  An owned buffer has the padded length, with zeros behind the block's end.
    CON-3  A sum is of one block.

What it deliberately does not do: know tables (`ps_server.shard_store` does).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ps_core.errors import check
from ps_core.tables import Codec
from ps_server.buffer_pool import BufferPool
from ps_server.optimizers import Mask, padded_length

_ARRAY_TYPE = {Codec.FP32: "<f4", Codec.FP16: "<f2", Codec.BF16: "<i2", Codec.FP64: "<f8"}


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """A gradient, or a sum of gradients, for one block.

    Shapes:
        values: flat; the block's length, or padded to a multiple of 64 if `is_owned`.
        present: a mask over the block's segments; None means all.
        bounds: as in `BlockState`.
    """

    block: int
    values: Tensor
    present: Mask | None
    bounds: npt.NDArray[np.int64]
    is_owned: bool

    @property
    def length(self) -> int:
        """Elements of the block."""
        return int(self.bounds[-1])

    @property
    def byte_count(self) -> int:
        """Bytes that it holds on to."""
        return self.values.nbytes


class _Lent:
    """Read-only memory that numpy takes for writable.

    Torch has no read-only tensor and warns about each view of read-only memory; CON-1 keeps the
    promise instead.
    """

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.owner = array
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def view(payload: bytes | memoryview, codec: Codec) -> Tensor:
    """The payload as a flat tensor of the codec's dtype, without a copy where it is aligned.

    Shapes:
        result: shares the payload's memory and keeps it alive; must not be written to.
    """
    array = np.frombuffer(payload, dtype=_ARRAY_TYPE[codec])
    if not array.flags.aligned:
        array = array.copy()
    elif not array.flags.writeable:
        array = np.asarray(_Lent(array))
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if codec is Codec.BF16 else tensor


def take_padded(pool: BufferPool, length: int, dtype: torch.dtype) -> Tensor:
    """A pooled buffer for `length` elements, padded to a multiple of 64, zeros behind the end."""
    buffer = pool.take(padded_length(length), dtype)
    if buffer.numel() != length:
        buffer[length:] = 0
    return buffer


def present_runs(bounds: npt.NDArray[np.int64], present: Mask | None) -> Iterator[tuple[int, int]]:
    """The maximal runs [begin, end) of elements of present segments."""
    if present is None:
        yield 0, int(bounds[-1])
        return
    edges = np.flatnonzero(np.diff(present, prepend=False, append=False)).tolist()
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        yield int(bounds[first]), int(bounds[last])


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite.

    A sum is finite only if all its terms are, and costs a thirtieth of a test of each element; a
    sum that overflowed is looked at again.
    """
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def scaled(part: Contribution, scale: float, pool: BufferPool) -> Contribution:
    """`part` times `scale`, in its own memory if it owns that."""
    if scale == 1.0:
        return part
    source = part.values[: part.length]
    target = part.values if part.is_owned else take_padded(pool, part.length, source.dtype)
    torch.mul(source, scale, out=target[: part.length])
    return _with(part, target, part.present)


def added(total: Contribution, part: Contribution, pool: BufferPool) -> Contribution:
    """`total` plus `part`; the memory of both goes into the result or back to the pool."""
    check(total.block == part.block, "CON-3", f"block {part.block} added to {total.block}")
    if total.present is not None or part.present is not None:
        return _added_by_runs(total, part, pool)
    length = total.length
    if total.is_owned:
        total.values[:length].add_(part.values[:length])
        release(part, pool)
        return total
    buffer = part.values if part.is_owned else take_padded(pool, length, total.values.dtype)
    torch.add(total.values[:length], part.values[:length], out=buffer[:length])
    return _with(total, buffer, None)


def _added_by_runs(total: Contribution, part: Contribution, pool: BufferPool) -> Contribution:
    have = _mask(total)
    comes = _mask(part)
    target = total.values
    if not total.is_owned:
        target = take_padded(pool, total.length, target.dtype)
        for begin, end in present_runs(total.bounds, total.present):
            target[begin:end].copy_(total.values[begin:end])
    for begin, end in present_runs(total.bounds, have & comes):
        target[begin:end].add_(part.values[begin:end])
    for begin, end in present_runs(total.bounds, comes & ~have):
        target[begin:end].copy_(part.values[begin:end])
    release(part, pool)
    present = have | comes
    return _with(total, target, None if present.all() else present)


def averaged(total: Contribution, contributor_count: int, pool: BufferPool) -> Contribution:
    """`total` times 1 / `contributor_count`: the one multiply of a mean; `total` itself for one."""
    return scaled(total, 1.0 / contributor_count, pool) if contributor_count > 1 else total


def padded(part: Contribution, pool: BufferPool) -> Contribution:
    """`part` with at least the padded length: itself, but for a view of an odd last block."""
    if part.values.numel() == padded_length(part.length):
        return part
    buffer = take_padded(pool, part.length, part.values.dtype)
    buffer[: part.length].copy_(part.values)
    return _with(part, buffer, part.present)


def release(part: Contribution, pool: BufferPool) -> None:
    """Gives the memory of `part` back, if it owns any."""
    if part.is_owned:
        pool.give_back(part.values)


def _mask(part: Contribution) -> Mask:
    return np.ones(len(part.bounds) - 1, dtype=np.bool_) if part.present is None else part.present


def _with(part: Contribution, owned: Tensor, present: Mask | None) -> Contribution:
    return Contribution(part.block, owned, present, part.bounds, is_owned=True)
