"""The rules of a shard in numpy, tables and steps to try them on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from docs import payload_codec as raw
from ps_core.errors import InvalidConfig
from ps_core.keys import TableId
from ps_core.tables.elements import (
    NATIVE_CODEC,
    Codec,
    DType,
    Initializer,
    InitializerKind,
    pack_presence,
)
from ps_core.tables.optimizers import Kernels, OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Reduction, TableSpec, TensorSpec
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.contributions import Contribution
from ps_server.values.shard_store import ShardStore

Array = npt.NDArray[Any]

# p - 1.0 * g is one rounding in any arithmetic, so the twin needs no knowledge of torch's.
PLAIN = OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0),))


class PoisonedPool(BufferPool):
    """Poisons what is given back, and what is taken, and knows what is out: POOL-1."""

    __slots__ = ("out",)

    def __init__(self) -> None:
        super().__init__()
        self.out: set[int] = set()

    def take(self, element_count: int, dtype: torch.dtype) -> Tensor:
        buffer = super().take(element_count, dtype)
        assert buffer.data_ptr() not in self.out
        self.out.add(buffer.data_ptr())
        return buffer.fill_(math.nan)

    def give_back(self, buffer: Tensor) -> None:
        self.out.remove(buffer.data_ptr())
        super().give_back(buffer.fill_(math.nan))


def table(
    sizes: Sequence[int],
    block: int = 64,
    optimizer: OptimizerSpec = PLAIN,
    dtype: DType = DType.FLOAT32,
    **settings: Any,
) -> Table:
    tensors, offset = [], 0
    for index, size in enumerate(sizes):
        tensors.append(TensorSpec(f"t{index}", (size,), offset))
        offset += size
    spec = TableSpec(
        "model", dtype, offset, optimizer,
        block_elements=block, tensors=tuple(tensors), **settings,
    )  # fmt: skip
    return Table(TableId(1), 0, spec.validated())


@dataclass(frozen=True)
class Part:
    """One worker's gradient for one block, as the wire carries it."""

    block: int
    codec: Codec
    payload: bytes
    present: tuple[bool, ...]


@dataclass
class Twin:
    """The rules of `ShardStore` on whole arrays, without a thought for speed."""

    table: Table

    def __post_init__(self) -> None:
        self.dtype: Any = np.float64 if self.table.spec.dtype is DType.FLOAT64 else np.float32
        count = self.table.spec.element_count
        self.values: Array = np.full(count, self.table.spec.initializer.constant, self.dtype)
        self.total: Array = np.zeros(count, self.dtype)
        self.mask: Array = np.zeros(count, np.bool_)
        self.versions = [0] * self.table.block_count
        self.sums: dict[int, tuple[Array, Array]] = {
            0: (self.values.copy(), np.ones(count, np.bool_))
        }

    def span(self, block: int) -> slice:
        begin = block * self.table.spec.block_elements
        return slice(begin, begin + self.table.block_length(block))

    def here(self, part: Part) -> Array:
        mask: Array = np.zeros(self.table.spec.element_count, np.bool_)
        block = mask[self.span(part.block)]
        for segment, is_here in zip(self.table.segments(part.block), part.present, strict=True):
            block[segment.begin : segment.end] = is_here
        return mask

    def accumulate(self, parts: Sequence[Part], scale: float) -> None:
        for part in parts:
            whole = np.zeros_like(self.total)
            whole[self.span(part.block)] = raw.decode(part.payload, part.codec)
            here = self.here(part)
            self.total[here] += whole[here] * self.dtype(scale)
            self.mask |= here

    def drop(self) -> None:
        self.total[:] = 0
        self.mask[:] = False

    def reduced(self, contributor_count: int) -> Array:
        if self.table.spec.reduction is Reduction.MEAN and contributor_count > 1:
            mean: Array = self.total * self.dtype(1.0 / contributor_count)
            return mean
        return self.total

    def squares(self, contributor_count: int) -> list[float]:
        found = np.where(self.mask, self.reduced(contributor_count), 0).astype(np.float64) ** 2
        return [math.fsum(found[self.span(block)]) for block in range(self.table.block_count)]

    def apply(self, clock: int, contributor_count: int, scale: float) -> tuple[int, ...]:
        total = self.reduced(contributor_count) * self.dtype(scale)
        touched = [b for b in range(self.table.block_count) if self.mask[self.span(b)].any()]
        for block in touched:
            self.versions[block] += 1
        kind = self.table.spec.optimizer.kind
        if kind is OptimizerKind.SGD:
            self.values[self.mask] -= total[self.mask]
        elif kind is OptimizerKind.ADD:
            self.values[self.mask] += total[self.mask]
        elif kind is OptimizerKind.ASSIGN:
            self.values[self.mask] = total[self.mask]
        else:
            self.sums[clock] = (np.where(self.mask, total, 0), self.mask.copy())
        self.drop()
        return tuple(touched)

    def read(self, block: int, codec: Codec) -> bytes:
        return raw.encode(self.values[self.span(block)], codec)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    kinds = [OptimizerKind.AGGREGATE, OptimizerKind.ASSIGN, OptimizerKind.ADD]
    plain = [OptimizerSpec(kind) for kind in kinds] + [
        OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0),), kernels=kernels) for kernels in Kernels
    ]
    constant = Initializer(InitializerKind.CONSTANT, draw(st.sampled_from([1.5, -2.0])))
    return table(
        draw(st.lists(st.integers(0, 150), min_size=1, max_size=6).filter(any)),
        draw(st.sampled_from([64, 128])),
        draw(st.sampled_from(plain)),
        draw(st.sampled_from(list(DType))),
        reduction=draw(st.sampled_from(list(Reduction))),
        initializer=draw(st.sampled_from([Initializer(), constant])),
    )


