"""A fingerprint of this machine's arithmetic, in one line, by which replicas check that they agree.

Two servers give the same bits only with the same torch, the same SIMD capability and kernels that
do the same: the last is tried, not believed. The self-test runs every kernel, exact and fast, on
fixed inputs and hashes values and optimizer state: a few milliseconds, once in a process.
"""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from ps_core.tables import Kernels, OptimizerKind, OptimizerSpec
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.optimizers import BlockState, Optimizer

_ELEMENT_COUNT = 192
_STEP_COUNT = 3
_DIGEST_CHARS = 16

_SPECS = (
    OptimizerSpec(OptimizerKind.SGD, (("lr", 0.1), ("momentum", 0.9), ("weight_decay", 0.01))),
    OptimizerSpec(OptimizerKind.ADAM, amsgrad=True),
    OptimizerSpec(OptimizerKind.ADAMW),
    OptimizerSpec(OptimizerKind.ADAGRAD, (("lr_decay", 0.1),)),
    OptimizerSpec(OptimizerKind.RMSPROP, (("momentum", 0.9),), centered=True),
)


@cache
def kernel_fingerprint() -> str:
    """``torch=<version>;cpu=<capability>;selftest=<sha256 prefix>`` of this process."""
    digest = hashlib.sha256()
    for spec in _SPECS:
        for kernels in Kernels:
            for dtype in (np.dtype("<f4"), np.dtype("<f8")):
                _run(_with_kernels(spec, kernels), dtype, digest)
    return (
        f"torch={torch.__version__};cpu={torch.backends.cpu.get_cpu_capability()};"
        f"selftest={digest.hexdigest()[:_DIGEST_CHARS]}"
    )


def _with_kernels(spec: OptimizerSpec, kernels: Kernels) -> OptimizerSpec:
    return OptimizerSpec(
        kind=spec.kind,
        hyperparameters=spec.merged(()),
        amsgrad=spec.amsgrad,
        centered=spec.centered,
        kernels=kernels,
    )


def _run(spec: OptimizerSpec, dtype: np.dtype[np.floating], digest: hashlib._Hash) -> None:
    optimizer = Optimizer(spec, BufferPool())
    hyperparameters = dict(spec.hyperparameters)
    state = BlockState(
        values=torch.from_numpy(_inputs(0, dtype)),
        bounds=np.array([0, _ELEMENT_COUNT], dtype=np.int64),
    )
    for step in range(1, _STEP_COUNT + 1):
        gradient = torch.from_numpy(_inputs(step, dtype))
        optimizer.apply(state, gradient, None, hyperparameters)
    for _, tensor in sorted([("values", state.values), *state.slots.items()]):
        digest.update(tensor.numpy().tobytes())


def _inputs(step: int, dtype: np.dtype[np.floating]) -> npt.NDArray[np.floating]:
    """Signed fractions that use all their bits, made of integers and one division."""
    counter = np.arange(1, _ELEMENT_COUNT + 1, dtype=np.int64) + step * _ELEMENT_COUNT
    return ((counter * 2_654_435_761 % 2_000_003 - 1_000_001) / 999_983.0).astype(dtype)
