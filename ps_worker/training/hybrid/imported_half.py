"""The parameters that hybrid workers keep, taken from a checkpoint that was imported from a plain
state dict. Each worker reads them; their optimizer begins without state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ps_core.errors import InvalidCheckpoint, listed
from ps_core.manifest import Imported
from ps_core.tables.elements import DType
from ps_runtime.checkpoint.directory import CheckpointDirectory, locate
from ps_runtime.checkpoint.reader import CheckpointReader
from ps_runtime.observe import logs
from ps_worker.training.among_workers.gradient_reduction import is_sharded

_SHOWN_COUNT = 5


@torch.no_grad()
def take_imported(imported: Imported, tensors: Mapping[str, Any]) -> None:
    """Write the values of an import into these tensors, parts of sharded ones; an import of rows
    alone leaves them as they are.

    Blocking: reads the checkpoint.

    Raises:
        InvalidCheckpoint: some of them are missing, or have another shape.
    """
    missing = [name for name in tensors if name not in imported.tensors]
    if len(missing) == len(tensors):
        logs.info("imported_rows_alone", url=imported.url)
        return
    if missing:
        raise InvalidCheckpoint(
            f"{imported.url} lacks {listed(missing, _SHOWN_COUNT)}, which the workers keep; "
            "expected the state dict of this model, or one with its rows alone"
        )
    with CheckpointReader(CheckpointDirectory(locate(imported.url))) as reader:
        for name, tensor in tensors.items():
            came = imported.tensors[name][1].shape
            if came != tuple(tensor.shape):
                raise InvalidCheckpoint(
                    f"tensor '{name}' is {came} in {imported.url}; expected {tuple(tensor.shape)}"
                )
            tensor.copy_(_placed_as(tensor, _read(reader, imported, name)))


def _read(reader: CheckpointReader, imported: Imported, name: str) -> torch.Tensor:
    spec, found = imported.tensors[name]
    end, length = found.offset + found.element_count, spec.block_elements
    dtype = np.dtype("<f8" if spec.dtype is DType.FLOAT64 else "<f4")
    blocks = range(found.offset // length, -(-end // length))
    taken = [np.frombuffer(reader.read(spec.name, block), dtype) for block in blocks]
    values = np.concatenate([*taken, np.empty(0, dtype)])
    begin = found.offset - blocks.start * length
    return torch.from_numpy(values[begin : begin + found.element_count]).reshape(found.shape)


def _placed_as(tensor: Any, values: torch.Tensor) -> torch.Tensor:
    """The values, with the parts of a sharded tensor in their places."""
    if not is_sharded(tensor):
        return values
    from torch.distributed.tensor import distribute_tensor

    placed: torch.Tensor = distribute_tensor(
        values.to(tensor.device, tensor.dtype),
        tensor.device_mesh,
        tensor.placements,
        src_data_rank=None,
    )
    return placed
