"""Tables as one safetensors file that torch loads.

Rules:
    - Tensors are written as their blocks are read: at most one block is in memory.
    - Values are written in the table's own type. Servers keep those of float16 and bfloat16 tables
      in float32; they are rounded here as they are for a worker.
    - A table's tensors follow each other without gaps, in the order of their offsets, and so they
      do in the file. Tables of wide elements come first, so that all offsets are aligned.
    - An integer buffer is written as float64, as its table holds it: its own type is not known.
      Ids of rows that were imported are known by their names, and written as int64.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ps_core.errors import InvalidConfig
from ps_core.tables.elements import DType
from ps_core.tables.table import Table
from ps_runtime.checkpoint.part_file import ELEMENT_BYTES, LENGTH_BYTES

_NO_NOTES: Mapping[str, str] = MappingProxyType({})
_STORED = {DType.FLOAT32: "F32", DType.FLOAT16: "F16", DType.BFLOAT16: "BF16", DType.FLOAT64: "F64"}


class Apart(NamedTuple):
    """Names of tensors that are not written as their tables say."""

    left_out: Collection[str] = ()
    ids: Collection[str] = ()  # int64, whose bits a table of float64 holds


_NOTHING_APART = Apart()

ReadBlock = Callable[[Table, int], bytes | bytearray]
"""The values of a block in the table's arithmetic, without padding."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in the header of a file; `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]


Written = tuple[TensorEntry, Iterable[bytes | bytearray]]
"""A tensor and its bytes, in pieces."""


def write_tables(
    out: Path,
    tables: Iterable[Table],
    read: ReadBlock,
    beside: Sequence[Written] = (),
    apart: Apart = _NOTHING_APART,
    notes: Mapping[str, str] = _NO_NOTES,
) -> int:
    """Write the tensors of tables, and those `beside` them, and return their number.

    Tensors of the tables that are left out are not written, and blocks of which nothing is written
    are not read. `notes` are as those of `write_file`.

    Raises:
        InvalidConfig: two tables have a tensor of the same name, or the file cannot be written.
    """
    ordered = wide_first(tables)
    entries: list[TensorEntry] = []
    owners = {entry.name: f"{entry.name.rpartition('/')[0]} (rows)" for entry, _ in beside}
    for table in ordered:
        dtype, name = _STORED[table.spec.dtype], table.title
        for tensor in table.spec.tensors:
            other = owners.setdefault(tensor.name, name)
            if other != name:
                raise InvalidConfig(
                    f"tensor '{tensor.name}' is in table '{other}' and in '{name}'; expected one: "
                    "choose the tables of one model"
                )
            if tensor.name not in apart.left_out:
                own = "I64" if tensor.name in apart.ids else dtype
                entries.append(TensorEntry(tensor.name, own, tensor.shape))
    pieces: dict[int, list[Iterable[bytes | bytearray]]] = {}  # by the bytes of an element
    for table in ordered:
        width = ELEMENT_BYTES[_STORED[table.spec.dtype]]
        pieces.setdefault(width, []).append(_values(table, read, apart.left_out))
    for entry, values in beside:
        entries.append(entry)
        pieces.setdefault(ELEMENT_BYTES[entry.dtype], []).append(values)
    entries.sort(key=lambda entry: -ELEMENT_BYTES[entry.dtype])
    by_width = (pieces[width] for width in sorted(pieces, reverse=True))
    chained = itertools.chain.from_iterable(itertools.chain.from_iterable(by_width))
    write_file(out, entries, chained, notes)
    return len(entries)


def wide_first(tables: Iterable[Table]) -> list[Table]:
    return sorted(tables, key=lambda table: -ELEMENT_BYTES[_STORED[table.spec.dtype]])


