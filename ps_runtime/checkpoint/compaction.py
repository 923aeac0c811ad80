"""A full checkpoint of the same content as one that refers to others.

Rules:
    - It has the number of the other, since it is as old, and the other's cluster with "z-" before
      it. The next number would be wrong while that cluster runs: it may be writing that one, or be
      about to, and what is older would count as the newest. Of the two with one number this one is
      the newer, by its name, and `prune` may remove the other.
    - Each part is copied as a part, with what it referred to, and each worker's as it is: only the
      checkpoint that they name is another.
    - All is read again from where it was written before the manifest is: until then, it does not
      exist. What came to nothing is removed.

What it deliberately does not do: remove the others (`CheckpointStore.prune` does), or hold more
than one block, or one worker's state, in memory.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from ps_core.errors import InvalidCheckpoint, PushpullError
from ps_core.manifest import Manifest, SavedPart, SavedWorker
from ps_runtime.checkpoint.directory import CheckpointDirectory
from ps_runtime.checkpoint.part_writer import PartWriter, PlannedTable
from ps_runtime.checkpoint.reader import CheckpointReader, problems_with
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.checkpoint.worker_copies import WorkerCopies
from ps_runtime.system.disk import DISK, Disk

_PREFIX = "z-"
"""Sorts after what clusters draw for themselves, which are hexadecimal digits."""

_MAX_ID_CHARACTERS = 200


def compact(store: CheckpointStore, reader: CheckpointReader, disk: Disk = DISK) -> Manifest:
    """Write a full checkpoint of what `reader` has.

    Args:
        store: where it goes: the root of the other, or another one.
        reader: the other.
        disk: what local files are written with.

    Returns:
        Its manifest.

    Blocking: copies every byte, and reads the copy.

    Raises:
        InvalidCheckpoint: something cannot be read or written, or there is such a checkpoint; then
            there is no new one.
    """
    source = reader.manifest
    cluster_id = f"{_PREFIX}{source.cluster_id}"[:_MAX_ID_CHARACTERS]
    directory = store.directory(source.number, cluster_id)
    manifest = replace(
        source,
        cluster_id=cluster_id,
        reason=f"compacted from {source.directory}: {source.reason}",
        bases=(),
    )
    directory.create()
    try:
        copies = _Copies(reader, directory, manifest, disk)
        manifest = replace(
            manifest,
            parts=tuple(copies.part(part) for part in source.parts),
            workers=tuple(copies.worker(worker) for worker in source.workers),
        )
        problems = problems_with(directory, manifest)
        if problems:
            raise InvalidCheckpoint(f"what was written is not good: {problems[0]}")
        directory.write_manifest(manifest)
    except PushpullError:
        with contextlib.suppress(PushpullError):
            directory.remove()
        raise
    return manifest


class _Copies:
    """Files of one checkpoint, written as those of another."""

    def __init__(
        self,
        reader: CheckpointReader,
        directory: CheckpointDirectory,
        manifest: Manifest,
        disk: Disk,
    ) -> None:
        self._reader = reader
        self._directory = directory
        self._manifest = manifest
        self._disk = disk

    def part(self, saved: SavedPart) -> SavedPart:
        """A server's."""
        blocks = self._reader.headers[saved.file].blocks
        planned = []
        for name, count in saved.tables.items():
            own = [block for (table, _), block in blocks.items() if table == name]
            tensors = sorted({tensor for block in own for tensor in block.tensors})
            planned.append(PlannedTable(name, count, tensors, sum(len(b.steps) for b in own)))
        path = self._directory.begin(saved.file)
        writer = PartWriter(path, planned, self._disk)
        try:
            for (table, number), block in blocks.items():
                for tensor in block.tensors:
                    stored = self._reader.tensor(table, number, tensor)
                    payload = self._reader.read(table, number, tensor)
                    dtype = "F32" if stored is None else stored.dtype
                    writer.append(table, number, tensor, payload, dtype)
                writer.note_block(table, number, block.version, block.steps)
            written = writer.finish(self._manifest.number, self._manifest.cluster_id)
        finally:
            writer.abort()
        self._directory.commit(saved.file, path)
        return SavedPart(saved.file, written.byte_count, written.header_sha256, saved.tables)

    def worker(self, saved: SavedWorker) -> SavedWorker:
        """A worker's, or what is said of one without a file."""
        header = self._reader.headers.get(saved.file)
        if header is None:
            return saved
        copies = WorkerCopies(self._directory, self._manifest, self._disk)
        return copies.copy(
            saved.file, header, lambda name: self._reader.read_file(saved.file, name)
        )
