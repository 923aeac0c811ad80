"""The files of a checkpoint's blocks: its own, or those of other checkpoints beside it.

Rules:
    - A checkpoint's manifest names exactly the other checkpoints that its blocks refer to.
    - Only the manifest and the files that are referred to have to be good in another one.
    - The named file has the block's bytes itself, in the version, the steps and the checksums that
      the reference has. So a directory of another training in its place is found, even if each of
      its files is whole.

No reference leads to another reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ps_core.errors import InvalidCheckpoint
from ps_core.manifest import Manifest, SavedPart, SavedWorker, split_place
from ps_runtime.checkpoint.directory import CheckpointDirectory, reported
from ps_runtime.checkpoint.part_file import (
    PartHeader,
    StoredBlock,
    check_header,
    read_header,
    tensor_name,
)

_CHECKS_AT_ONCE = 8
"""Files that are checked at once: an object store answers each in its own time."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file with blocks: its directory, its name and its header."""

    directory: CheckpointDirectory
    file: str
    header: PartHeader

    @property
    def url(self) -> str:
        return f"{self.directory.url}/{self.file}"


class Bases:
    """The other checkpoints that one refers to; each file is opened when it is first needed.
    `sources` are the files that were found, by their places.
    """

    def __init__(self, directory: CheckpointDirectory, manifest: Manifest) -> None:
        self._directory = directory
        self._manifest = manifest
        self._manifests: dict[str, Manifest | InvalidCheckpoint] = {}
        self._failed: dict[str, InvalidCheckpoint] = {}
        self.sources: dict[str, Source] = {}

    def problems(self, saved: SavedPart, header: PartHeader) -> Iterator[str]:
        """The faults of referred blocks, the first of each file; reads manifests and headers."""
        blocks: dict[str, dict[tuple[str, int], StoredBlock]] = {}
        for key, block in header.referred.items():
            blocks.setdefault(block.place, {})[key] = block
        byte_count, is_whole = 0, True
        for place, referred in blocks.items():
            try:
                byte_count += self._checked(place, referred)
            except InvalidCheckpoint as error:
                is_whole = False
                yield f"{header.where} refers to {place}: {error.message}"
        came = len(header.referred), byte_count
        said = saved.referred_block_count, saved.referred_byte_count
        if is_whole and came != said:
            yield (
                f"{header.where}: it refers to {came[0]} blocks of {came[1]} bytes; the manifest "
                f"says {said[0]} of {said[1]}"
            )

    def unused(self) -> Iterator[str]:
        """The faults of checkpoints that the manifest names, and no part refers to, at the end."""
        used = {(split_place(place) or ("", ""))[0] for place in self.sources.keys() | self._failed}
        for base in self._manifest.bases:
            if base not in used:
                yield f"{self._directory.url}: nothing is in {base}, which its manifest names"

    def _checked(self, place: str, blocks: dict[tuple[str, int], StoredBlock]) -> int:
        """The bytes of the blocks that one part has in one other file, or InvalidCheckpoint."""
        source = self._source(place)
        byte_count = 0
        for (table, number), block in blocks.items():
            found = source.header.blocks.get((table, number))
            what = f"block {number} of table '{table}'"
            if found is None or found.place:
                raise InvalidCheckpoint(f"{source.url}: {what} is not in it")
            for name, came, expected in (
                ("version", found.version, block.version),
                ("steps", found.steps, block.steps),
                ("CRC-32", found.crc32s, block.crc32s),
            ):
                if came != expected:
                    raise InvalidCheckpoint(
                        f"{source.url}: the {name} of {what} is {came}; expected {expected}"
                    )
            names = (tensor_name(table, number, tensor) for tensor in block.crc32s)
            byte_count += sum(source.header.tensors[name].byte_count for name in names)
        return byte_count

    def _source(self, place: str) -> Source:
        if place in self._failed:
            raise self._failed[place]
        if place not in self.sources:
            try:
                self.sources[place] = self._opened(place)
            except InvalidCheckpoint as error:
                self._failed[place] = error
                raise
        return self.sources[place]

    def _opened(self, place: str) -> Source:
        name, file = split_place(place) or ("", "")
        if name not in self._manifest.bases:
            named = ", ".join(self._manifest.bases) or "none"
            raise InvalidCheckpoint(f"its manifest does not name {name}, but {named}")
        directory = self._directory.sibling(name)
        if name not in self._manifests:
            try:
                self._manifests[name] = directory.read_manifest()
            except InvalidCheckpoint as error:
                self._manifests[name] = error
        manifest = self._manifests[name]
        if isinstance(manifest, InvalidCheckpoint):
            raise manifest
        saved = manifest.files.get(file)
        if not isinstance(saved, SavedPart):
            raise InvalidCheckpoint(f"{directory.url} has no part {file}")
        return Source(directory, file, header_of(directory, manifest, saved))


def check_files(directory: CheckpointDirectory, manifest: Manifest) -> None:
    """Raise InvalidCheckpoint if a file of this checkpoint is not here as it was reported.

    Blocking: reads the headers, several at once.
    """

    def check(saved: SavedPart | SavedWorker) -> None:
        where = f"{directory.url}/{saved.file}"
        with reported(where, "read"), directory.open(saved.file) as file:
            check_header(file, where, saved.byte_count, saved.header_sha256)

    directory.location.filesystem.invalidate_cache()
    with ThreadPoolExecutor(_CHECKS_AT_ONCE, "checkpoint") as threads:
        for _ in threads.map(check, manifest.files.values()):
            pass


def header_of(
    directory: CheckpointDirectory, manifest: Manifest, saved: SavedPart | SavedWorker
) -> PartHeader:
    """Read the header of a file of this checkpoint; InvalidCheckpoint if the file is missing,
    damaged or of another checkpoint.
    """
    where = f"{directory.url}/{saved.file}"
    with reported(where, "read"), directory.open(saved.file) as file:
        header = read_header(file, where, saved.byte_count, saved.header_sha256)
    came = (header.checkpoint, header.cluster_id)
    if came != (manifest.number, manifest.cluster_id):
        raise InvalidCheckpoint(
            f"{where}: it is of checkpoint {came[0]} of cluster {came[1]}; expected "
            f"{manifest.number} of {manifest.cluster_id}"
        )
    if isinstance(saved, SavedPart):
        if header.worker is not None or header.block_counts != saved.tables:
            raise InvalidCheckpoint(
                f"{where}: it has blocks {dict(header.block_counts)}; the manifest says "
                f"{dict(saved.tables)}"
            )
    elif header.worker is None or (header.worker.rank, header.worker.clock) != (
        saved.rank,
        saved.clock,
    ):
        raise InvalidCheckpoint(
            f"{where}: it is not of the worker of rank {saved.rank} at clock {saved.clock}"
        )
    return header
