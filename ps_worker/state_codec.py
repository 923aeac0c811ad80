"""A worker's own state as one safetensors file of a checkpoint: written durably, read suspiciously.

The format is that of a worker's part in docs/CHECKPOINTS.md; what a state may have, and how it
becomes JSON and tensors, is `ps_worker.state_values`, whose `encode` and `decode` are here too.

Rules:
    - What has been written is durable, its name too, before `to_file` returns.
    - Nothing of a file is believed before its length, its header's hash, safetensors' own checks
      and every tensor's checksum hold, where they are known.
    - Every way in which a file can be wrong is an `InvalidCheckpoint` that names it.

What it deliberately does not do: rename (a part belongs to no checkpoint until the manifest names
it), write anywhere but to a local path, or read a file piece by piece.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Never

import safetensors.torch
import torch
from safetensors import SafetensorError

from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.limits import MAX_STATE_HEADER_BYTES
from ps_worker.state_values import decode, encode, shown

__all__ = ["WorkerState", "decode", "encode", "from_file", "to_file"]

VERSION = 1
LENGTH_BYTES = 8
"""Of the little-endian length of the header, with which a file begins."""

_TYPES: dict[str, type] = {
    "version": int, "checkpoint": int, "cluster_id": str, "rank": int, "clock": int, "crc32": dict,
}  # fmt: skip
"""What a worker's part says beside its `state`."""

