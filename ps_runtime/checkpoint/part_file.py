"""A part of a checkpoint as a file: its header is read and checked before the rest.

A part is a safetensors file: eight bytes of little-endian length, a JSON header of that length,
data. docs/reference/CHECKPOINT_FORMAT.md describes its metadata.

Rules:
    - Nothing is trusted: each number is checked before memory is taken for it.
    - The tensors cover the data without hole or overlap. The header has the checksum of each, and
      the manifest has the header's, so every byte of a file is covered.
    - A block may be in another checkpoint's file: its entry says which, and it has no tensor here.
      That file must have what the entry says (`ps_runtime.checkpoint.references`).
    - Names are not parsed: the metadata lists the tensors of a block.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from ps_core.errors import InvalidCheckpoint
from ps_core.manifest import once_each, split_place

METADATA_KEY = "pushpull"
"""The key of our metadata in `__metadata__`."""

VERSION = 1
VALUES = "values"
"""The name of a block's values beside its optimizer's state."""

IDS = "ids"
"""The name of a partition's ids beside the values of its rows."""

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit: about 450,000 tensors."""

MAX_DIMENSION_COUNT = 64

ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E5M2FNUZ": 1,
    "F8_E4M3FNUZ": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of each element type of safetensors; blocks have only F32 or F64."""


