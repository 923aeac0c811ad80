"""`pushpull checkpoint export`: a checkpoint's model as a file that torch loads, rows of embedding
tables included, and on demand its optimizers' state as another.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ps_cli.checkpoint.commands import opened
from ps_cli.checkpoint.workers_half import workers_halves
from ps_cli.console.output import Output
from ps_cli.console.tensor_file import (
    Apart,
    TensorEntry,
    Written,
    replaced,
    wide_first,
    write_file,
    write_tables,
)
from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.manifest import has_ids
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import DELAY_MEAN_SQUARE, OptimizerKind
from ps_core.tables.table import Table, TensorSegment
from ps_runtime.checkpoint.part_file import ELEMENT_BYTES, IDS, VALUES
from ps_runtime.checkpoint.reader import CheckpointReader

_NO_SLOTS = {VALUES, DELAY_MEAN_SQUARE}
"""Tensors of a block that are no state of an optimizer."""

STATE_FORMAT = "pushpull-optimizer-state"
STATE_VERSION = 1


def export(url: str, out: Path, prefix: str, optimizer: Path | None, output: Output) -> int:
    """Write the tables of a checkpoint as tensors, and their optimizers' state to `optimizer`.

    Raises:
        InvalidConfig: one file would be written over another; nothing is written.
    """
    if optimizer is not None:
        _check_apart(out, optimizer, _beside(optimizer))
    with opened(url, output) as reader:
        halves = workers_halves(reader, prefix)
        chosen = chosen_tables(reader, prefix, output, may_be_none=bool(halves))
        dense = [table for table in chosen if table.spec.rows is None]
        of_rows = [table for table in chosen if table.spec.rows is not None]
        rows = [each for table in of_rows for each in _rows(reader, table)]
        kept = [(entry, [value]) for entry, value in halves.values()]
        apart = Apart(ids=_imported_ids(reader))
        count = write_tables(out, dense, partial(_block, reader), [*rows, *kept], apart)
        output.say(f"{out}: {count} tensors of {reader.directory.url}")
        if optimizer is not None:
            _export_state(reader, chosen, optimizer, output)
    return 0


def _check_apart(*files: Path) -> None:
    """Raise InvalidConfig if two of the files are one."""
    for index, file in enumerate(files):
        if file.resolve() in (other.resolve() for other in files[:index]):
            model, state, beside = files
            raise InvalidConfig(
                f"{file} would be written twice: the parameters go to {model}, the optimizers' "
                f"state to {state}, and its description to {beside}; expected three files, such as "
                f"--optimizer {model.with_name('optimizer.safetensors')}"
            )


def _beside(state: Path) -> Path:
    """The file that describes the optimizers' state in another."""
    return state.with_suffix(".json")


def _block(reader: CheckpointReader, table: Table, block: int) -> bytearray:
    return reader.read(table.spec.name, block)


def _imported_ids(reader: CheckpointReader) -> set[str]:
    """The tensors of a checkpoint that have ids of rows as numbers of another type."""
    if not reader.manifest.is_imported:
        return set()
    names = {tensor.name for table in reader.tables.values() for tensor in table.spec.tensors}
    return {name for name in names if has_ids(name, names)}


def _rows(reader: CheckpointReader, table: Table) -> Iterator[Written]:
    """The ids of a table of rows, as signed numbers of the same bits, and the rows in their order;
    a partition of it is in memory at a time.
    """
    name, count = table.spec.name, _row_count(reader, table)
    dtype = "F64" if table.spec.dtype is DType.FLOAT64 else "F32"
    yield TensorEntry(f"{name}/ids", "I64", (count,)), _partitions(reader, table, IDS)
    shape = count, table.spec.element_count
    yield TensorEntry(f"{name}/rows", dtype, shape), _partitions(reader, table, VALUES)


def _row_count(reader: CheckpointReader, table: Table) -> int:
    return sum(_byte_counts(reader, table, IDS)) // ELEMENT_BYTES["I64"]


