"""One block's values: their initial state, and the payloads that readers get.

Invariants:
    STO-4  The segments of a block cover it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ps_core.codecs import int8
from ps_core.errors import check
from ps_core.tables.elements import NATIVE_CODEC, Codec, InitializerKind, check_length
from ps_core.tables.table import Table
from ps_server.values import contributions
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.contributions import TORCH_DTYPE, Contribution
from ps_server.values.mutations import Elements
from ps_server.values.optimizers import BlockState, padded_length


def arithmetic_dtype(table: Table) -> torch.dtype:
    return TORCH_DTYPE[table.spec.arithmetic_codec]


ReadyBlock = tuple[BlockState, memoryview]
"""A block in its initial state, and a live payload of its values."""


def ready_block(table: Table, block: int, home: Callable[[int], Tensor] | None) -> ReadyBlock:
    """A block for a store: zeros if its values come from rank 0.

    Args:
        home: the memory that a block's values live in; None means memory of their own.

    Raises:
        InvalidKeys: the table has no such block.
    """
    length = table.block_length(block)
    segments = table.segments(block)
    bounds = np.array([0, *(segment.end for segment in segments)], dtype=np.int64)
    check(int(bounds[-1]) == length, "STO-4", f"segments of block {block} do not cover it")
    dtype = arithmetic_dtype(table)
    values = home(block) if home else torch.zeros(padded_length(length), dtype=dtype)
    initializer = table.spec.initializer
    if initializer.kind is InitializerKind.CONSTANT:
        values[:length] = initializer.constant
    elif initializer.kind is InitializerKind.INLINE:
        codec = NATIVE_CODEC[table.spec.dtype]
        begin = block * table.spec.block_elements * codec.element_bytes
        inline = initializer.inline[begin : begin + length * codec.element_bytes]
        values[:length] = contributions.view(inline, codec)
    return BlockState(values, bounds), values.numpy()[:length].data.cast("B").toreadonly()


def encoded(values: Tensor, length: int, codec: Codec, pool: BufferPool) -> bytes | memoryview:
    """The first `length` of `values`, rounded to the nearest; a view in their own dtype."""
    elements = values[:length]
    if codec is Codec.INT8:
        coded = np.empty(codec.payload_bytes(length), np.uint8)
        int8.encode_values(elements.to(torch.float32).numpy(), coded)
        return coded.data
    dtype = TORCH_DTYPE[codec]
    if dtype is values.dtype:
        return elements.numpy().data.cast("B")
    buffer = pool.take(values.numel(), dtype)
    narrow = buffer[:length].copy_(elements)
    rounded = narrow.view(torch.int16 if codec is Codec.BF16 else dtype).numpy().tobytes()
    pool.give_back(buffer)
    return rounded


def received(table: Table, state: BlockState, elements: Elements) -> Contribution:
    """A block of another server's sum, where it lies. Raises InvalidKeys if its presence bitmap has
    the wrong length, InvalidTensor if its payload has.
    """
    block, presence, payload = elements
    count = state.segment_count
    present = contributions.presence_mask(table.spec.name, block, count, presence)
    codec = table.spec.arithmetic_codec
    check_length(len(payload), codec, state.length)
    values = contributions.view(payload, codec)
    return Contribution(block, state.length, values, present, state.bounds, is_owned=False)
