"""A worker's part as a file, written and read by what writes and reads it in a cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from ps_runtime.checkpoint.part_file import StoredWorker, read_header, read_tensor
from ps_runtime.checkpoint.part_writer import WrittenPart, write_worker_part
from ps_worker.checkpoint.saved_states import decoded, encoded

CLUSTER = "3fa9c1d27b60a5e4"


class Found(NamedTuple):
    """What is in a part."""

    rank: int
    clock: int
    checkpoint: int
    cluster_id: str
    state: Any


def to_file(path: Path, state: Mapping[str, Any]) -> WrittenPart:
    """Write a part of checkpoint 12: of rank 2, at clock 41."""
    value, payloads = encoded(state)
    return write_worker_part(path, (12, CLUSTER), StoredWorker(2, 41, value), payloads)


def from_file(
    source: os.PathLike[str] | bytes, byte_count: int | None = None, digest: str | None = None
) -> Found:
    """Read a part back, as `a part`; as the manifest says, where that is known."""
    raw = source if isinstance(source, bytes) else Path(source).read_bytes()
    file = BytesIO(raw)
    header = read_header(file, "a part", byte_count, digest)
    state = decoded(header, lambda name: read_tensor(file, header, name))
    assert header.worker is not None
    rank, clock = header.worker.rank, header.worker.clock
    return Found(rank, clock, header.checkpoint, header.cluster_id, state)
