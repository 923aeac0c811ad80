"""A process: codecs of payloads at work, block by block, on one core."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

import ps_worker as ps
from ps_cli.bench.contenders.child import Actions
from ps_core.codecs.choices import PushCodec
from ps_core.keys import TableId
from ps_core.tables.elements import Codec
from ps_core.tables.table import Table
from ps_runtime.grpc.channels import tune_allocator
from ps_worker.compression.push_encoder import (
    CodedPayload,
    PushEncoder,
    decode_into,
    load_kernels,
)
from ps_worker.spec.settings import table_spec
from ps_worker.spec.values import BlockValues

ELEMENT_BYTES = 4
CODECS = ("bf16", "fp16", "int8", "sign", "topk", "lowrank")
"""Choices of a push's codec."""


class _Coder:
    """Encodes a table's gradient as a worker does, and decodes it as it does pulled values."""

    def __init__(self, codec: PushCodec, element_count: int) -> None:
        spec = table_spec("bench", element_count, ps.SGD(lr=0.1).spec(), {})
        self._table = Table(TableId(1), 0, spec)
        self._encoder = PushEncoder(self._table, codec, 0)
        self._values = np.empty(element_count, np.float32)
        self._values[:] = np.random.default_rng(1).standard_normal(element_count, np.float32)
        self._out = np.zeros(element_count, np.float32)
        self._clock = 0
        self._payloads: list[CodedPayload] = []

    def encode(self) -> float:
        """Seconds of a step's encoding, in which residuals are read and written."""
        size = self._table.spec.block_elements * ELEMENT_BYTES
        raw = self._values.data.cast("B")
        self._clock += 1
        began_s = time.perf_counter()
        self._payloads = [
            self._encoder.encode(
                self._clock, BlockValues(block, raw[block * size : (block + 1) * size])
            )
            for block in range(self._table.block_count)
        ]
        self._encoder.sealed(self._clock, 1.0, takes_part=True)
        taken_s = time.perf_counter() - began_s
        self._encoder.ended(self._clock)
        return taken_s

    def decode(self) -> float:
        """Seconds of decoding the newest payloads."""
        size = self._table.spec.block_elements * ELEMENT_BYTES
        raw = self._out.view(np.uint8)
        began_s = time.perf_counter()
        for block, (codec, payload) in enumerate(self._payloads):
            part = raw[block * size : (block + 1) * size]
            decode_into(payload.data, codec, part, Codec.FP32)
        return time.perf_counter() - began_s


@contextlib.contextmanager
def codecs(size: str) -> Iterator[Actions]:
    """Each codec's two directions, on float32 of this size."""
    tune_allocator()
    torch.set_num_threads(1)
    actions: dict[str, Callable[[], object]] = {}
    for name in CODECS:
        codec = PushCodec.parsed(name)
        load_kernels(codec.codec)
        coder = _Coder(codec, int(size) // ELEMENT_BYTES)
        actions[f"{name} encode"] = partial(coder.encode)
        actions[f"{name} decode"] = partial(coder.decode)
    yield actions
