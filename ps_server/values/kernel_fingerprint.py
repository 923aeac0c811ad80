"""A fingerprint of this machine's arithmetic, in one line, by which replicas check that they agree.

Two servers give the same bits only with the same torch, the same SIMD capability and kernels that
do the same: the last is tried, not believed. They understand each other for sure only if they are
of one release of pushpull. The self-test runs every kernel, exact and fast, on
fixed inputs and hashes values and optimizer state: a few milliseconds, once in a process. Powers of
step counts are the C library's, so it hashes some, up to large counts. All else that numpy computes
for replicas is exact, so its version does not matter.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache
from importlib import metadata

import numpy as np
import torch
from torch import Tensor

from ps_core.tables.optimizers import (
    ROW_OPTIMIZERS,
    VALUES_ARRAY,
    Kernels,
    OptimizerKind,
    OptimizerSpec,
)
from ps_server.rows.row_optimizers import BiasCorrections, RowOptimizer
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.optimizers import BlockState, Optimizer

_ELEMENT_COUNT = 192
_ROW_ELEMENTS = 24
_STEP_COUNT = 3
_LATE_STEPS = 1_000
_BETAS = (0.9, 0.99, 0.999, 0.9999)
_COUNTS = np.array([*range(1, 1_000), *range(1_000, 1_000_000, 9_973)], np.int64)
_DIGEST_CHARS = 16

try:  # reads a file, so not on an event loop
    _RELEASE = metadata.version("pushpull")
except metadata.PackageNotFoundError:  # run from a folder
    _RELEASE = "unknown"

_SPECS = (
    OptimizerSpec(OptimizerKind.SGD, (("lr", 0.1), ("momentum", 0.9), ("weight_decay", 0.01))),
    OptimizerSpec(OptimizerKind.ADAM, amsgrad=True),
    OptimizerSpec(OptimizerKind.ADAMW),
    OptimizerSpec(OptimizerKind.ADAGRAD, (("lr_decay", 0.1),)),
    OptimizerSpec(OptimizerKind.RMSPROP, (("momentum", 0.9),), centered=True),
)


@cache
def kernel_fingerprint() -> str:
    """``pushpull=<version>;torch=<version>;cpu=<capability>;selftest=<sha256 prefix>`` of this
    process.
    """
    digest = hashlib.sha256()
    for spec in _SPECS:
        for kernels in Kernels:
            for dtype in (torch.float32, torch.float64):
                complete = replace(spec, hyperparameters=spec.merged(()), kernels=kernels)
                _run(complete, dtype, digest)
    for kind in sorted(ROW_OPTIMIZERS, key=lambda kind: kind.value):
        for dtype in (torch.float32, torch.float64):
            _run_rows(OptimizerSpec(kind), dtype, digest)
    for beta in _BETAS:
        digest.update(BiasCorrections(beta).of(_COUNTS).tobytes())
    return (
        f"pushpull={_RELEASE};torch={torch.__version__};"
        f"cpu={torch.backends.cpu.get_cpu_capability()};"
        f"selftest={digest.hexdigest()[:_DIGEST_CHARS]}"
    )


def _run(spec: OptimizerSpec, dtype: torch.dtype, digest: hashlib._Hash) -> None:
    optimizer = Optimizer(spec, BufferPool())
    bounds = np.array([0, _ELEMENT_COUNT], dtype=np.int64)
    state = BlockState(fixed_input(0, _ELEMENT_COUNT, dtype), bounds)
    for step in range(1, _STEP_COUNT + 2):
        if step > _STEP_COUNT:
            state.set_segment_steps([_LATE_STEPS])
        gradient = fixed_input(step, _ELEMENT_COUNT, dtype)
        optimizer.apply(state, gradient, None, dict(spec.hyperparameters))
    for _, tensor in sorted([("values", state.values), *state.slots.items()]):
        digest.update(tensor.numpy().tobytes())


def _run_rows(spec: OptimizerSpec, dtype: torch.dtype, digest: hashlib._Hash) -> None:
    shape = _ELEMENT_COUNT // _ROW_ELEMENTS, _ROW_ELEMENTS
    optimizer = RowOptimizer(spec, _ROW_ELEMENTS)
    values = fixed_input(0, _ELEMENT_COUNT, dtype).numpy().reshape(shape)
    arrays = {VALUES_ARRAY: values, **optimizer.first_state(shape[0], values.dtype)}
    numbers = np.arange(shape[0])
    for step in range(1, _STEP_COUNT + 1):
        gradients = fixed_input(step, _ELEMENT_COUNT, dtype).numpy().reshape(shape)
        optimizer.step(arrays, numbers, gradients, dict(spec.merged(())))
    for rows in arrays.values():
        digest.update(rows.tobytes())


def fixed_input(step: int, count: int, dtype: torch.dtype) -> Tensor:
    """Signed fractions that use all their bits, made of integers and one division."""
    counter = torch.arange(1, count + 1, dtype=torch.int64) + step * count
    numbers = (counter * 2_654_435_761 % 2_000_003 - 1_000_001).to(torch.float64)
    return (numbers / 999_983.0).to(dtype)
