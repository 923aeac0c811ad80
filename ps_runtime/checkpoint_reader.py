"""A checkpoint that is read: which file has which block, and whether all is as the manifest says.

Rules:
    - Opening reads every header, and no tensor: files that are missing, cut short, of another
      checkpoint, with a damaged header or with blocks twice or not at all are found then.
    - A tensor is checked whenever it is read; `problems_of` reads them all.

What it deliberately does not do: choose a checkpoint (`ps_runtime.checkpoint_store`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import BinaryIO, Self

from google.protobuf import json_format

from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.keys import TableId
from ps_core.manifest import Manifest, SavedPart, SavedTable, SavedWorker
from ps_core.tables import DType, Initializer, Table
from ps_runtime.checkpoint_directory import CheckpointDirectory, reported
from ps_runtime.part_file import (
    VALUES,
    PartHeader,
    StoredBlock,
    StoredTensor,
    read_header,
    read_into,
    read_tensor,
    tensor_name,
)
from ps_runtime.wire import spec_from_proto
from pushpull.v1 import types_pb2

_SHOWN_PROBLEM_COUNT = 10
"""Damaged tensors of one file that are named."""


def table_of(saved: SavedTable, where: str) -> Table:
    """A table as its manifest describes it; its number and place are those of no cluster.

    Raises:
        InvalidCheckpoint: the spec is none, or of another table.
    """
    what = f"{where}: the spec of table '{saved.name}'"
    try:
        message = json_format.ParseDict(dict(saved.spec), types_pb2.TableSpec())
        # Inline values are not saved: they were the table's before its first update.
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

    Args:
        directory: its directory.

    Attributes:
        directory: as given.
        manifest: what it has.
        headers: of each file, by its name.
        tables: as the manifest's specs describe them, by name.

    Blocking: reads the manifest and every header.

    Raises:
        InvalidCheckpoint: the first thing that is wrong, with its file.
    """

    def __init__(self, directory: CheckpointDirectory) -> None:
        self.directory = directory
        self.manifest = directory.read_manifest()
        self.headers: dict[str, PartHeader] = {}
        self._open: dict[str, BinaryIO] = {}
        self._files: dict[tuple[str, int], str] = {}
        try:
            self.tables = {t.name: table_of(t, directory.url) for t in self.manifest.tables}
            for file, saved in self.manifest.files.items():
                header = _header(directory, self.manifest, saved)
                self.headers[file] = header
                for place in header.blocks:
                    self._place(place, file)
            for problem in _table_problems(self.manifest, self.tables, self.headers):
                raise InvalidCheckpoint(f"{directory.url}: {problem}")
        except BaseException:
            self.close()
            raise

    def _place(self, place: tuple[str, int], file: str) -> None:
        other = self._files.setdefault(place, file)
        if other != file:
            raise InvalidCheckpoint(
                f"{self.directory.url}: block {place[1]} of table '{place[0]}' is in {other} and "
                f"in {file}; expected it once"
            )

    def file_of(self, table: str, block: int) -> str:
        """The file that has a block.

        Raises:
            InvalidCheckpoint: there is no such table or block.
        """
        saved = self.manifest.table(table)
        if not 0 <= block < saved.block_count:
            raise InvalidCheckpoint(
                f"{self.directory.url}: table '{table}' has blocks 0 to {saved.block_count - 1}; "
                f"got {block}"
            )
        return self._files[table, block]

    def block(self, table: str, block: int) -> StoredBlock:
        """What a block has beside its bytes.

        Raises:
            InvalidCheckpoint: there is no such table or block.
        """
        return self.headers[self.file_of(table, block)].blocks[table, block]

    def tensor(self, table: str, block: int, tensor: str) -> StoredTensor | None:
        """Where a tensor of a block lies in its file; None if the block has none of that name.

        Raises:
            InvalidCheckpoint: there is no such table or block.
        """
        header = self.headers[self.file_of(table, block)]
        if tensor not in header.blocks[table, block].tensors:
            return None
        return header.tensors[tensor_name(table, block, tensor)]

    def read(self, table: str, block: int, tensor: str = VALUES) -> bytearray:
        """A tensor of a block, checked: little-endian elements.

        Blocking: reads it.

        Raises:
            InvalidCheckpoint: there is no such tensor, or it is damaged.
        """
        file = self.file_of(table, block)
        return self.read_file(file, tensor_name(table, block, tensor))

    def read_block_into(self, table: str, block: int, tensor: str, target: memoryview) -> None:
        """As `read`, into memory that is there.

        Shapes:
            target: writable bytes ("B"), C-contiguous, as long as the tensor.

        Blocking, Raises: as `read`; InvalidCheckpoint if the length is another.
        """
        file = self.file_of(table, block)
        with reported(f"{self.directory.url}/{file}", "read"):
            name = tensor_name(table, block, tensor)
            read_into(self._opened(file), self.headers[file], name, target)

    def read_file(self, file: str, name: str) -> bytearray:
        """A tensor of a file by the name that it has there, a worker's for example.

        Blocking, Raises: as `read`.
        """
        with reported(f"{self.directory.url}/{file}", "read"):
            return read_tensor(self._opened(file), self.headers[file], name)

    def worker(self, rank: int) -> SavedWorker | None:
        """What the manifest says of a worker; None if it knows none of that rank."""
        return next((w for w in self.manifest.workers if w.rank == rank), None)

    def _opened(self, file: str) -> BinaryIO:
        if file not in self._open:
            self._open[file] = self.directory.open(file)
        return self._open[file]

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def problems_of(
    directory: CheckpointDirectory, progress: Callable[[int], object] = lambda _: None
) -> list[str]:
    """Read all of a checkpoint and say what is wrong with it, with the file of each; nothing: good.

    Args:
        directory: the checkpoint's.
        progress: is told of bytes that were read, as many in the end as all files have; fewer where
            something is wrong.

    Blocking: reads every byte.
    """
    try:
        manifest = directory.read_manifest()
    except InvalidCheckpoint as error:
        return [error.message]
    problems: list[str] = []
    tables: dict[str, Table] = {}
    for saved_table in manifest.tables:
        try:
            tables[saved_table.name] = table_of(saved_table, directory.url)
        except InvalidCheckpoint as error:
            problems.append(error.message)
    headers: dict[str, PartHeader] = {}
    for file, saved in manifest.files.items():
        try:
            headers[file] = _header(directory, manifest, saved)
            problems += _damages(directory, file, headers[file], progress)
        except InvalidCheckpoint as error:
            problems.append(error.message)
    problems += (f"{directory.url}: {p}" for p in _twice(headers))
    if not problems:  # else blocks of the files that are wrong would be named as well
        found = _table_problems(manifest, tables, headers)
        problems += (f"{directory.url}: {problem}" for problem in found)
    return problems


