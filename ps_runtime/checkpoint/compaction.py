"""Compaction: a full checkpoint with the content of one that refers to others.

Rules:
    - The copy has the source's number, because it is as old, and the source's cluster with the
      prefix "z-". The next number would be wrong: the running cluster may be writing it, and older
      content would count as the newest. By its name the copy is the newer of the two, and `prune`
      may remove the source.
    - A part is copied with the blocks that it referred to, and a worker's part as it is; only the
      checkpoint that they name changes.
    - The copy is read again before its manifest makes it exist. A failed copy is removed; one that
      another process has made, or is making, stays.

One block, or worker's state, is in memory at a time. `prune` removes the others.
"""

from __future__ import annotations

from dataclasses import replace

from ps_core.errors import InvalidCheckpoint
from ps_core.manifest import Manifest, SavedPart, SavedWorker
from ps_runtime.checkpoint.part_writer import PartWriter, PlannedTable
from ps_runtime.checkpoint.reader import CheckpointReader, problems_with
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.checkpoint.worker_copies import WorkerCopies
from ps_runtime.system.disk import DISK, Disk

_PREFIX = "z-"
"""Sorts after the ids of clusters, which are hexadecimal digits."""
_MAX_ID_CHARACTERS = 200


def compact(store: CheckpointStore, reader: CheckpointReader, disk: Disk = DISK) -> Manifest:
    """Write a full checkpoint with the content of `reader` into `store`; returns its manifest.
    After InvalidCheckpoint, also if the copy exists already, there is no new checkpoint.

    Blocking: copies every byte, and reads the copy.
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
    with directory.made():
        copies = WorkerCopies(directory, manifest, disk)
        manifest = replace(
            manifest,
            parts=tuple(_copy_part(reader, part, copies) for part in source.parts),
            workers=tuple(_copy_worker(reader, each, copies) for each in source.workers),
        )
        problems = problems_with(directory, manifest)
        if problems:
            raise InvalidCheckpoint(f"what was written is not good: {problems[0]}")
        directory.write_manifest(manifest)
    return manifest


def _copy_part(reader: CheckpointReader, saved: SavedPart, copies: WorkerCopies) -> SavedPart:
    """Copy a server's part to where `copies` copies workers'."""
    blocks = reader.headers[saved.file].blocks
    planned = []
    for name, count in saved.tables.items():
        own = [block for (table, _), block in blocks.items() if table == name]
        tensors = sorted({tensor for block in own for tensor in block.tensors})
        planned.append(PlannedTable(name, count, tensors, sum(len(b.steps) for b in own)))
    path = copies.directory.begin(saved.file)
    writer = PartWriter(path, planned, copies.disk)
    try:
        for (table, number), block in blocks.items():
            for tensor in block.tensors:
                stored = reader.tensor(table, number, tensor)
                payload = reader.read(table, number, tensor)
                dtype = "F32" if stored is None else stored.dtype
                writer.append(table, number, tensor, payload, dtype)
            writer.note_block(table, number, block.version, block.steps)
        written = writer.finish(copies.manifest.number, copies.manifest.cluster_id)
    finally:
        writer.abort()
    copies.directory.commit(saved.file, path)
    return SavedPart(saved.file, written.byte_count, written.header_sha256, saved.tables)


def _copy_worker(reader: CheckpointReader, saved: SavedWorker, copies: WorkerCopies) -> SavedWorker:
    """Copy a worker's part; a worker without a file stays as it is."""
    header = reader.headers.get(saved.file)
    if header is None:
        return saved
    return copies.copy(saved.file, header, lambda name: reader.read_file(saved.file, name))
