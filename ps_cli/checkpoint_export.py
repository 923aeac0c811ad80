"""`pushpull checkpoint export`: a checkpoint's model as one file that torch loads.

Rules:
    - Tensors are written as their blocks are read: no more than a block is in memory.
    - Values are written in the table's own type; float16 and bfloat16 tables are kept in float32,
      and are rounded as they are for a worker.
    - Tables whose tensors follow each other without gap are one run of bytes, in the order of their
      offsets; so is their run in the file.

What it deliberately does not do: know the type of an integer buffer: its table holds float64.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ps_cli.checkpoint import opened
from ps_cli.output import Output
from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.tables import DType, OptimizerKind, Segment, Table
from ps_runtime.checkpoint_reader import CheckpointReader
from ps_runtime.part_file import ELEMENT_BYTES, LENGTH_BYTES, VALUES

STATE_FORMAT = "pushpull-optimizer-state"
STATE_VERSION = 1

_STORED = {DType.FLOAT32: "F32", DType.FLOAT16: "F16", DType.BFLOAT16: "BF16", DType.FLOAT64: "F64"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file that is written: its name, its type and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def export(url: str, out: Path, prefix: str, optimizer: Path | None, output: Output) -> int:
    """Write the tables of a checkpoint as tensors, and on demand their optimizers' state.

    Raises:
        InvalidCheckpoint: it is bad, or has no such table.
        InvalidConfig: two tensors would have one name, or the file cannot be written.
    """
    with opened(url, output) as reader:
        tables = _chosen(reader, prefix, output)
        entries = [_entries(table) for table in tables]
        _check_names((e.name, t.spec.name) for t, e in _paired(tables, entries))
        pieces = itertools.chain.from_iterable(_values(reader, table) for table in tables)
        _write(out, [entry for found in entries for entry in found], pieces)
        count = sum(map(len, entries))
        output.say(f"{out}: {count} tensors of {reader.directory.url}")
        if optimizer is not None:
            _export_state(reader, tables, optimizer, output)
    return 0


def _chosen(reader: CheckpointReader, prefix: str, output: Output) -> list[Table]:
    """The tables that have parameters or buffers, wide elements first."""
    inside = f"{prefix.rstrip('/')}/"
    found = []
    for name, table in reader.tables.items():
        if prefix and name != prefix and not name.startswith(inside):
            continue
        if table.spec.optimizer.kind is OptimizerKind.AGGREGATE:
            output.say(f"{name}: left out, it holds sums of gradients and no parameters")
            continue
        found.append(table)
    if not found:
        names = ", ".join(reader.tables) or "none"
        raise InvalidCheckpoint(
            f"{reader.directory.url} has no table to export whose name begins with '{prefix}'; its "
            f"tables: {names}"
        )
    return sorted(found, key=lambda table: -ELEMENT_BYTES[_STORED[table.spec.dtype]])


def _entries(table: Table) -> list[Entry]:
    dtype = _STORED[table.spec.dtype]
    return [Entry(tensor.name, dtype, tensor.shape) for tensor in table.spec.tensors]


def _paired(
    tables: Sequence[Table], entries: Sequence[Sequence[Entry]]
) -> Iterator[tuple[Table, Entry]]:
    for table, found in zip(tables, entries, strict=True):
        for entry in found:
            yield table, entry


def _check_names(named: Iterable[tuple[str, str]]) -> None:
    tables: dict[str, str] = {}
    for name, table in named:
        other = tables.setdefault(name, table)
        if other != table:
            raise InvalidConfig(
                f"tensor '{name}' is in table '{other}' and in '{table}'; expected one: choose the "
                "tables of one model with --prefix"
            )


def _values(reader: CheckpointReader, table: Table) -> Iterator[bytes | bytearray]:
    """The bytes of a table in its own type, a block at a time."""
    for block in range(table.block_count):
        taken = reader.read(table.spec.name, block)
        if table.spec.dtype in (DType.FLOAT32, DType.FLOAT64):
            yield taken
            continue
        # Here: numpy has no bfloat16, and other commands start without torch.
        import torch

        half = torch.float16 if table.spec.dtype is DType.FLOAT16 else torch.bfloat16
        rounded = torch.frombuffer(taken, dtype=torch.float32).to(half)
        yield rounded.view(torch.int16).numpy().tobytes()


# --- the optimizers' state


def _export_state(
    reader: CheckpointReader, tables: Sequence[Table], out: Path, output: Output
) -> None:
    """The optimizers' state: its tensors, and beside them a JSON file that explains them."""
    entries: list[Entry] = []
    states: dict[str, Any] = {}
    pieces: list[Iterator[bytes]] = []
    for table in sorted(tables, key=lambda table: table.spec.dtype is not DType.FLOAT64):
        for slot in _slots(reader, table):
            source = _Slot(reader, table, slot)
            for index, tensor in enumerate(table.spec.tensors):
                found = source.presence(index)
                if found is None:
                    output.say(f"{tensor.name}: {slot} left out, some of its blocks have none yet")
                if not found:
                    continue
                states.setdefault(tensor.name, {"slots": []})["slots"].append(slot)
                dtype = "F64" if table.spec.dtype is DType.FLOAT64 else "F32"
                entries.append(Entry(f"{tensor.name}/{slot}", dtype, tensor.shape))
                pieces.append(source.elements(index))
        for name, steps in _steps(reader, table).items():
            states.setdefault(name, {"slots": []})["step"] = max(steps)
            if len(set(steps)) > 1:
                states[name]["steps"] = steps
    _write(out, entries, itertools.chain.from_iterable(pieces))
    document = {
        "format": STATE_FORMAT,
        "version": STATE_VERSION,
        "checkpoint": reader.directory.url,
        "groups": [_group(reader, table) for table in tables],
        "state": states,
    }
    beside = out.with_suffix(".json")
    with _replaced(beside) as file:
        file.write((json.dumps(document, indent=1) + "\n").encode())
    output.say(f"{out} and {beside}: the optimizers' state of {len(states)} tensors")


