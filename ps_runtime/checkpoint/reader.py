"""Reads a checkpoint: finds the file of each block, and checks all against the manifest.

Rules:
    - Opening reads every header, and no tensor. It finds files that are missing, cut short, of
      another checkpoint, with a damaged header, or with blocks twice or not at all, also among the
      files of other checkpoints that this one refers to.
    - A tensor is checked whenever it is read; `problems_of` reads all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import BinaryIO, Self

from google.protobuf import json_format

from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.keys import TableId
from ps_core.manifest import Manifest, SavedPart, SavedTable
from ps_core.tables.elements import DType, Initializer
from ps_core.tables.table import Table
from ps_runtime.checkpoint.directory import CheckpointDirectory, reported
from ps_runtime.checkpoint.part_file import (
    VALUES,
    PartHeader,
    StoredBlock,
    StoredTensor,
    read_into,
    read_tensor,
    tensor_name,
)
from ps_runtime.checkpoint.references import Bases, Source, header_of
from ps_runtime.cluster.wire import spec_from_proto
from pushpull.v1 import types_pb2

_SHOWN_PROBLEM_COUNT = 10
"""Damaged tensors of one file that are named."""


def table_of(saved: SavedTable, where: str) -> Table:
    """A table as its manifest describes it, or InvalidCheckpoint; its id and first ordinal are
    those of no cluster.
    """
    what = f"{where}: the spec of table '{saved.name}'"
    try:
        message = json_format.ParseDict(dict(saved.spec), types_pb2.TableSpec())
        # Inline values are not saved, because updates have replaced them.
        spec = replace(spec_from_proto(message), initializer=Initializer()).validated()
    except (json_format.ParseError, InvalidConfig) as error:
        raise InvalidCheckpoint(f"{what} is no TableSpec: {error}") from None
    table = Table(TableId(0), 0, spec)
    if spec.name != saved.name or table.block_count != saved.block_count:
        raise InvalidCheckpoint(
            f"{what} is of '{spec.name}' with {table.block_count} blocks; expected "
            f"'{saved.name}' with {saved.block_count}"
        )
    return table


class CheckpointReader:
    """A checkpoint, open for reading by one thread at a time. A context manager.

    `headers` are its own files', by name; `tables`, by name, are as the manifest describes them.

    Blocking: reads the manifest, every header, and the needed headers of other checkpoints.

    Raises:
        InvalidCheckpoint: the first fault, with its file; later also for a table, a block or a
            tensor that is missing or damaged.
    """

    def __init__(self, directory: CheckpointDirectory) -> None:
        self.directory = directory
        self.manifest = directory.read_manifest()
        self.headers: dict[str, PartHeader] = {}
        self._open: dict[str, BinaryIO] = {}
        self._sources: dict[tuple[str, int], Source] = {}
        bases = Bases(directory, self.manifest)
        try:
            self.tables = {t.name: table_of(t, directory.url) for t in self.manifest.tables}
            for file, saved in self.manifest.files.items():
                header = header_of(directory, self.manifest, saved)
                self.headers[file] = header
                if isinstance(saved, SavedPart):
                    for problem in bases.problems(saved, header):
                        raise InvalidCheckpoint(problem)
            for problem in bases.unused():
                raise InvalidCheckpoint(problem)
            for problem in _twice(self.headers):
                raise InvalidCheckpoint(f"{directory.url}: {problem} it once")
            self._files = {key: file for file, part in self.headers.items() for key in part.blocks}
            self._sources = _sources_of(directory, self.headers, bases)
            for problem in _table_problems(self.manifest, self.tables, self.headers, self._sources):
                raise InvalidCheckpoint(f"{directory.url}: {problem}")
        except BaseException:
            self.close()
            raise

    def twin(self) -> CheckpointReader:
        """The same checkpoint for another thread, with open files of its own; nothing is read."""
        found = copy.copy(self)
        found._open = {}
        return found

    def file_of(self, table: str, block: int) -> str:
        """The checkpoint's file that has a block, or refers to it."""
        saved = self.manifest.table(table)
        if not 0 <= block < saved.block_count:
            raise InvalidCheckpoint(
                f"{self.directory.url}: table '{table}' has blocks 0 to {saved.block_count - 1}; "
                f"got {block}"
            )
        return self._files[table, block]

    def block(self, table: str, block: int) -> StoredBlock:
        """A block without its bytes."""
        return self.headers[self.file_of(table, block)].blocks[table, block]

    def tensor(self, table: str, block: int, tensor: str) -> StoredTensor | None:
        """The position of a block's tensor in its file; None if the block has no such tensor."""
        if tensor not in self.block(table, block).tensors:
            return None
        return self._source(table, block).header.tensors[tensor_name(table, block, tensor)]

    def fingerprint(self, table: str, block: int, tensor: str) -> tuple[int, int] | None:
        """The CRC-32 and the length of a block's tensor, the same for the same bytes; None if the
        block has no such tensor. Nothing is read.
        """
        stored = self.tensor(table, block, tensor)
        return None if stored is None else (stored.crc32, stored.byte_count)

    def _source(self, table: str, block: int) -> Source:
        self.file_of(table, block)  # refuses a missing one
        return self._sources[table, block]

    def read(self, table: str, block: int, tensor: str = VALUES) -> bytearray:
        """Read and check a tensor of a block: little-endian elements."""
        return self._read(self._source(table, block), tensor_name(table, block, tensor))

    def read_block_into(self, table: str, block: int, tensor: str, target: memoryview) -> None:
        """As `read`, into `target`, which is as that of `part_file.read_into`."""
        source = self._source(table, block)
        with reported(source.url, "read"):
            name = tensor_name(table, block, tensor)
            read_into(self._opened(source), source.header, name, target)

    def read_file(self, file: str, name: str) -> bytearray:
        """Read a tensor by its name in a file, a worker's for example."""
        return self._read(Source(self.directory, file, self.headers[file]), name)

    def _read(self, source: Source, name: str) -> bytearray:
        with reported(source.url, "read"):
            return read_tensor(self._opened(source), source.header, name)

    def _opened(self, source: Source) -> BinaryIO:
        if source.url not in self._open:
            self._open[source.url] = source.directory.open(source.file)
        return self._open[source.url]

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def problems_of(
    directory: CheckpointDirectory, progress: Callable[[int], object] = lambda _: None
) -> list[str]:
    """Read all of a checkpoint; returns its faults, each with its file. A good one has none.

    `progress` is called with counts of bytes: in the end those of all files and of the blocks that
    they refer to, or fewer after a fault. Blocking: reads every byte.
    """
    try:
        manifest = directory.read_manifest()
    except InvalidCheckpoint as error:
        return [error.message]
    return problems_with(directory, manifest, progress)


