"""A worker's own state, written to its part of a checkpoint and read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ps_core.change import Checkpoint
from ps_core.cluster_view import Session
from ps_core.errors import InvalidCheckpoint
from ps_core.manifest import Imported, PartReport
from ps_runtime.checkpoint.directory import CheckpointDirectory, locate
from ps_runtime.checkpoint.part_file import PartHeader
from ps_runtime.checkpoint.part_writer import WorkerPart, WorkerTensor, write_worker_part
from ps_runtime.checkpoint.reader import CheckpointReader
from ps_worker.checkpoint.state_codec import decode, encode

_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.uint16: "U16", torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64",
    torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def copied(
    session: Session, checkpoint: Checkpoint, clock: int, states: Mapping[str, Mapping[str, Any]]
) -> Callable[[], PartReport]:
    """Copy a worker's attached states; a `ps_worker.checkpoint.save_points.Write`.

    Raises:
        InvalidConfig: a state has values that cannot be written.
    """
    file = f"worker-{session.rank}-{session.incarnation}.safetensors"
    state, payloads = encoded(states)
    part = WorkerPart(checkpoint.number, session.cluster_id, session.rank, clock, state)

    def write() -> PartReport:
        directory = CheckpointDirectory(locate(checkpoint.url))
        directory.create()
        path = directory.begin(file)
        written = write_worker_part(path, part, payloads)
        directory.commit(file, path)
        return PartReport(file, written.byte_count, written.header_sha256)

    return write


def encoded(states: Mapping[str, Mapping[str, Any]]) -> tuple[Any, dict[str, WorkerTensor]]:
    """States as JSON, and copies of their tensors by name; raises as `encode`."""
    state, tensors = encode(states)
    return state, {name: _payload(tensor) for name, tensor in tensors.items()}


def decoded(header: PartHeader, read: Callable[[str], bytearray]) -> Mapping[Any, Any]:
    """The state in a worker's part.

    Args:
        read: reads a tensor of the file by name.

    Shapes:
        Tensors of the state are on the CPU, contiguous, and the caller's own.

    Raises:
        InvalidCheckpoint: it is not a worker's part, or the state is malformed; names the file.
    """
    if header.worker is None:
        raise InvalidCheckpoint(f"{header.where} is no worker's part")
    raw = {name: read(name) for name in header.tensors}
    try:
        tensors = {name: _tensor(t.dtype, t.shape, raw[name]) for name, t in header.tensors.items()}
        return decode(header.worker.state, tensors)
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{header.where}: {error.message}") from error


def states_of_all(url: str, name: str) -> dict[int, Any]:
    """The state of this name of each worker of a checkpoint, by rank; reads the parts' headers.

    Raises:
        InvalidCheckpoint: they cannot be read, or the states have tensors.
    """
    found = {}
    with CheckpointReader(CheckpointDirectory(locate(url))) as reader:
        for worker in reader.manifest.workers:
            header = reader.headers[worker.file].worker if worker.file else None
            if header is not None and name in header.state:
                found[worker.rank] = decode({name: header.state[name]}, {})[name]
    return found


def _payload(tensor: torch.Tensor) -> WorkerTensor:
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)
    raw = flat.numpy().data.cast("B") if tensor.numel() else b""
    return WorkerTensor(_NAMES[tensor.dtype], tuple(tensor.shape), raw)


class RestoredStates:
    """The states that a worker takes from a checkpoint: its rank's, or else the lowest rank's.

    Attributes:
        is_own: the part is of the worker's rank.
        imported: the checkpoint's contents, if it was made from a plain state dict.
        table_names: of the tables in the checkpoint.

    Blocking: reads the part.

    Raises:
        InvalidCheckpoint: it cannot be read.
    """

    def __init__(self, url: str, rank: int) -> None:
        self._states: Mapping[Any, Any] = {}
        self.imported: Imported | None = None
        with CheckpointReader(CheckpointDirectory(locate(url))) as reader:
            self.table_names = tuple(reader.tables)
            if reader.manifest.is_imported:
                self.imported = Imported.of(url, [table.spec for table in reader.tables.values()])
            workers = sorted(reader.manifest.workers, key=lambda w: (w.rank != rank, w.rank))
            found = next((worker for worker in workers if worker.file), None)
            self.is_own = found is not None and found.rank == rank
            if found is None:
                return
            file = found.file
            header = reader.headers[file]
            self._states = decoded(header, lambda name: reader.read_file(file, name))

    def find(self, name: str) -> Any | None:
        """The state of that name; None if there is none."""
        return self._states.get(name)


def _tensor(dtype: str, shape: tuple[int, ...], raw: bytearray) -> torch.Tensor:
    if dtype not in _DTYPES:
        raise InvalidCheckpoint(f"a worker's tensor is {dtype}, which this version does not know")
    if not raw:
        return torch.empty(shape, dtype=_DTYPES[dtype])
    flat = torch.from_numpy(np.frombuffer(raw, np.uint8))
    return flat.view(_DTYPES[dtype]).reshape(shape)