def _header(
    directory: CheckpointDirectory, manifest: Manifest, saved: SavedPart | SavedWorker
) -> PartHeader:
    """The header of a file that is the one of this checkpoint."""
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


def _damages(
    directory: CheckpointDirectory,
    file: str,
    header: PartHeader,
    progress: Callable[[int], object],
) -> list[str]:
    """Tensors of a file that cannot be read, in the order in which they lie there."""
    problems = []
    where = f"{directory.url}/{file}"
    ordered = sorted(header.tensors.items(), key=lambda item: item[1].begin)
    progress(ordered[0][1].begin if ordered else header.byte_count)
    with directory.open(file) as opened:
        for name, stored in ordered:
            try:
                with reported(where, "read"):
                    read_tensor(opened, header, name)
            except InvalidCheckpoint as error:
                problems.append(error.message)
            progress(stored.byte_count)
    more = len(problems) - _SHOWN_PROBLEM_COUNT
    if more > 0:
        problems[_SHOWN_PROBLEM_COUNT:] = [f"{where}: {more} more of its tensors are damaged"]
    return problems


def _twice(headers: dict[str, PartHeader]) -> Iterator[str]:
    files: dict[tuple[str, int], str] = {}
    for file, header in headers.items():
        for table, block in header.blocks:
            other = files.setdefault((table, block), file)
            if other != file:
                yield f"block {block} of table '{table}' is in {other} and in {file}; expected one"


def _table_problems(
    manifest: Manifest, tables: dict[str, Table], headers: dict[str, PartHeader]
) -> Iterator[str]:
    """Blocks that are missing, of another length or of another type than their table's."""
    present = {
        place: (file, block)
        for file, header in headers.items()
        for place, block in header.blocks.items()
    }
    for saved in manifest.tables:
        table = tables[saved.name]
        dtype = "F64" if table.spec.dtype is DType.FLOAT64 else "F32"
        for number in range(saved.block_count):
            if (saved.name, number) not in present:
                yield f"block {number} of table '{saved.name}' is in no file"
                continue
            file, block = present[saved.name, number]
            if len(block.steps) not in (1, len(table.segments(number))):
                yield f"{file}: block {number} of '{saved.name}' has {len(block.steps)} steps"
            expected = (dtype, (table.block_length(number),))
            for tensor in block.tensors:
                name = tensor_name(saved.name, number, tensor)
                stored = headers[file].tensors[name]
                if (stored.dtype, stored.shape) != expected:
                    yield (
                        f"{file}: tensor '{name}' is {stored.dtype} of shape {stored.shape}; "
                        f"expected {expected[0]} of shape {expected[1]}"
                    )
