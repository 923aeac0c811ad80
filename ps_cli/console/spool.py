"""Rows on their way to a file: on disk, since their number comes before them there.

A safetensors file begins with the shapes of its tensors, and has all ids of a table before its
rows. So rows that come piece by piece lie in a file without a name meanwhile, beside the one that
is written: a piece is in memory at a time, and the disk has them twice.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy.typing as npt

from ps_cli.console.tensor_file import TensorEntry, Written, writing
from ps_core.rows import Ids
from ps_core.tables.elements import DType
from ps_core.tables.table import Table


class Spool:
    """Bytes on disk, beside the file of which they will be: that has all ids of a table before its
    rows, and each partition is read once. A context manager; its file has no name.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        with writing(out):
            self._file = tempfile.TemporaryFile(dir=out.parent)  # noqa: SIM115 - closed at its end

    def put(self, array: npt.NDArray[Any]) -> slice:
        """Add an array's bytes, and return where they are."""
        with writing(self._out):
            begin = self._file.tell()
            self._file.write(array.tobytes())
            return slice(begin, self._file.tell())

    def read(self, places: list[slice]) -> Iterator[bytes]:
        """Read what was put at some places, in their order."""
        for place in places:
            self._file.seek(place.start)
            yield self._file.read(place.stop - place.start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        with contextlib.suppress(OSError):  # of bytes that could not be written, which was reported
            self._file.close()


class SpooledRows:
    """The rows of a table, whose partitions come in any order; each is written in its own.

    Attributes:
        count: of its rows so far.
    """

    def __init__(self, table: Table, spool: Spool) -> None:
        self._table, self._spool = table, spool
        self._places: dict[int, list[tuple[slice, slice]]] = {}
        self._counts: dict[int, int] = {}

    def add(self, partition: int, ids: Ids, rows: npt.NDArray[Any]) -> None:
        """Add rows of a partition, behind those of it that have come."""
        place = self._spool.put(ids), self._spool.put(rows)
        self._places.setdefault(partition, []).append(place)
        self._counts[partition] = self._counts.get(partition, 0) + len(ids)

    def forget(self, partition: int) -> None:
        """Begin with a partition again."""
        self._places.pop(partition, None)
        self._counts.pop(partition, None)

    @property
    def count(self) -> int:
        return sum(self._counts.values())

    def written(self) -> Iterator[Written]:
        """NAME/ids, as signed numbers of the same bits, and NAME/rows: the tensors of a file."""
        spec = self._table.spec
        dtype = "F64" if spec.dtype is DType.FLOAT64 else "F32"
        places = [place for _, each in sorted(self._places.items()) for place in each]
        entry = TensorEntry(f"{spec.name}/ids", "I64", (self.count,))
        yield entry, self._spool.read([ids for ids, _ in places])
        entry = TensorEntry(f"{spec.name}/rows", dtype, (self.count, spec.element_count))
        yield entry, self._spool.read([rows for _, rows in places])
