"""Copies of workers' parts: only the checkpoint that a part names changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ps_core.errors import InvalidCheckpoint
from ps_core.manifest import Manifest, SavedWorker
from ps_runtime.checkpoint.directory import CheckpointDirectory, reported
from ps_runtime.checkpoint.part_file import PartHeader, read_header, read_tensor
from ps_runtime.checkpoint.part_writer import WorkerTensor, write_worker_part
from ps_runtime.system.disk import DISK, Disk


class SourceLost(InvalidCheckpoint):
    """A file that was to be copied is missing, or is not as it was written."""


class SourceMissing(SourceLost):
    """No such file is there."""


@dataclass(frozen=True, slots=True)
class WorkerCopies:
    """Copies parts into the checkpoint of `directory`; `disk` writes local files. Only the number
    and the cluster of `manifest` count.
    """

    directory: CheckpointDirectory
    manifest: Manifest
    disk: Disk = DISK

    def copy(self, file: str, header: PartHeader, read: Callable[[str], bytearray]) -> SavedWorker:
        """Write a part under the same file name; `read` reads a tensor of it by its name.
        InvalidCheckpoint if it is no worker's, or cannot be read or written.

        Blocking: until the copy is durable. All of it is in memory meanwhile.
        """
        return self._write(file, header, _tensors(header, read))

    def _write(
        self, file: str, header: PartHeader, tensors: Mapping[str, WorkerTensor]
    ) -> SavedWorker:
        worker = header.worker
        if worker is None:
            raise InvalidCheckpoint(f"{header.where} is no worker's part")
        checkpoint = self.manifest.number, self.manifest.cluster_id
        path = self.directory.begin(file)
        written = write_worker_part(path, checkpoint, worker, tensors, self.disk)
        self.directory.commit(file, path)
        byte_count, sha256 = written.byte_count, written.header_sha256
        return SavedWorker(worker.rank, worker.clock, file, byte_count, sha256)

    def copy_from(self, source: CheckpointDirectory, saved: SavedWorker) -> SavedWorker:
        """As `copy`, for a file that belongs to no checkpoint. Blocking, Raises: as `copy`;
        SourceLost if it is damaged or does not match `saved`, SourceMissing if it is not there.
        """
        try:
            header, tensors = _read(source, saved)
        except InvalidCheckpoint as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise SourceMissing(error.message) from error
            if error.__cause__ is None:
                raise SourceLost(error.message) from error
            raise  # a store that gives no answer has raised an error of its own
        return self._write(saved.file, header, tensors)


def _tensors(header: PartHeader, read: Callable[[str], bytearray]) -> dict[str, WorkerTensor]:
    return {
        name: WorkerTensor(stored.dtype, stored.shape, read(name))
        for name, stored in header.tensors.items()
    }


def _read(
    source: CheckpointDirectory, saved: SavedWorker
) -> tuple[PartHeader, dict[str, WorkerTensor]]:
    """The header and the tensors of a file that is as it was reported; else InvalidCheckpoint."""
    where = f"{source.url}/{saved.file}"
    with reported(where, "read"), source.open(saved.file) as file:
        header = read_header(file, where, saved.byte_count, saved.header_sha256)
        came = None if header.worker is None else (header.worker.rank, header.worker.clock)
        if came != (saved.rank, saved.clock):
            raise InvalidCheckpoint(
                f"{where}: it is of rank and clock {came}; expected {(saved.rank, saved.clock)}"
            )
        return header, _tensors(header, lambda name: read_tensor(file, header, name))
