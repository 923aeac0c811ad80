"""A worker's own state, written to its part of a checkpoint and read back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from ps_core.change import Checkpoint
from ps_core.cluster_view import Session
from ps_core.errors import InvalidCheckpoint, PushpullError
from ps_core.manifest import Imported, Manifest, PartReport, number_of
from ps_runtime.checkpoint.directory import CheckpointDirectory, locate
from ps_runtime.checkpoint.part_file import PartHeader, StoredWorker
from ps_runtime.checkpoint.part_writer import WorkerTensor, write_worker_part
from ps_runtime.checkpoint.reader import CheckpointReader
from ps_runtime.checkpoint.store import CheckpointStore
from ps_worker.checkpoint.save_points import KeepsParameters
from ps_worker.checkpoint.state_codec import TENSOR_DTYPES, decode, encode, tensor_names

_DTYPES = {name: dtype for dtype, name in TENSOR_DTYPES.items()}


def copied(
    session: Session, checkpoint: Checkpoint, clock: int, states: Mapping[str, Mapping[str, Any]]
) -> Callable[[], PartReport]:
    """Copy a worker's attached states; a `ps_worker.checkpoint.save_points.Write`."""
    file = f"worker-{session.rank}-{session.incarnation}.safetensors"
    state, payloads = encoded(states)
    own, worker = (checkpoint.number, session.cluster_id), StoredWorker(session.rank, clock, state)

    def write() -> PartReport:
        directory = CheckpointDirectory(locate(checkpoint.url))
        directory.create()
        path = directory.begin(file)
        written = write_worker_part(path, own, worker, payloads)
        directory.commit(file, path)
        return PartReport(file, written.byte_count, written.header_sha256)

    return write


def encoded(states: Mapping[str, Mapping[str, Any]]) -> tuple[Any, dict[str, WorkerTensor]]:
    """States as JSON, and copies of their tensors by name; raises as `encode`."""
    state, tensors = encode(states)
    return state, {name: _payload(tensor) for name, tensor in tensors.items()}


def decoded(
    header: PartHeader, read: Callable[[str], bytearray], only: str = ""
) -> Mapping[Any, Any]:
    """The states in a worker's part, or `only` that of one name; `read` reads a tensor, which is
    then the caller's own.
    """
    if header.worker is None:
        raise InvalidCheckpoint(f"{header.where} is no worker's part")
    state, found = header.worker.state, header.tensors
    if only:
        state = {only: state[only]} if only in state else {}
        used = tensor_names(state)
        found = {name: tensor for name, tensor in found.items() if name in used}
    raw = {name: read(name) for name in found}
    try:
        tensors = {name: _tensor(t.dtype, t.shape, raw[name]) for name, t in found.items()}
        return decode(state, tensors)
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{header.where}: {error.message}") from error


def states_of_all(url: str, name: str) -> dict[int, Any]:
    """The state of this name of each worker of a checkpoint, by rank; reads the parts' headers, so
    a state with tensors raises InvalidCheckpoint.
    """
    found = {}
    with CheckpointReader(CheckpointDirectory(locate(url))) as reader:
        for worker in reader.manifest.workers:
            header = reader.headers[worker.file].worker if worker.file else None
            if header is not None and name in header.state:
                found[worker.rank] = decode({name: header.state[name]}, {})[name]
    return found


def states_of(url: str, name: str, ranks: Collection[int]) -> dict[int, Any]:
    """The state of this name of each worker of a checkpoint that has one of these ranks, by rank;
    reads it in their parts.
    """
    found = {}
    with CheckpointReader(CheckpointDirectory(locate(url))) as reader:
        for worker in reader.manifest.workers:
            header = reader.headers[worker.file] if worker.file else None
            if worker.rank not in ranks or header is None or header.worker is None:
                continue
            if name in header.worker.state:
                read = partial(reader.read_file, worker.file)
                found[worker.rank] = decoded(header, read, name)[name]
    return found