def problems_with(
    directory: CheckpointDirectory,
    manifest: Manifest,
    progress: Callable[[int], object] = lambda _: None,
) -> list[str]:
    """As `problems_of`, for a checkpoint whose manifest may not be written yet."""
    problems: list[str] = []
    tables: dict[str, Table] = {}
    for saved_table in manifest.tables:
        try:
            tables[saved_table.name] = table_of(saved_table, directory.url)
        except InvalidCheckpoint as error:
            problems.append(error.message)
    headers: dict[str, PartHeader] = {}
    bases = Bases(directory, manifest)
    for file, saved in manifest.files.items():
        try:
            header = headers[file] = header_of(directory, manifest, saved)
            names = sorted(header.tensors, key=lambda name: header.tensors[name].begin)
            first = header.tensors[names[0]].begin if names else header.byte_count
            progress(first)
            problems += _damages(Source(directory, file, header), names, progress)
        except InvalidCheckpoint as error:
            problems.append(error.message)
            continue
        if isinstance(saved, SavedPart):
            problems += bases.problems(saved, header)
    problems += bases.unused()
    problems += (f"{directory.url}: {p} one" for p in _twice(headers))
    if problems:  # otherwise the blocks of faulty files would be named as well
        return problems
    sources = _sources_of(directory, headers, bases)
    for place, source in bases.sources.items():
        names = [
            tensor_name(*key, tensor)
            for header in headers.values()
            for key, block in header.referred.items()
            if block.place == place
            for tensor in block.tensors
        ]
        problems += _damages(source, names, progress)
    found = _table_problems(manifest, tables, headers, sources)
    return [*problems, *(f"{directory.url}: {problem}" for problem in found)]


def _sources_of(
    directory: CheckpointDirectory, headers: Mapping[str, PartHeader], bases: Bases
) -> dict[tuple[str, int], Source]:
    own = {file: Source(directory, file, header) for file, header in headers.items()}
    return {
        key: bases.sources[block.place] if block.place else own[file]
        for file, header in headers.items()
        for key, block in header.blocks.items()
    }


def _damages(source: Source, names: Sequence[str], progress: Callable[[int], object]) -> list[str]:
    """The faults of those tensors that cannot be read."""
    problems = []
    with source.directory.open(source.file) as opened:
        for name in names:
            try:
                with reported(source.url, "read"):
                    read_tensor(opened, source.header, name)
            except InvalidCheckpoint as error:
                problems.append(error.message)
            progress(source.header.tensors[name].byte_count)
    more = len(problems) - _SHOWN_PROBLEM_COUNT
    if more > 0:
        problems[_SHOWN_PROBLEM_COUNT:] = [f"{source.url}: {more} more of its tensors are damaged"]
    return problems


def _twice(headers: Mapping[str, PartHeader]) -> Iterator[str]:
    files: dict[tuple[str, int], str] = {}
    for file, header in headers.items():
        for table, block in header.blocks:
            other = files.setdefault((table, block), file)
            if other != file:
                yield f"block {block} of table '{table}' is in {other} and in {file}; expected"


def _table_problems(
    manifest: Manifest,
    tables: Mapping[str, Table],
    headers: Mapping[str, PartHeader],
    sources: Mapping[tuple[str, int], Source],
) -> Iterator[str]:
    """Blocks that are missing, or of another length or type than their table's."""
    blocks = {key: block for header in headers.values() for key, block in header.blocks.items()}
    for saved in manifest.tables:
        table = tables[saved.name]
        dtype = "F64" if table.spec.dtype is DType.FLOAT64 else "F32"
        for number in range(saved.block_count):
            if (saved.name, number) not in blocks:
                yield f"block {number} of table '{saved.name}' is in no file"
                continue
            source, block = sources[saved.name, number], blocks[saved.name, number]
            where = block.place or source.file
            if len(block.steps) not in (1, len(table.segments(number))):
                yield f"{where}: block {number} of '{saved.name}' has {len(block.steps)} steps"
            expected = (dtype, (table.block_length(number),))
            for tensor in block.tensors:
                name = tensor_name(saved.name, number, tensor)
                stored = source.header.tensors[name]
                if table.spec.rows is not None:  # of any number of rows: who loads them compares
                    continue
                if (stored.dtype, stored.shape) != expected:
                    yield (
                        f"{where}: tensor '{name}' is {stored.dtype} of shape {stored.shape}; "
                        f"expected {expected[0]} of shape {expected[1]}"
                    )