@st.composite
def worker_steps(draw: st.DrawFn, of: Table) -> tuple[list[Part], float]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    codecs = [Codec.FP32, Codec.FP16, Codec.BF16, NATIVE_CODEC[of.spec.dtype]]
    parts = []
    for block in draw(st.sets(st.integers(0, of.block_count - 1))):
        codec = draw(st.sampled_from(codecs))
        count = len(of.segments(block))
        bits = draw(st.one_of(st.just(-1), st.integers(0, 2**count - 1)))
        present = tuple(bool(bits >> index & 1) for index in range(count))
        values = rng.normal(size=of.block_length(block)) * 2.0 ** rng.integers(-6, 6)
        for segment, is_here in zip(of.segments(block), present, strict=True):
            if not is_here:
                values[segment.begin : segment.end] = rng.choice([np.nan, np.inf, 7.0])
        parts.append(Part(block, codec, raw.encode(values, codec), present))
    scale = draw(st.sampled_from([1.0, 1.0, 0.5, 1 / 3, 2.0**-16]))
    return parts, scale


def decoded(store: ShardStore, part: Part) -> tuple[int, Contribution]:
    presence = pack_presence(part.present)
    return part.block, store.decode(part.block, part.codec, part.payload, presence)


def check_reads(store: ShardStore, twin: Twin, clock: int) -> None:
    spec, blocks = twin.table.spec, range(twin.table.block_count)
    native = NATIVE_CODEC[spec.dtype]
    for block in blocks:
        assert store.version(block) == twin.versions[block]
        if spec.optimizer.kind is not OptimizerKind.AGGREGATE:
            for codec in {Codec.FP32, Codec.BF16, native}:
                same_values(store.read(block, codec, None)[0], twin.read(block, codec), codec)
            continue
        for asked in {max(clock - 1, 0), clock}:
            payload, presence = store.read(block, None, asked)
            values, mask = twin.sums[asked]
            span = twin.span(block)
            same_values(payload, raw.encode(values[span], native), native)
            present = tuple(bool(mask[span][s.begin]) for s in twin.table.segments(block))
            assert presence == pack_presence(present)
        if clock >= 2:
            with pytest.raises(InvalidConfig, match=f"sum of clock {clock - 2}"):
                store.read(block, None, clock - 2)


def same_values(got: bytes | memoryview, expected: bytes | memoryview, codec: Codec) -> None:
    """Bit for bit but for the sign of zero, which a sum over the present does not promise."""
    np.testing.assert_array_equal(raw.decode(got, codec), raw.decode(expected, codec))