def _payload(tensor: torch.Tensor) -> WorkerTensor:
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)
    raw = flat.numpy().data.cast("B") if tensor.numel() else b""
    return WorkerTensor(TENSOR_DTYPES[tensor.dtype], tuple(tensor.shape), raw)


class RestoredStates:
    """The states that a worker takes from a checkpoint: its rank's (`is_own`), or else the lowest
    rank's; reads the part. `imported`: the contents, if it was made from a plain state dict.
    `rank_count`: one more than the highest rank. `lost`: why there is no worker's state, if all are
    lost.
    """

    def __init__(self, url: str, rank: int) -> None:
        self._states: Mapping[Any, Any] = {}
        self.imported: Imported | None = None
        self.lost, self._url = "", url
        with CheckpointReader(CheckpointDirectory(locate(url))) as reader:
            self.table_names = tuple(reader.tables)
            if reader.manifest.is_imported:
                self.imported = Imported.of(url, [table.spec for table in reader.tables.values()])
            self._ranks = {worker.rank for worker in reader.manifest.workers}
            self.rank_count = max((w.rank + 1 for w in reader.manifest.workers), default=0)
            workers = sorted(reader.manifest.workers, key=lambda w: (w.rank != rank, w.rank))
            found = next((worker for worker in workers if worker.file), None)
            self.is_own = found is not None and found.rank == rank
            if found is None:
                lost = (f"worker {each.rank}: {each.problem}" for each in workers if each.problem)
                self.lost = next(lost, "")
                return
            file = found.file
            header = reader.headers[file]
            self._states = decoded(header, lambda name: reader.read_file(file, name))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._states)

    def find(self, name: str) -> Any | None:
        return self._states.get(name)

    def misses(self, rank: int, name: str) -> bool:
        """True if the checkpoint has this worker's rank, and no state of its of this name."""
        return rank in self._ranks and not (self.is_own and name in self._states)

    def check_parameters(self, name: str, state: object) -> None:
        """Refuse a checkpoint that has lost the parameters of a model with some of its tables, as
        they were in the workers' states of this name alone.
        """
        if not (self.lost and isinstance(state, KeepsParameters) and state.keeps_parameters):
            return
        if not state.is_part_of(self.table_names):
            return
        older = _newest_with(self._url, name)
        remedy = f"resume from {older}, which has them" if older else "no older one there has them"
        raise InvalidCheckpoint(
            f"{self._url} lacks the parameters of '{name}': only the workers had them, and the "
            f"states of all are lost ({self.lost}), so they would begin anew; {remedy}. "
            f"{state.begins_anew}"
        )


def _newest_with(url: str, name: str) -> str:
    """The newest older checkpoint of the same run that has a worker's state of this name; empty if
    there is none, or they cannot be read. Reads manifests and headers.
    """
    own = CheckpointDirectory(locate(url))
    with contextlib.suppress(PushpullError):
        manifest, store = own.read_manifest(), CheckpointStore(own.location.parent)
        for each in reversed(store.names()):
            found = store.judged(each) if (number_of(each) or 0) < manifest.number else None
            if isinstance(found, Manifest) and found.run & manifest.run:
                with CheckpointReader(store.named(each)) as reader:
                    headers = [reader.headers[w.file].worker for w in found.workers if w.file]
                if any(header is not None and name in header.state for header in headers):
                    return store.named(each).url
    return ""


def _tensor(dtype: str, shape: tuple[int, ...], raw: bytearray) -> torch.Tensor:
    if dtype not in _DTYPES:
        raise InvalidCheckpoint(f"a worker's tensor is {dtype}, which this version does not know")
    if not raw:
        return torch.empty(shape, dtype=_DTYPES[dtype])
    flat = torch.from_numpy(np.frombuffer(raw, np.uint8))
    return flat.view(_DTYPES[dtype]).reshape(shape)