class Readable(Protocol):
    """A binary file, open for reading by one thread at a time; methods as those of `io`."""

    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def read(self, size: int = -1, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file; bytes [begin, end) count from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    crc32: int

    @property
    def byte_count(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block of a server's part.

    `steps` has one number, or one for each of the block's segments. `crc32s` are of its tensors:
    "values", and its optimizer's state by name. `place` is their "directory/file"; empty: here.
    """

    version: int
    steps: tuple[int, ...]
    crc32s: Mapping[str, int]
    place: str = ""

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(self.crc32s)


@dataclass(frozen=True, slots=True)
class StoredWorker:
    """A worker's part beside its tensors."""

    rank: int
    clock: int
    state: Any


@dataclass(frozen=True, slots=True)
class PartHeader:
    """The header of a file; `blocks` are by table and number, `worker` is None in a server's."""

    where: str
    byte_count: int
    checkpoint: int
    cluster_id: str
    tensors: Mapping[str, StoredTensor]
    blocks: Mapping[tuple[str, int], StoredBlock] = field(default_factory=dict)
    worker: StoredWorker | None = None

    @property
    def block_counts(self) -> Counter[str]:
        """The number of blocks of each table, those in other files included."""
        return Counter(table for table, _ in self.blocks)

    @property
    def referred(self) -> dict[tuple[str, int], StoredBlock]:
        """The blocks that are in other files."""
        return {place: block for place, block in self.blocks.items() if block.place}


def tensor_name(table: str, block: int, tensor: str) -> str:
    """The name of a block's tensor in its file."""
    return f"{table}/{block}/{tensor}"


def read_header(
    file: Readable, where: str, byte_count: int | None = None, header_sha256: str | None = None
) -> PartHeader:
    """Read and check the header of the part at `where`; InvalidCheckpoint names a fault.

    `byte_count` and `header_sha256` (up to the end of the header) are the manifest's; None: not
    known. Blocking: reads the header.
    """
    size, text = _header_text(file, where, byte_count, header_sha256)
    return _Parsed(where, size, LENGTH_BYTES + len(text)).header(text)


def check_header(file: Readable, where: str, byte_count: int, header_sha256: str) -> None:
    """As `read_header`, without its contents: no call holds other threads up for long."""
    _header_text(file, where, byte_count, header_sha256)


def _header_text(
    file: Readable, where: str, byte_count: int | None, header_sha256: str | None
) -> tuple[int, bytes]:
    size = file.seek(0, os.SEEK_END)
    if byte_count is not None and size != byte_count:
        _refuse(where, f"it has {size} bytes; the manifest says {byte_count}")
    if size < LENGTH_BYTES:
        _refuse(where, f"it has {size} bytes; expected a safetensors file")
    file.seek(0)
    prefix = file.read(LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    most = min(MAX_HEADER_BYTES, size - LENGTH_BYTES)
    if length > most:
        _refuse(where, f"its header would have {length} bytes; expected at most {most}")
    text = file.read(length)
    if len(text) != length:
        _refuse(where, f"{len(text)} bytes of its header could be read; expected {length}")
    if header_sha256 is not None:
        actual = hashlib.sha256(prefix + text).hexdigest()
        if actual != header_sha256:
            _refuse(where, f"its header's SHA-256 is {actual}; the manifest says {header_sha256}")
    return size, text


def read_into(file: Readable, header: PartHeader, name: str, target: memoryview) -> None:
    """Read a tensor's bytes into `target`, and check them. Blocking: reads the tensor.

    Shapes:
        target: writable bytes ("B"), C-contiguous, as long as the tensor; undefined after an error.

    Raises:
        InvalidCheckpoint: there is no such tensor, it has another length, or it is damaged.
    """
    stored = header.tensors.get(name)
    if stored is None:
        _refuse(header.where, f"it has no tensor '{name}'")
    what = f"tensor '{name}'"
    if target.nbytes != stored.byte_count:
        _refuse(header.where, f"{what} has {stored.byte_count} bytes; expected {target.nbytes}")
    file.seek(stored.begin)
    count = _fill(file, target)
    if count != stored.byte_count:
        _refuse(header.where, f"{what} ends after {count} of {stored.byte_count} bytes")
    if (crc32 := zlib.crc32(target)) != stored.crc32:
        damage = f"its CRC-32 is {crc32}; the header says {stored.crc32}"
        _refuse(header.where, f"{what} is damaged: {damage}")


def read_tensor(file: Readable, header: PartHeader, name: str) -> bytearray:
    """As `read_into`, into new memory."""
    stored = header.tensors.get(name)
    taken = bytearray(0 if stored is None else stored.byte_count)
    read_into(file, header, name, memoryview(taken))
    return taken


def _fill(file: Readable, target: memoryview) -> int:
    readinto = getattr(file, "readinto", None)
    filled = 0
    while filled < target.nbytes:
        if readinto is not None:
            count = readinto(target[filled:])
        else:
            piece = file.read(target.nbytes - filled)
            count = len(piece)
            target[filled : filled + count] = piece
        if not count:
            break
        filled += count
    return filled


def _refuse(where: str, reason: str) -> NoReturn:
    raise InvalidCheckpoint(f"{where}: {reason}")


@dataclass(frozen=True, slots=True)
class _Parsed:
    """Parses a header; `data_begin` is the offset of the file's data."""

    where: str
    size: int
    data_begin: int

    def _refuse(self, reason: str) -> NoReturn:
        _refuse(self.where, reason)

    def header(self, text: bytes) -> PartHeader:
        document = self._json(text, "its header")
        metadata = document.pop("__metadata__", None)
        said = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
        if not isinstance(said, str):
            self._refuse(f"its metadata has no '{METADATA_KEY}'; expected a checkpoint's")
        ours = self._json(said, f"its metadata '{METADATA_KEY}'")
        version = self._count(ours, "version")
        if version != VERSION:
            self._refuse(f"its metadata is of version {version}; expected {VERSION}")
        cluster_id = ours.get("cluster_id")
        if not isinstance(cluster_id, str):
            self._refuse(f"cluster_id is {cluster_id!r}; expected a string")
        blocks: dict[tuple[str, int], StoredBlock] = {}
        worker = None
        if "blocks" in ours:
            blocks, checksums = self._blocks(ours["blocks"])
        else:
            rank, clock = self._count(ours, "rank"), self._count(ours, "clock")
            worker = StoredWorker(rank, clock, ours.get("state"))
            checksums = self._checksums(ours, "the worker")
        return PartHeader(
            where=self.where,
            byte_count=self.size,
            checkpoint=self._count(ours, "checkpoint"),
            cluster_id=cluster_id,
            tensors=self._tensors(document, checksums),
            blocks=blocks,
            worker=worker,
        )

    def _json(self, text: bytes | str, what: str) -> dict[str, Any]:
        try:
            document = json.loads(text, object_pairs_hook=once_each)
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else error
            self._refuse(f"{what} is not JSON: {reason}")
        return self._object(document, what)

    def _object(self, value: object, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._refuse(f"{what} is {_shown(value)}; expected a JSON object")
        return value

    def _count(self, fields: Mapping[str, Any], name: str) -> int:
        value = fields.get(name)
        if type(value) is not int or value < 0:
            self._refuse(f"{name} is {_shown(value)}; expected a number from 0 up")
        return value

    def _counts(self, value: object, what: str) -> tuple[int, ...]:
        if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
            self._refuse(f"{what} is {_shown(value)}; expected a list of numbers from 0 up")
        return tuple(value)

    def _checksums(self, fields: Mapping[str, Any], of: str) -> dict[str, int]:
        found = self._object(fields.get("crc32"), f"crc32 of {of}")
        for name, value in found.items():
            if type(value) is not int or not 0 <= value < 2**32:
                self._refuse(f"crc32 of {of}, {name}, is {_shown(value)}; expected 32 bits")
        return found

    def _blocks(self, tables: object) -> tuple[dict[tuple[str, int], StoredBlock], dict[str, int]]:
        blocks: dict[tuple[str, int], StoredBlock] = {}
        checksums: dict[str, int] = {}
        for table, entries in self._object(tables, "blocks").items():
            for number, entry in self._object(entries, f"blocks of '{table}'").items():
                what = f"block {number} of '{table}'"
                if not (number.isascii() and number.isdecimal() and str(int(number)) == number):
                    self._refuse(f"{what} has no number")
                fields = self._object(entry, what)
                crcs = self._checksums(fields, what)
                if VALUES not in crcs:
                    self._refuse(f"{what} has no checksum of its {VALUES}")
                steps = self._counts(fields.get("steps"), f"steps of {what}")
                version = self._count(fields, "version")
                block, place = int(number), self._place(fields, what)
                blocks[table, block] = StoredBlock(version, steps, crcs, place)
                if place:
                    continue
                for tensor, crc32 in crcs.items():
                    name = tensor_name(table, block, tensor)
                    if name in checksums:
                        self._refuse(f"two checksums are for a tensor '{name}'")
                    checksums[name] = crc32
        return blocks, checksums

    def _place(self, fields: Mapping[str, Any], what: str) -> str:
        """The block's place, if it is not here; an entry may have no other field than its own."""
        for name in fields.keys() - {"version", "steps", "crc32", "in"}:
            self._refuse(f"{what} has a field {name!r}; expected none of that name")
        if "in" not in fields:
            return ""
        place = fields["in"]
        if not isinstance(place, str) or split_place(place) is None:
            self._refuse(
                f"{what} is in {_shown(place)}; expected a checkpoint's directory, a slash and the "
                "plain name of a file"
            )
        return place

    def _tensors(
        self, entries: Mapping[str, Any], checksums: Mapping[str, int]
    ) -> dict[str, StoredTensor]:
        for name in checksums.keys() ^ entries.keys():
            missing = "tensor" if name in checksums else "checksum"
            has = "checksum" if name in checksums else "tensor"
            self._refuse(f"it has a {has} '{name}' without its {missing}")
        found = {
            name: self._tensor(name, self._object(entry, f"tensor '{name}'"), checksums[name])
            for name, entry in entries.items()
        }
        end = self.data_begin
        for name, stored in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
            if stored.begin != end:
                lies = "overlaps another" if stored.begin < end else "leaves a hole before it"
                self._refuse(
                    f"tensor '{name}' {lies}: it begins at byte {stored.begin}; expected {end}"
                )
            end = stored.end
        if end != self.size:
            self._refuse(f"its tensors end at byte {end}; the file has {self.size} bytes")
        return found

    def _tensor(self, name: str, entry: Mapping[str, Any], crc32: int) -> StoredTensor:
        dtype = entry.get("dtype")
        if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
            self._refuse(f"tensor '{name}' is of {_shown(dtype)}; expected F32 or F64")
        shape = self._counts(entry.get("shape"), f"the shape of '{name}'")
        offsets = self._counts(entry.get("data_offsets"), f"data_offsets of '{name}'")
        most = self.size - self.data_begin
        if len(offsets) != 2 or not offsets[0] <= offsets[1] <= most:
            self._refuse(
                f"data_offsets of '{name}' are {_shown(offsets)}; expected [begin, end) within "
                f"the {most} bytes of data"
            )
        if len(shape) > MAX_DIMENSION_COUNT:
            self._refuse(f"tensor '{name}' has {len(shape)} dimensions")
        begin, end = offsets
        expected = math.prod(shape) * ELEMENT_BYTES[dtype]
        if expected != end - begin:
            self._refuse(
                f"tensor '{name}' has {end - begin} bytes; expected {expected} for "
                f"{dtype} of shape {_shown(shape)}"
            )
        return StoredTensor(dtype, shape, self.data_begin + begin, self.data_begin + end, crc32)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."