def _byte_counts(reader: CheckpointReader, table: Table, tensor: str) -> Iterator[int]:
    """The bytes of a tensor in each partition."""
    for partition in range(table.block_count):
        stored = reader.tensor(table.spec.name, partition, tensor)
        yield 0 if stored is None else stored.byte_count


def _partitions(reader: CheckpointReader, table: Table, tensor: str) -> Iterator[bytearray]:
    for partition in range(table.block_count):
        yield reader.read(table.spec.name, partition, tensor)


def chosen_tables(
    reader: CheckpointReader, prefix: str, output: Output, *, may_be_none: bool = False
) -> list[Table]:
    """The tables to export, wide elements first; prints which are left out."""
    found = tables_with(reader, prefix)
    for table in found:
        if not has_parameters(table):
            name = table.spec.name
            output.say(f"{name}: left out, it holds sums of gradients and no parameters")
    chosen = wide_first(filter(has_parameters, found))
    if not chosen and not may_be_none:
        names = ", ".join(reader.tables) or "none"
        raise InvalidCheckpoint(
            f"{reader.directory.url} has no table to export whose name begins with '{prefix}'; its "
            f"tables: {names}"
        )
    return chosen


def tables_with(reader: CheckpointReader, prefix: str) -> list[Table]:
    """The tables of one model, or all without a prefix."""
    inside = f"{prefix.rstrip('/')}/"
    return [
        table
        for name, table in reader.tables.items()
        if not prefix or name == prefix or name.startswith(inside)
    ]


def has_parameters(table: Table) -> bool:
    """True if a table has parameters or buffers."""
    return table.spec.optimizer.kind is not OptimizerKind.AGGREGATE


# --- the optimizers' state


def _export_state(
    reader: CheckpointReader, tables: Sequence[Table], out: Path, output: Output
) -> None:
    """Write the state's tensors, and beside them a JSON file that describes them."""
    entries: list[TensorEntry] = []
    states: dict[str, Any] = {}
    pieces: list[Iterator[bytes | bytearray]] = []
    for table in sorted(tables, key=lambda table: table.spec.dtype is not DType.FLOAT64):
        if table.spec.rows is not None:
            for entry, own in _row_state(reader, table):
                name, _, slot = entry.name.rpartition("/")
                states.setdefault(name, {"slots": []})["slots"].append(slot)
                entries.append(entry)
                pieces.append(own)
            continue
        blocks = (reader.block(table.spec.name, each) for each in range(table.block_count))
        for slot in sorted({slot for block in blocks for slot in block.tensors} - _NO_SLOTS):
            source = _Slot(reader, table, slot)
            for index, tensor in enumerate(table.spec.tensors):
                found = source.presence(index)
                if found is None:
                    output.say(f"{tensor.name}: {slot} left out, some of its blocks have none yet")
                if not found:
                    continue
                states.setdefault(tensor.name, {"slots": []})["slots"].append(slot)
                dtype = "F64" if table.spec.dtype is DType.FLOAT64 else "F32"
                entries.append(TensorEntry(f"{tensor.name}/{slot}", dtype, tensor.shape))
                pieces.append(source.elements(index))
        for name, steps in _steps(reader, table).items():
            states.setdefault(name, {"slots": []})["step"] = max(steps)
            if len(set(steps)) > 1:
                states[name]["steps"] = steps
    write_file(out, entries, itertools.chain.from_iterable(pieces))
    document = {
        "format": STATE_FORMAT,
        "version": STATE_VERSION,
        "checkpoint": reader.directory.url,
        "groups": [_group(reader, table) for table in tables],
        "state": states,
    }
    beside = _beside(out)
    with replaced(beside) as file:
        file.write((json.dumps(document, indent=1) + "\n").encode())
    output.say(f"{out} and {beside}: the optimizers' state of {len(states)} tensors")


