"""A process: a server's work on a gradient, and torch.optim's on the same one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

import ps_worker as ps
from ps_cli.bench.contenders.child import Actions
from ps_core.keys import TableId
from ps_core.tables.elements import NATIVE_CODEC
from ps_core.tables.optimizers import Kernels
from ps_core.tables.table import Table
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
UPDATE_COUNT = 2
"""The first update of two makes the optimizer's state and is not timed."""


def _table(name: str, kernels: Kernels, element_count: int) -> Table:
    spec = table_spec("bench", element_count, OPTIMIZERS[name][0].spec(kernels), {})
    return Table(TableId(1), 0, spec)


def _switches(name: str, kernels: Kernels) -> dict[str, Any]:
    """The arguments that choose torch.optim's default implementation, or its fastest."""
    if kernels is Kernels.EXACT:
        return {}
    return {"foreach" if name == "rmsprop" else "fused": True}  # RMSprop has no fused one


def _store_update_s(name: str, kernels: Kernels, element_count: int) -> float:
    """Seconds in which a server checks, accumulates and applies a gradient, block by block."""
    table = _table(name, kernels, element_count)
    store = ShardStore(table, range(table.block_count))
    codec = NATIVE_CODEC[table.spec.dtype]
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
    table = _table(name, kernels, element_count)
    parameters = [torch.zeros(table.block_length(block)) for block in range(table.block_count)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    ours, make = OPTIMIZERS[name]
    optimizer = make(parameters, **ours.defaults(), **_switches(name, kernels))
    began_s = 0.0
    for _ in range(UPDATE_COUNT):
        began_s = time.perf_counter()
        optimizer.step()
    return time.perf_counter() - began_s


@contextlib.contextmanager
def kernels(size: str) -> Iterator[Actions]:
    """Updates with a gradient of this size."""
    tune_allocator()
    torch.set_num_threads(1)  # as in a server
    element_count = int(size) // ELEMENT_BYTES
    actors = {"store": _store_update_s, "torch": _torch_update_s}
    yield {
        f"{name} {kernels.value} {actor}": partial(update_s, name, kernels, element_count)
        for name in OPTIMIZERS
        for kernels in Kernels
        for actor, update_s in actors.items()
    }
