"""Small checkpoints for tests: two tables over two servers' parts, and a worker with a state.

With a base only the even blocks of the first table have changed since: the second server's part has
no tensor of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import json_format

from ps_core.change import TableCut
from ps_core.keys import NodeId, TableId
from ps_core.manifest import (
    Manifest,
    PartReport,
    ReportedTable,
    SavedPart,
    SavedTable,
    SavedWorker,
    place_in,
)
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec, TensorSpec
from ps_runtime.checkpoint.directory import CheckpointDirectory
from ps_runtime.checkpoint.part_file import StoredBlock, StoredWorker
from ps_runtime.checkpoint.part_writer import (
    PartWriter,
    PlannedTable,
    WorkerTensor,
    WrittenPart,
    write_worker_part,
)
from ps_runtime.checkpoint.reader import CheckpointReader
from ps_runtime.cluster.wire import spec_to_proto
from ps_runtime.system.disk import DISK, Disk
from scheduler.machine.checkpoint_state import Attempt

CLUSTER_ID = "3fa9c1d27b60a5e4"
BLOCK = 64
SLOTS = ("exp_avg", "exp_avg_sq")

WEIGHTS = TableSpec(
    name="model/0/float32",
    dtype=DType.FLOAT32,
    element_count=150,
    optimizer=OptimizerSpec(OptimizerKind.ADAM),
    block_elements=BLOCK,
    tensors=(
        TensorSpec("layer.weight", (10, 14), 0),
        TensorSpec("layer.empty", (0,), 140),
        TensorSpec("layer.bias", (10,), 140),
    ),
).validated()
COUNTERS = TableSpec(
    name="model/0/buffers/integer",
    dtype=DType.FLOAT64,
    element_count=3,
    optimizer=OptimizerSpec(OptimizerKind.ASSIGN),
    block_elements=BLOCK,
    tensors=(TensorSpec("norm.num_batches_tracked", (), 0), TensorSpec("seen", (2,), 1)),
).validated()
SPECS = (WEIGHTS, COUNTERS)

Array = npt.NDArray[Any]


def spec_json(spec: TableSpec) -> dict[str, Any]:
    """A spec as manifests have it."""
    return dict(json_format.MessageToDict(spec_to_proto(spec), preserving_proto_field_name=True))


def tensors_of(spec: TableSpec, number: int) -> dict[str, Array]:
    """Values and optimizer state of a table in checkpoint `number`: whole vectors."""
    element = np.float64 if spec.dtype is DType.FLOAT64 else np.float32
    values: Array = (np.arange(spec.element_count) + 1000 * number).astype(element)
    slots = SLOTS if spec.optimizer.kind is OptimizerKind.ADAM else ()
    return {"values": values} | {s: values / (i + 2) for i, s in enumerate(slots)}


def block_count(spec: TableSpec) -> int:
    return Table(TableId(0), 0, spec).block_count


@dataclass(frozen=True)
class Forgery:
    """What is wrong with a checkpoint that is written: its values are those of checkpoint
    `content`; what it says of the table of counters, which it refers to, is changed.
    """

    content: int = 0
    referred: Callable[[StoredBlock], StoredBlock] = lambda stored: stored


HONEST = Forgery()


def write_part(
    directory: CheckpointDirectory,
    file: str,
    number: int,
    disk: Disk = DISK,
    base: CheckpointReader | None = None,
    forged: Forgery = HONEST,
) -> SavedPart:
    """The part of the server that is named by the last digit of `file`."""
    server = int(file.removesuffix(".safetensors")[-1]) - 1
    path = directory.begin(file)
    planned = [PlannedTable(s.name, block_count(s), ("values", *SLOTS)) for s in SPECS]
    writer = PartWriter(path, planned, disk)
    counts: dict[str, int] = {}
    referred, elsewhere = 0, 0
    for spec in SPECS:
        vectors = tensors_of(spec, forged.content or number)
        dtype = "F64" if spec.dtype is DType.FLOAT64 else "F32"
        for block in range(block_count(spec)):
            if block % 2 != server:
                continue
            counts[spec.name] = counts.get(spec.name, 0) + 1
            if base is not None and (spec is COUNTERS or block % 2):
                stored = base.block(spec.name, block)
                place = stored.place or place_in(base.directory.name, file)
                said = replace(stored, place=place)
                writer.refer(spec.name, block, forged.referred(said) if spec is COUNTERS else said)
                referred += 1
                elsewhere += sum(
                    len(base.read(spec.name, block, tensor)) for tensor in stored.tensors
                )
                continue
            cut = slice(block * spec.block_elements, (block + 1) * spec.block_elements)
            for name, vector in vectors.items():
                writer.append(spec.name, block, name, vector[cut].tobytes(), dtype)
            writer.note_block(spec.name, block, version=41, steps=[41])
    written = writer.finish(number, CLUSTER_ID)
    directory.commit(file, path)
    return SavedPart(file, written.byte_count, written.header_sha256, counts, referred, elsewhere)


def write_worker(
    directory: CheckpointDirectory, number: int, disk: Disk = DISK, rank: int = 0
) -> SavedWorker:
    file = f"worker-{rank}-7.safetensors"
    path = directory.begin(file)
    state = {"generators": {"torch": {"tensor": "torch"}}}
    generator = np.arange(16, dtype=np.uint8) + number % 100
    tensors = {
        "torch": WorkerTensor("U8", (16,), generator.astype(np.uint8).tobytes()),
        "momentum": WorkerTensor("F32", (2, 3), np.ones(6, np.float32).tobytes()),
    }
    worker = StoredWorker(rank, 41, state)
    written = write_worker_part(path, (number, CLUSTER_ID), worker, tensors, disk)
    directory.commit(file, path)
    return SavedWorker(rank, 41, file, written.byte_count, written.header_sha256)


def tables_of(specs: Sequence[TableSpec]) -> tuple[SavedTable, ...]:
    return tuple(
        SavedTable(s.name, spec_json(s), str(s.consistency), 41, False, block_count(s))
        for s in specs
    )


def manifest_of(
    number: int, parts: tuple[SavedPart, ...], workers: tuple[SavedWorker, ...] = ()
) -> Manifest:
    return Manifest(
        number=number,
        created="2026-11-22T10:20:00Z",
        reason="every 100 steps",
        cluster_id=CLUSTER_ID,
        timeline=bytes(16),
        worker_count=2,
        tables=tables_of(SPECS),
        parts=parts,
        workers=workers,
    )


def write_checkpoint(
    directory: CheckpointDirectory,
    number: int,
    disk: Disk = DISK,
    base: str = "",
    forged: Forgery = HONEST,
) -> Manifest:
    """A whole checkpoint, as a cluster of two servers and two workers makes it; full without base,
    the name of another one under its root.
    """
    directory.create()
    with contextlib.ExitStack() as stack:
        earlier = None
        if base:
            earlier = stack.enter_context(CheckpointReader(directory.sibling(base)))
        parts = tuple(
            write_part(directory, f"server-{server}.safetensors", number, disk, earlier, forged)
            for server in (1, 2)
        )
        named = {block.place for block in _blocks(earlier) if block.place}
        bases = sorted({place.split("/")[0] for place in named} or ({base} if base else set()))
    workers = (write_worker(directory, number, disk), SavedWorker(1, 41, problem="it was killed"))
    manifest = replace(manifest_of(number, parts, workers), bases=tuple(bases))
    directory.write_manifest(manifest)
    return manifest


def attempt_at(directory: CheckpointDirectory, number: int) -> Attempt:
    """As the scheduler has it when all parts are written, and only its manifest is missing."""
    directory.create()
    tables = {
        TableId(n): Table(TableId(n), 0, spec, cut=TableCut(number, 41))
        for n, spec in enumerate(SPECS, 1)
    }
    ids = {table.spec.name: table_id for table_id, table in tables.items()}
    parts = {}
    for server in (1, 2):
        saved = write_part(directory, f"server-{server}.safetensors", number)
        counts = {ids[name]: ReportedTable(count, 41) for name, count in saved.tables.items()}
        parts[NodeId(server)] = PartReport(
            saved.file, saved.byte_count, saved.header_sha256, counts
        )
    attempt = Attempt(number, directory.url, "asked for", 0, 0.0, 0.0, cuts=tables)
    return replace(attempt, servers=frozenset(parts), parts=parts, is_cut=True, is_written=True)


def _blocks(base: CheckpointReader | None) -> list[StoredBlock]:
    """Those that are referred to again."""
    if base is None:
        return []
    return [base.block(COUNTERS.name, 0), base.block(WEIGHTS.name, 1)]


def saved(
    specs: Sequence[TableSpec], file: str, written: WrittenPart, counts: Mapping[str, int]
) -> Manifest:
    """The manifest of a checkpoint with one part."""
    part = SavedPart(file, written.byte_count, written.header_sha256, counts)
    return replace(manifest_of(1, (part,)), tables=tables_of(specs))
