"""The blocks of a table that is restored, wherever its checkpoint has their values.

Rules:
    - A checkpoint of a cluster has the table's own blocks, with their state, version and steps.
    - One that was imported has tensors in blocks of its own: a block of the table is put together
      from them. It has taken no step, and its optimizer has no state.
    - Whatever is read has been checked against its checksum.

Invariants:
    RB-1  Of what was imported nothing but values is read.

What it deliberately does not do: compare the table with the checkpoint (the scheduler has).
"""

from __future__ import annotations

from typing import Protocol

from ps_core.errors import check
from ps_core.manifest import Imported
from ps_core.tables import Table
from ps_runtime.checkpoint.part_file import VALUES, StoredBlock
from ps_runtime.checkpoint.reader import CheckpointReader


class RestoredBlocks(Protocol):
    """What there is of a table, for one thread at a time."""

    def stored(self, block: int) -> StoredBlock:
        """What a block has beside its bytes.

        Raises:
            InvalidCheckpoint, InvalidKeys: there is no such block.
        """
        ...

    def read_into(self, block: int, tensor: str, target: memoryview) -> None:
        """One tensor of a block, into memory that is there.

        Shapes:
            target: writable bytes ("B"), C-contiguous, as long as the tensor.

        Blocking: reads it.

        Raises:
            InvalidCheckpoint: it is damaged, or of another length.
        """
        ...


class RestoredTables:
    """What a checkpoint has for the tables of a cluster.

    Args:
        reader: the checkpoint, open.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._found: dict[str, RestoredBlocks] = {}

    def blocks_of(self, table: Table) -> RestoredBlocks:
        """The blocks of a table that is restored from it.

        Raises:
            InvalidCheckpoint: it has no such tensors.
        """
        name, reader = table.spec.name, self._reader
        if name not in self._found:
            is_imported = reader.manifest.is_imported
            found = _Imported(reader, table) if is_imported else _Saved(reader, table)
            self._found[name] = found
        return self._found[name]


class _Saved:
    def __init__(self, reader: CheckpointReader, table: Table) -> None:
        self._reader, self._name = reader, table.spec.name

    def stored(self, block: int) -> StoredBlock:
        return self._reader.block(self._name, block)

    def read_into(self, block: int, tensor: str, target: memoryview) -> None:
        self._reader.read_block_into(self._name, block, tensor, target)


class _Imported:
    def __init__(self, reader: CheckpointReader, table: Table) -> None:
        self._reader, self._table = reader, table
        specs = [each.spec for each in reader.tables.values()]
        self._places = Imported.of(reader.directory.url, specs).places(table.spec)
        self._last: tuple[str, int, bytearray] = ("", -1, bytearray())

    def stored(self, block: int) -> StoredBlock:
        self._table.block_length(block)  # refuses what there is not
        return StoredBlock(version=0, steps=(0,), crc32s={VALUES: 0})

    def read_into(self, block: int, tensor: str, target: memoryview) -> None:
        spec = self._table.spec
        check(tensor == VALUES, "RB-1", f"'{tensor}' of a block of '{spec.name}'")
        width = spec.accumulator_element_bytes
        for segment in self._table.segments(block):
            placed = spec.tensors[segment.tensor]
            name, begin = self._places[placed.name]
            begin += block * spec.block_elements + segment.begin - placed.offset
            self._copy(name, begin * width, target[segment.begin * width : segment.end * width])

    def _copy(self, name: str, begin: int, target: memoryview) -> None:
        """Bytes of a table of the checkpoint, from `begin` on, as many as `target` has."""
        table = self._reader.tables[name]
        block_bytes = table.spec.block_elements * table.spec.accumulator_element_bytes
        filled = 0
        while filled < target.nbytes:
            block, first = divmod(begin + filled, block_bytes)
            piece = memoryview(self._block(name, block))[first:][: target.nbytes - filled]
            target[filled : filled + piece.nbytes] = piece
            filled += piece.nbytes

    def _block(self, name: str, block: int) -> bytearray:
        """The last one is kept: small tensors follow each other."""
        if self._last[:2] != (name, block):
            self._last = name, block, self._reader.read(name, block)
        return self._last[2]
