"""Tables as one safetensors file that torch loads.

Rules:
    - Tensors are written as their blocks are read: no more than a block is in memory.
    - Values are written in the table's own type; float16 and bfloat16 tables are kept in float32,
      and are rounded as they are for a worker.
    - Tables whose tensors follow each other without gap are one run of bytes, in the order of their
      offsets; so is their run in the file. Those of wide elements come first.

What it deliberately does not do: know the type of an integer buffer: its table holds float64.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ps_core.errors import InvalidConfig
from ps_core.tables import DType, Table
from ps_runtime.checkpoint.part_file import ELEMENT_BYTES, LENGTH_BYTES

_STORED = {DType.FLOAT32: "F32", DType.FLOAT16: "F16", DType.BFLOAT16: "BF16", DType.FLOAT64: "F64"}

Read = Callable[[Table, int], bytes | bytearray]
"""The values of a block in the table's arithmetic, without padding."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file that is written: its name, its type and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def write_tables(out: Path, tables: Iterable[Table], read: Read) -> int:
    """Write the tensors of tables; how many there are.

    Raises:
        InvalidConfig: two tensors would have one name, or the file cannot be written.
    """
    ordered = wide_first(tables)
    entries: list[Entry] = []
    owners: dict[str, str] = {}
    for table in ordered:
        dtype, name = _STORED[table.spec.dtype], table.title
        for tensor in table.spec.tensors:
            other = owners.setdefault(tensor.name, name)
            if other != name:
                raise InvalidConfig(
                    f"tensor '{tensor.name}' is in table '{other}' and in '{name}'; expected one: "
                    "choose the tables of one model"
                )
            entries.append(Entry(tensor.name, dtype, tensor.shape))
    write_file(out, entries, (piece for table in ordered for piece in _values(table, read)))
    return len(entries)


def wide_first(tables: Iterable[Table]) -> list[Table]:
    """The tables of the widest elements first."""
    return sorted(tables, key=lambda table: -ELEMENT_BYTES[_STORED[table.spec.dtype]])


def _values(table: Table, read: Read) -> Iterator[bytes | bytearray]:
    """The bytes of a table in its own type, a block at a time."""
    for block in range(table.block_count):
        taken = read(table, block)
        if table.spec.dtype in (DType.FLOAT32, DType.FLOAT64):
            yield taken
            continue
        # Here: numpy has no bfloat16, and other commands start without torch.
        import torch

        half = torch.float16 if table.spec.dtype is DType.FLOAT16 else torch.bfloat16
        rounded = torch.frombuffer(bytearray(taken), dtype=torch.float32).to(half)
        yield rounded.view(torch.int16).numpy().tobytes()


def write_file(out: Path, entries: Sequence[Entry], pieces: Iterable[bytes | bytearray]) -> None:
    """A safetensors file of `entries`, whose bytes are `pieces` in the same order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        begin = end
        end += int(np.prod(entry.shape, dtype=np.int64)) * ELEMENT_BYTES[entry.dtype]
        described = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
        header[entry.name] = described
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    with replaced(out) as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for piece in pieces:
            file.write(piece)


@contextlib.contextmanager
def replaced(out: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when it is whole.

    Raises:
        InvalidConfig: it cannot be written.
    """
    unfinished = out.with_name(f".{out.name}.tmp")
    try:
        with unfinished.open("wb") as file:
            yield file
        unfinished.replace(out)
    except OSError as error:
        raise InvalidConfig(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
