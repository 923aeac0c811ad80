"""A process: a server's work on a gradient, and torch.optim's on the same one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import ps_worker as ps
from ps_cli.bench.contenders.child import obey, open_answers
from ps_core.keys import TableId
from ps_core.tables import NATIVE_CODEC, Kernels, Table
from ps_runtime.grpc.channels import tune_allocator
from ps_server.values.shard_store import ShardStore
from ps_worker.spec.optimizers import ServerOptimizer
from ps_worker.spec.settings import table_spec

ELEMENT_BYTES = 4

OPTIMIZERS: dict[str, tuple[ServerOptimizer, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (ps.SGD(lr=0.1), torch.optim.SGD),
    "adam": (ps.Adam(lr=1e-3), torch.optim.Adam),
    "adamw": (ps.AdamW(lr=1e-3), torch.optim.AdamW),
    "adagrad": (ps.Adagrad(lr=1e-2), torch.optim.Adagrad),
    "rmsprop": (ps.RMSprop(lr=1e-3), torch.optim.RMSprop),
}
SWITCHES: dict[Kernels, dict[str, Any]] = {Kernels.EXACT: {}, Kernels.FAST: {"fused": True}}
"""Arguments that choose torch.optim's default implementation, and its fastest."""

FASTEST_WITHOUT_FUSED = {"foreach": True}
UPDATE_COUNT = 2
"""The first update of two makes the optimizer's state and is not timed."""


def _store_update_s(name: str, kernels: Kernels, element_count: int) -> float:
    """Seconds in which a server checks, accumulates and applies a gradient, block by block."""
    spec = table_spec("bench", element_count, OPTIMIZERS[name][0].spec(kernels), {})
    table = Table(TableId(1), 0, spec)
    store = ShardStore(table, range(table.block_count))
    codec = NATIVE_CODEC[spec.dtype]
    payloads = [
        np.full(table.block_length(block), 1e-3, dtype=np.float32).tobytes()
        for block in range(table.block_count)
    ]
    began_s = 0.0
    for clock in range(1, UPDATE_COUNT + 1):
        began_s = time.perf_counter()
        for block, payload in enumerate(payloads):
            part = store.decode(block, codec, payload, b"")
            store.accumulate(clock, [(block, part)], 1.0)
            store.apply(clock, (), 1)
    return time.perf_counter() - began_s


def _torch_update_s(name: str, kernels: Kernels, element_count: int) -> float:
    """Seconds of torch.optim's step over tensors of the same sizes."""
    spec = table_spec("bench", element_count, OPTIMIZERS[name][0].spec(kernels), {})
    table = Table(TableId(1), 0, spec)
    parameters = [torch.zeros(table.block_length(block)) for block in range(table.block_count)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    ours, make = OPTIMIZERS[name]
    switches = SWITCHES[kernels]
    if kernels is Kernels.FAST and name == "rmsprop":
        switches = FASTEST_WITHOUT_FUSED
    optimizer = make(parameters, **ours.defaults(), **switches)
    began_s = 0.0
    for _ in range(UPDATE_COUNT):
        began_s = time.perf_counter()
        optimizer.step()
    return time.perf_counter() - began_s


def main() -> None:
    """`BYTES`: the size of the gradient."""
    answers = open_answers()
    tune_allocator()
    torch.set_num_threads(1)  # as in a server
    element_count = int(sys.argv[1]) // ELEMENT_BYTES
    actions: dict[str, Callable[[], object]] = {}
    for name in OPTIMIZERS:
        for kernels in Kernels:
            key = f"{name} {kernels.value}"
            actions[f"{key} store"] = partial(_store_update_s, name, kernels, element_count)
            actions[f"{key} torch"] = partial(_torch_update_s, name, kernels, element_count)
    obey(answers, actions)


if __name__ == "__main__":
    main()