_LOAD_ERRORS = (
    SafetensorError, AssertionError, KeyError, OverflowError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What safetensors, and torch under it, raise for files that are wrong."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The state of its own that a worker had in a checkpoint."""

    rank: int
    clock: int
    """Every step up to it was taken when the state was saved."""
    checkpoint: int
    """The checkpoint's number."""
    cluster_id: str
    state: dict[Any, Any]


def to_file(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    checkpoint: int,
    cluster_id: str,
    rank: int,
    clock: int,
) -> tuple[int, str]:
    """Writes a worker's part of a checkpoint, over what is at `path`.

    Returns:
        The file's length in bytes and the SHA-256 of its header, in hexadecimal.

    Blocking:
        Until the file and its name are on the disk. `state` is copied first; while the file is
            made its tensors are in memory three times.

    Raises:
        InvalidConfig: `state` has something that cannot be saved, or is too large.
        OSError: the file cannot be written; what is at `path` then is no part.
    """
    value, tensors = encode(state)
    part = {
        "version": VERSION,
        "checkpoint": checkpoint,
        "cluster_id": cluster_id,
        "rank": rank,
        "clock": clock,
        "state": value,
        "crc32": {name: _crc32(tensor) for name, tensor in tensors.items()},
    }
    text = json.dumps(part, allow_nan=False, separators=(",", ":"))
    try:
        raw = safetensors.torch.save(tensors, {"pushpull": text})
    except (SafetensorError, KeyError) as error:
        raise InvalidConfig(f"the state fits no safetensors file: {error!r}") from error
    header_bytes = int.from_bytes(raw[:LENGTH_BYTES], "little")
    if header_bytes > MAX_STATE_HEADER_BYTES:  # nothing could read it back
        raise InvalidConfig(
            f"the state without its tensors has {header_bytes} bytes; at most "
            f"{MAX_STATE_HEADER_BYTES}"
        )
    _write(Path(path), raw)
    header = raw[LENGTH_BYTES : LENGTH_BYTES + header_bytes]
    return len(raw), hashlib.sha256(header).hexdigest()


def from_file(
    source: str | os.PathLike[str] | BinaryIO,
    where: str,
    *,
    byte_count: int | None = None,
    header_sha256: str | None = None,
) -> WorkerState:
    """Reads a worker's part of a checkpoint.

    Args:
        source: A path, or a file that is open for reading in binary; it is read to its end.
        where: Names the file in messages.
        byte_count: Its length as the manifest has it; None where that is not known.
        header_sha256: The hash of its header as the manifest has it; None likewise.

    Shapes:
        Tensors of the state are on the CPU, contiguous, and the caller's own.

    Blocking:
        Until all of the file is read; it is in memory twice for a while.

    Raises:
        InvalidCheckpoint: the file is missing, torn, damaged, of another version or not the one
            that the manifest means; `where` and the reason are in the message.
        OSError: it is there and cannot be read.
    """
    raw = _read(source, where, byte_count)
    header = _header(raw, where)
    found = hashlib.sha256(header).hexdigest()
    if header_sha256 is not None and found != header_sha256.lower():
        _refuse(where, f"its header's SHA-256 is {found}; expected {header_sha256}")
    part = _part(header, where)
    try:
        tensors = safetensors.torch.load(raw)
    except _LOAD_ERRORS as error:
        raise InvalidCheckpoint(f"{where}: not a whole safetensors file: {error!r}") from error
    _check_sums(part["crc32"], tensors, where)
    try:
        state = decode(part["state"], tensors)
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{where}: {error.message}") from error
    return WorkerState(
        rank=part["rank"],
        clock=part["clock"],
        checkpoint=part["checkpoint"],
        cluster_id=part["cluster_id"],
        state=state,
    )


def _read(source: str | os.PathLike[str] | BinaryIO, where: str, byte_count: int | None) -> bytes:
    limit = -1 if byte_count is None else byte_count + 1
    if isinstance(source, str | os.PathLike):
        try:
            with Path(source).open("rb") as file:
                raw = file.read(limit)
        except FileNotFoundError as error:
            raise InvalidCheckpoint(f"{where}: there is no such file") from error
    else:
        raw = source.read(limit)
    if byte_count is not None and len(raw) != byte_count:
        came = "more" if len(raw) > byte_count else str(len(raw))
        _refuse(where, f"it has {came} bytes; expected {byte_count}")
    return raw


def _header(raw: bytes, where: str) -> bytes:
    header_bytes = int.from_bytes(raw[:LENGTH_BYTES], "little")
    if header_bytes > MAX_STATE_HEADER_BYTES:
        _refuse(where, f"a header of {header_bytes} bytes; at most {MAX_STATE_HEADER_BYTES}")
    header = raw[LENGTH_BYTES : LENGTH_BYTES + header_bytes]
    if len(raw) < LENGTH_BYTES or len(header) < header_bytes:
        _refuse(where, f"it ends within its header, after {len(raw)} bytes")
    return header


def _part(header: bytes, where: str) -> dict[str, Any]:
    part = _json(_json(header, where).get("__metadata__"), where)
    if part.get("version") != VERSION:
        _refuse(where, f"version {shown(part.get('version'))}; expected {VERSION}")
    if part.keys() != {*_TYPES, "state"}:
        expected = ", ".join(sorted({*_TYPES, "state"}))
        _refuse(where, f"a worker's part says {', '.join(sorted(part))}; expected {expected}")
    for key, kind in _TYPES.items():
        value = part[key]
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            expected = "a number that is not negative" if kind is int else f"a {kind.__name__}"
            _refuse(where, f"{key} is {shown(value)}; expected {expected}")
    return part


def _json(source: object, where: str) -> dict[str, Any]:
    """The object in a header, or in the one text of its metadata."""
    if isinstance(source, dict):
        source = source.get("pushpull") if len(source) == 1 else None
    if not isinstance(source, str | bytes):
        _refuse(where, "its metadata is not one text named pushpull")
    try:
        value = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{where}: its header is not JSON: {error}") from error
    if not isinstance(value, dict):
        _refuse(where, f"a header that is a {type(value).__name__}; expected an object")
    return value


def _check_sums(sums: dict[str, Any], tensors: dict[str, torch.Tensor], where: str) -> None:
    if sums.keys() != tensors.keys():
        odd = min(sums.keys() ^ tensors.keys())
        _refuse(where, f"tensor {odd!r} has no checksum, or a checksum has no tensor")
    for name, tensor in tensors.items():
        found, expected = _crc32(tensor), sums[name]
        if found != expected:
            _refuse(
                where, f"tensor {name!r} is damaged: CRC-32 {found}, expected {shown(expected)}"
            )


def _crc32(tensor: torch.Tensor) -> int:
    raw: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(raw)


def _write(path: Path, raw: bytes) -> None:
    # not safetensors' own save_file: it renames over `path`, readable by its owner alone
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _refuse(where: str, reason: str) -> Never:
    raise InvalidCheckpoint(f"{where}: {reason}")