def _group(reader: CheckpointReader, table: Table) -> dict[str, Any]:
    optimizer = table.spec.optimizer
    flags = ("nesterov", "amsgrad", "centered", "maximize")
    return {
        "table": table.spec.name,
        "optimizer": optimizer.label,
        "clock": reader.manifest.table(table.spec.name).clock,
        "hyperparameters": dict(optimizer.hyperparameters),
        **{flag: True for flag in flags if getattr(optimizer, flag)},
        "tensors": [tensor.name for tensor in table.spec.tensors],
    }


def _slots(reader: CheckpointReader, table: Table) -> list[str]:
    name = table.spec.name
    stored = (reader.block(name, block).tensors for block in range(table.block_count))
    return sorted({tensor for tensors in stored for tensor in tensors} - {VALUES})


def _steps(reader: CheckpointReader, table: Table) -> dict[str, list[int]]:
    """By a tensor's name, its step numbers in each of the blocks that it is in."""
    found: dict[str, list[int]] = {}
    for block in range(table.block_count):
        segments = table.segments(block)
        steps = reader.block(table.spec.name, block).steps
        each = steps if len(steps) == len(segments) else steps * len(segments)
        for segment, step in zip(segments, each, strict=True):
            found.setdefault(table.spec.tensors[segment.tensor].name, []).append(step)
    return found


class _Slot:
    """One kind of optimizer state of a table; blocks that took no step yet have none."""

    def __init__(self, reader: CheckpointReader, table: Table, slot: str) -> None:
        self._reader, self._table, self._slot = reader, table, slot
        self._segments: dict[int, list[tuple[int, Segment]]] = {}
        self._last: tuple[int, bytes] = (-1, b"")
        for block in range(table.block_count):
            for segment in table.segments(block):
                self._segments.setdefault(segment.tensor, []).append((block, segment))

    def presence(self, tensor: int) -> bool | None:
        """Whether a tensor has it; None: in part, and what the rest starts with is not known."""
        blocks = [block for block, _ in self._segments.get(tensor, ())]
        there = [self._stored(block) for block in blocks]
        if any(there) and not all(there):
            is_known = self._table.spec.optimizer.kind is not OptimizerKind.CUSTOM
            return True if is_known else None
        return any(there)

    def elements(self, tensor: int) -> Iterator[bytes]:
        """The bytes of a tensor's state, a segment at a time."""
        width = 8 if self._table.spec.dtype is DType.FLOAT64 else 4
        for block, segment in self._segments[tensor]:
            yield self._block(block)[segment.begin * width : segment.end * width]

    def _stored(self, block: int) -> bool:
        return self._reader.tensor(self._table.spec.name, block, self._slot) is not None

    def _block(self, block: int) -> bytes:
        if self._last[0] != block:
            if self._stored(block):
                taken = self._reader.read(self._table.spec.name, block, self._slot)
                self._last = block, bytes(taken)
            else:
                element = "<f8" if self._table.spec.dtype is DType.FLOAT64 else "<f4"
                start = np.full(self._table.block_length(block), self._start(), element)
                self._last = block, start.tobytes()
        return self._last[1]

    def _start(self) -> float:
        """What torch's optimizers begin with."""
        numbers = dict(self._table.spec.optimizer.hyperparameters)
        return numbers.get("initial_accumulator_value", 0.0) if self._slot == "sum" else 0.0


# --- the file


def _write(out: Path, entries: Sequence[Entry], pieces: Iterable[bytes | bytearray]) -> None:
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
    with _replaced(out) as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for piece in pieces:
            file.write(piece)


@contextlib.contextmanager
def _replaced(out: Path) -> Iterator[BinaryIO]:
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