def _row_state(
    reader: CheckpointReader, table: Table
) -> Iterator[tuple[TensorEntry, Iterator[bytearray]]]:
    """The state of rows, in their order; each row has its own step count under Adam. What decides
    about eviction is no optimizer's.
    """
    name, count = table.spec.name, _row_count(reader, table)
    dtype = "F64" if table.spec.dtype is DType.FLOAT64 else "F32"
    for slot in sorted(set(reader.block(name, 0).tensors) - {VALUES, IDS}):
        if (stored := reader.tensor(name, 0, slot)) is None or stored.dtype != dtype:
            continue
        width = sum(_byte_counts(reader, table, slot)) // max(1, count) // ELEMENT_BYTES[dtype]
        entry = TensorEntry(f"{name}/rows/{slot}", dtype, (count, width))
        yield entry, _partitions(reader, table, slot)


def _group(reader: CheckpointReader, table: Table) -> dict[str, Any]:
    optimizer = table.spec.optimizer
    flags = ("nesterov", "amsgrad", "centered", "maximize")
    return {
        "table": table.spec.name,
        "optimizer": optimizer.label,
        "clock": reader.manifest.table(table.spec.name).clock,
        "hyperparameters": dict(optimizer.hyperparameters),
        **{flag: True for flag in flags if getattr(optimizer, flag)},
        "tensors": [f"{table.spec.name}/rows"]
        if table.spec.rows is not None
        else [tensor.name for tensor in table.spec.tensors],
    }


def _steps(reader: CheckpointReader, table: Table) -> dict[str, list[int]]:
    """The step counts of each tensor, by name: one for each of its blocks."""
    found: dict[str, list[int]] = {}
    for block in range(table.block_count):
        segments = table.segments(block)
        steps = reader.block(table.spec.name, block).steps
        each = steps if len(steps) == len(segments) else steps * len(segments)
        for segment, step in zip(segments, each, strict=True):
            found.setdefault(table.spec.tensors[segment.tensor].name, []).append(step)
    return found


class _Slot:
    """One slot of a table's optimizer state; blocks that took no step yet have none."""

    def __init__(self, reader: CheckpointReader, table: Table, slot: str) -> None:
        self._reader, self._table, self._slot = reader, table, slot
        self._segments: dict[int, list[tuple[int, TensorSegment]]] = {}
        self._last: tuple[int, bytes] = (-1, b"")
        for block in range(table.block_count):
            for segment in table.segments(block):
                self._segments.setdefault(segment.tensor, []).append((block, segment))

    def presence(self, tensor: int) -> bool | None:
        """True if a tensor has the slot; None: some of its blocks have none, and the value with
        which those start is not known.
        """
        blocks = [block for block, _ in self._segments.get(tensor, ())]
        there = [self._stored(block) for block in blocks]
        is_custom = self._table.spec.optimizer.kind is OptimizerKind.CUSTOM
        return None if is_custom and any(there) and not all(there) else any(there)

    def elements(self, tensor: int) -> Iterator[bytes]:
        width = 8 if self._table.spec.dtype is DType.FLOAT64 else 4
        for block, segment in self._segments[tensor]:
            yield self._block(block)[segment.begin * width : segment.end * width]

    def _stored(self, block: int) -> bool:
        return self._reader.tensor(self._table.spec.name, block, self._slot) is not None

    def _block(self, block: int) -> bytes:
        spec = self._table.spec
        if self._last[0] == block:
            return self._last[1]
        if self._stored(block):
            taken = bytes(self._reader.read(spec.name, block, self._slot))
        else:  # the slot's first value in torch's optimizers
            first = dict(spec.optimizer.hyperparameters).get("initial_accumulator_value", 0.0)
            element = "<f8" if spec.dtype is DType.FLOAT64 else "<f4"
            length = self._table.block_length(block)
            taken = np.full(length, first if self._slot == "sum" else 0.0, element).tobytes()
        self._last = block, taken
        return taken