def _values(
    table: Table, read: ReadBlock, left_out: Collection[str]
) -> Iterator[bytes | bytearray]:
    """The bytes of a table in its own type, a block at a time, without those of some tensors."""
    width, tensors = ELEMENT_BYTES[_STORED[table.spec.dtype]], table.spec.tensors
    for block in range(table.block_count):
        segments = table.segments(block)
        chosen = [each for each in segments if tensors[each.tensor].name not in left_out]
        if not chosen:
            continue
        taken = _in_own_type(table, read(table, block))
        if len(chosen) == len(segments):
            yield taken
            continue
        for each in chosen:
            yield taken[each.begin * width : each.end * width]


def _in_own_type(table: Table, taken: bytes | bytearray) -> bytes | bytearray:
    """A block's values, rounded to the table's type."""
    if table.spec.dtype in (DType.FLOAT32, DType.FLOAT64):
        return taken
    # Imported here, because other commands start without torch; numpy has no bfloat16.
    import torch

    half = torch.float16 if table.spec.dtype is DType.FLOAT16 else torch.bfloat16
    rounded = torch.frombuffer(bytearray(taken), dtype=torch.float32).to(half)
    return rounded.view(torch.int16).numpy().tobytes()


def write_file(
    out: Path,
    entries: Sequence[TensorEntry],
    pieces: Iterable[bytes | bytearray],
    notes: Mapping[str, str] = _NO_NOTES,
) -> None:
    """Write a safetensors file of `entries`, whose bytes are `pieces` in the same order; `notes`
    are its metadata.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **notes}}
    end = 0
    for entry in entries:
        begin = end
        end += int(np.prod(entry.shape, dtype=np.int64)) * ELEMENT_BYTES[entry.dtype]
        offsets = [begin, end]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    with replaced(out) as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for piece in pieces:
            file.write(piece)


@contextlib.contextmanager
def replaced(out: Path) -> Iterator[BinaryIO]:
    """Write a file that takes its name when it is complete, and synced; a device or a pipe is
    written as it is.

    Raises:
        InvalidConfig: the file cannot be written, or another process writes it at this moment.
    """
    path, is_regular = _target(out)
    if not is_regular:
        with writing(out), path.open("wb") as file:
            yield file
        return
    with writing(out), _unfinished(path, out) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
        _unfinished_path(path).replace(path)


def check_writable(out: Path) -> None:
    """Raise InvalidConfig if `replaced` cannot write this file; an earlier one stays as it is."""
    path, is_regular = _target(out)
    with writing(out):
        if path.is_dir():
            path.open("wb")  # raises the error
        if is_regular:
            with _unfinished(path, out):
                pass


@contextlib.contextmanager
def _unfinished(path: Path, out: Path) -> Iterator[BinaryIO]:
    """An empty file that is to be `path`, in no other process's hands; it is removed at the end,
    unless it has taken another name. What one that was killed has left is used again.
    """
    name = _unfinished_path(path)
    with _locked(name, out) as file:
        try:
            file.truncate()
            yield file
        finally:
            with contextlib.suppress(OSError):
                if _is_named(file, name):  # else another process may have begun its own
                    name.unlink()


def _unfinished_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _locked(name: Path, out: Path) -> BinaryIO:
    """Open the file of that name, made if it is missing, with its lock."""
    while True:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        file = os.fdopen(descriptor, "wb")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise InvalidConfig(f"{out} is being written by another process") from None
        except OSError:  # some network filesystems have no such locks
            return file
        if _is_named(file, name):
            return file
        file.close()  # another process has just given it its name


def _is_named(file: BinaryIO, name: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), name.stat())
    except FileNotFoundError:
        return False


def _target(out: Path) -> tuple[Path, bool]:
    """The file itself, where `out` is a link to it; False if it is a device, a pipe, ..."""
    with writing(out):
        path = out.resolve()
        return path, path.is_file() or not path.exists()


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn an OSError into InvalidConfig, with the file that cannot be written."""
    try:
        yield
    except OSError as error:
        raise InvalidConfig(f"{out} cannot be written: {error.strerror or error}") from error
