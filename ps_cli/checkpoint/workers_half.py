"""The parameters of a hybrid model that its workers keep, for `pushpull checkpoint export`.

A checkpoint has them in the workers' parts (`ps_worker.training.hybrid.workers_half`): whole in
each, or FSDP2's shards, which in the order of ranks are the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ps_cli.console.tensor_file import TensorEntry
from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_runtime.checkpoint.reader import CheckpointReader

_PREFIX = "hybrid/"

Halves = dict[str, tuple[TensorEntry, bytes]]
"""Tensors and their bytes, by name."""


def workers_halves(reader: CheckpointReader, prefix: str) -> Halves:
    """The tensors that workers keep, of one model, or of all without a prefix.

    Raises:
        InvalidCheckpoint: a worker's shards are missing, or cannot be put together.
        InvalidConfig: two models have a tensor of the same name.
    """
    found: Halves = {}
    owners: dict[str, str] = {}
    for name in sorted({key for state in _states(reader).values() for key in state}):
        if prefix.rstrip("/") not in ("", name):
            continue
        for tensor, value in _half(reader, name):
            if tensor in found:
                raise InvalidConfig(
                    f"tensor '{tensor}' is the workers' in model '{owners[tensor]}' and in "
                    f"'{name}'; expected one: choose it with --prefix"
                )
            found[tensor], owners[tensor] = value, name
    return found


def _states(reader: CheckpointReader) -> dict[int, dict[str, Any]]:
    """The halves in each worker's part, by rank and by the model's name."""
    parts = {w.rank: reader.headers[w.file].worker for w in reader.manifest.workers if w.file}
    return {
        rank: {
            key.removeprefix(_PREFIX): half
            for key, half in part.state.items()
            if key.startswith(_PREFIX)
        }
        for rank, part in sorted(parts.items())
        if part is not None and isinstance(part.state, Mapping)
    }


def _half(reader: CheckpointReader, name: str) -> Iterator[tuple[str, tuple[TensorEntry, bytes]]]:
    by_rank = {rank: each[name] for rank, each in _states(reader).items() if name in each}
    first = by_rank[min(by_rank)]
    shards = first.get("shards") or {}
    ranks = range(shards["worker_count"]) if shards else [min(by_rank)]
    missing = [rank for rank in ranks if rank not in by_rank]
    if missing or not shards.get("is_by_rows", True):
        why = f"worker {missing[0]} has no part" if missing else "they are not split by rows"
        raise InvalidCheckpoint(
            f"{reader.directory.url}: the shards of model '{name}' cannot be put together: {why}; "
            "expected another checkpoint, or --prefix with another model"
        )
    files = {worker.rank: worker.file for worker in reader.manifest.workers}
    for tensor in first["tensors"]:
        is_sharded = tensor in shards.get("shapes", {})
        taken = b""
        for rank in ranks if is_sharded else ranks[:1]:
            part = by_rank[rank]["tensors"][tensor]["$tensor"]
            taken += bytes(reader.read_file(files[rank], part))
            stored = reader.headers[files[rank]].tensors[part]
        shape = tuple(shards["shapes"][tensor]) if is_sharded else stored.shape
        yield tensor, (TensorEntry(tensor, stored.dtype, shape), taken)
