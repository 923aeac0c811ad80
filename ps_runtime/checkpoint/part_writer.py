"""Writes a part of a checkpoint: tensors in any order, the header at the end into reserved space.

Rules:
    - Several threads may append at once: the lock guards offsets, not checksums and writes.
    - The file has a temporary name until the directory's owner renames it, after `finish` has made
      it durable.
    - A failed write leaves a hole: the part cannot be finished any more.
    - Written windows go to the disk and out of the system's memory: nothing reads them soon.

Invariants:
    PF-1  A tensor is appended once, and none after the end.
    PF-2  Every block with a tensor is noted once, and has its values. A block that is referred to
          has no tensor here.
    PF-3  The header fits the space that was reserved for it.

Tensors are not aligned, because safetensors allows no holes: an F64 may begin at a multiple of 4.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ps_core.errors import InvalidCheckpoint, InvariantViolation, check
from ps_core.manifest import MAX_PLACE_CHARACTERS, split_place
from ps_runtime.checkpoint.part_file import (
    ELEMENT_BYTES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    VALUES,
    VERSION,
    StoredBlock,
    StoredWorker,
    tensor_name,
)
from ps_runtime.checkpoint.part_header import (
    clear_by_entry,
    header,
    header_pieces,
    metadata,
    padded_pieces,
    to_json,
)
from ps_runtime.system.disk import DISK, Disk, Payload, WriteBehind, flat_bytes

_ALIGNMENT_BYTES = 8
_WIDEST_NUMBER = 2**64 - 1
_MAX_CLUSTER_ID_CHARACTERS = 200
_MOST_BYTES_A_CHARACTER = 14  # an emoji, escaped twice: two surrogates of seven
_CRC32 = 2**32 - 1


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """The content of a part for one table, at most.

    Attributes:
        tensors: names of the tensors that a block may have, "values" among them.
        step_count: step numbers of all its blocks together: all their segments, if tensors of a
            block have taken different steps; 0: one a block.
    """

    name: str
    block_count: int
    tensors: Sequence[str]
    step_count: int = 0

    @property
    def header_bytes(self) -> int:
        """The bytes that it takes in a header, at most."""
        longest = f'"{_WIDEST_NUMBER}":'
        crc32s = dict.fromkeys(self.tensors, _CRC32)
        entry = {"version": _WIDEST_NUMBER, "steps": [], "crc32": crc32s}
        described = _described("F32", (_WIDEST_NUMBER,), _WIDEST_NUMBER, _WIDEST_NUMBER)
        written = sum(
            len(to_json({tensor_name(self.name, _WIDEST_NUMBER, tensor): described}))
            for tensor in self.tensors
        )
        referred = _escaped_bytes(to_json({"in": MAX_PLACE_CHARACTERS * "x"}))
        block = _escaped_bytes(longest + to_json(entry)) + 1 + max(written, referred)
        numbers = max(self.step_count, self.block_count) * (len(str(_WIDEST_NUMBER)) + 1)
        return self.block_count * block + numbers + _escaped_bytes(to_json({self.name: {}})) + 1


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A durable part: its length, and the SHA-256 up to the end of its header in hex; a server's
    also has its blocks by table and number.
    """

    byte_count: int
    header_sha256: str
    blocks: dict[tuple[str, int], StoredBlock] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class WorkerTensor:
    """A tensor of a worker's part; `payload` is little-endian and C-contiguous."""

    dtype: str
    shape: tuple[int, ...]
    payload: Payload


@dataclass(slots=True, eq=False)
class _Append:
    """A tensor that is being written from `begin` on; the checksum is of what is written."""

    begin: int
    written_bytes: int = 0
    crc32: int = 0
    is_writing: bool = False


class PartWriter:
    """Writes one server's part to `path`, on this machine; an existing file is replaced. Space is
    reserved for a header of what is `planned`. Blocking: makes the file; InvalidCheckpoint if it
    cannot, or if the header would be too long for safetensors.
    """

    def __init__(self, path: Path, planned: Iterable[PlannedTable], disk: Disk = DISK) -> None:
        self.path = path
        self._disk = disk
        self._lock = threading.Condition()
        fixed = len(to_json(header(metadata(_WIDEST_NUMBER, "", {}), {})))
        reserved = fixed + _MOST_BYTES_A_CHARACTER * _MAX_CLUSTER_ID_CHARACTERS
        reserved += sum(table.header_bytes for table in planned)
        self._header_bytes = _aligned(reserved)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise InvalidCheckpoint(
                f"{path}: its header would have up to {self._header_bytes} bytes; safetensors "
                f"takes {MAX_HEADER_BYTES}: expected fewer blocks on a server (more servers), or "
                "larger ones (block_elements)"
            )
        self._end = 0  # of the data; counts from its beginning
        self._tensors: dict[str, dict[str, Any]] = {}
        self._checksums: dict[tuple[str, int], dict[str, int]] = {}
        self._notes: dict[tuple[str, int], tuple[int, tuple[int, ...]]] = {}
        self._referred: dict[tuple[str, int], StoredBlock] = {}
        self._open: dict[str, _Append] = {}  # of tensors that are not whole yet
        self._behind = WriteBehind()
        self._problem = ""
        self._descriptor: int | None = None
        with _reported(path):
            self._descriptor = disk.create(path)

    def append(
        self,
        table: str,
        block: int,
        tensor: str,
        payload: Payload,
        dtype: str = "F32",
        place: tuple[int, int] | None = None,
    ) -> None:
        """Write one tensor of a block: "values", or the name of an optimizer's state; or the next
        piece of one, at `place`: where it begins, and the bytes of all. Pieces are written in their
        order: one that comes before its turn waits for another thread. Thread-safe.

        `payload` is little-endian and C-contiguous; it is read before this returns. `dtype` is F32,
        F64 or U64. Blocking: the write. Raises InvalidCheckpoint if it cannot be written.
        """
        flat = flat_bytes(payload)
        at, byte_count = place or (0, flat.nbytes)
        count, rest = divmod(byte_count, ELEMENT_BYTES[dtype])
        name = tensor_name(table, block, tensor)
        check(rest == 0, "PF-1", f"'{name}' has {byte_count} bytes, which are no {dtype}")
        append: _Append | None = None
        crc32, problem = 0, "a write was broken off"
        try:
            with self._lock:
                descriptor = self._open_descriptor()
                if at:
                    self._lock.wait_for(lambda: self._is_turn(name, at))
                    descriptor = self._open_descriptor()
                else:
                    check(name not in self._tensors, "PF-1", f"'{name}' is there twice")
                    begin = self._end
                    self._end += byte_count
                    self._tensors[name] = _described(dtype, (count,), begin, self._end)
                    self._open[name] = _Append(begin)
                append = self._open[name]
                append.is_writing = True
            crc32 = zlib.crc32(flat, append.crc32)
            offset = LENGTH_BYTES + self._header_bytes + append.begin + at
            with _reported(self.path):
                self._disk.write(descriptor, flat, offset)
            problem = ""
        finally:  # after Ctrl-C anywhere, too: `abort` waits until nothing is being written
            with self._lock:
                if append is not None:
                    append.is_writing = False
                    append.crc32, append.written_bytes = crc32, at + flat.nbytes
                    self._problem = self._problem or problem
                    is_whole = append.written_bytes == byte_count
                    if is_whole or problem:
                        del self._open[name]
                    if not problem:
                        if is_whole:
                            self._checksums.setdefault((table, block), {})[tensor] = crc32
                        self._drop_written(descriptor)
                self._lock.notify_all()

    def _is_turn(self, name: str, at: int) -> bool:
        """True if a tensor's piece may be written that begins there, or none can be any more."""
        append = self._open.get(name)
        is_next = append is not None and not append.is_writing and append.written_bytes == at
        return is_next or bool(self._problem) or self._descriptor is None

    def _drop_written(self, descriptor: int) -> None:
        """Drop written windows from memory; under the lock."""
        end = min(
            (each.begin + each.written_bytes for each in self._open.values()), default=self._end
        )
        with _reported(self.path):
            for window in self._behind.written(LENGTH_BYTES + self._header_bytes + end):
                self._disk.let_go(descriptor, *window)

    def note_block(self, table: str, block: int, version: int, steps: Sequence[int]) -> None:
        """Note a block's version, and its steps: one number, or one a segment. Thread-safe."""
        with self._lock:
            self._open_descriptor()
            check((table, block) not in self._notes, "PF-2", f"'{table}/{block}' is noted twice")
            self._notes[table, block] = version, tuple(int(step) for step in steps)

    def refer(self, table: str, block: int, stored: StoredBlock) -> None:
        """Note a block of another checkpoint; `stored.place` has its bytes itself. Thread-safe."""
        with self._lock:
            self._open_descriptor()
            name = f"'{table}/{block}'"
            check(split_place(stored.place) is not None, "PF-2", f"{name} is in '{stored.place}'")
            check((table, block) not in self._referred, "PF-2", f"{name} is referred to twice")
            self._referred[table, block] = stored

    def finish(self, checkpoint: int, cluster_id: str) -> WrittenPart:
        """Write the header; the file is then complete and durable. Blocking: until the disk has it.
        InvalidCheckpoint if it cannot be written, or a tensor before could not.
        """
        with self._lock:
            descriptor = self._open_descriptor()
            check(not self._open, "PF-1", f"{len(self._open)} appends are under way")
            blocks, header_bytes = self._blocks(), self._header_bytes
            pieces = list(header_pieces(checkpoint, cluster_id, blocks, self._tensors))
            length = sum(map(len, pieces))
            check(length <= header_bytes, "PF-3", f"a header of {length} bytes, not {header_bytes}")
            digest, offset = hashlib.sha256(), 0
            self._problem = "its end was broken off"  # bytes that a disk refused stay missing
            with _reported(self.path):
                for piece in padded_pieces(pieces, header_bytes):
                    digest.update(piece)
                    self._disk.write(descriptor, piece, offset)
                    offset += len(piece)
                self._disk.sync(descriptor)
                self._descriptor, self._problem = None, ""
                self._disk.close(descriptor)
            for mapping in (self._tensors, self._checksums, self._notes, self._referred):
                clear_by_entry(mapping)
            return WrittenPart(offset + self._end, digest.hexdigest(), blocks)

    def abort(self) -> None:
        """Remove the file, unless it is finished; InvalidCheckpoint if it cannot be removed.
        Idempotent. Thread-safe.

        Blocking: until appends under way have ended: a file that is opened next may get the same
        descriptor, and they would write to it.
        """
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            self._lock.notify_all()
            self._lock.wait_for(lambda: not any(each.is_writing for each in self._open.values()))
            if descriptor is not None:
                with _reported(self.path):
                    self._disk.close(descriptor)
                    self._disk.remove(self.path)

    def _open_descriptor(self) -> int:
        """The file's descriptor; under the lock."""
        if self._problem:
            raise InvalidCheckpoint(f"{self.path}: {self._problem}; it cannot be finished")
        if self._descriptor is None:
            raise InvariantViolation("PF-1", f"{self.path} is closed")
        return self._descriptor

    def _blocks(self) -> dict[tuple[str, int], StoredBlock]:
        for place in itertools.chain(self._notes, self._checksums):
            if place not in self._notes or place not in self._checksums:
                table, block = place
                raise InvariantViolation("PF-2", f"'{table}/{block}' lacks its note or its tensors")
        found = dict(self._referred)
        for (table, block), (version, steps) in self._notes.items():
            checksums = self._checksums[table, block]
            check(VALUES in checksums, "PF-2", f"'{table}/{block}' has no {VALUES}")
            check((table, block) not in found, "PF-2", f"'{table}/{block}' is here and elsewhere")
            found[table, block] = StoredBlock(version, steps, checksums)
        return found


def write_worker_part(
    path: Path,
    checkpoint: tuple[int, str],
    worker: StoredWorker,
    tensors: Mapping[str, WorkerTensor],
    disk: Disk = DISK,
) -> WrittenPart:
    """Write a worker's part of a `checkpoint` (its number, and the cluster's id), complete and
    durable, to `path`, on this machine; an existing file is replaced. Of the `tensors`, by name,
    those with wide elements are written first. Blocking: until the disk has it; InvalidCheckpoint
    if it cannot, or if the state is no JSON, or too large.
    """
    entries: dict[str, dict[str, Any]] = {}
    checksums = {}
    end = 0
    ordered = sorted(tensors.items(), key=lambda item: -ELEMENT_BYTES[item[1].dtype])
    for name, tensor in ordered:
        flat = flat_bytes(tensor.payload)
        expected = math.prod(tensor.shape) * ELEMENT_BYTES[tensor.dtype]
        check(flat.nbytes == expected, "PF-1", f"'{name}': {flat.nbytes} bytes, not {expected}")
        checksums[name] = zlib.crc32(flat)
        entries[name] = _described(tensor.dtype, tensor.shape, end, end + flat.nbytes)
        end += flat.nbytes
    fields = {
        "version": VERSION,
        "checkpoint": checkpoint[0],
        "cluster_id": checkpoint[1],
        "rank": worker.rank,
        "clock": worker.clock,
        "state": worker.state,
        "crc32": checksums,
    }
    try:
        text = to_json(header(fields, entries))
    except (TypeError, ValueError) as error:
        raise InvalidCheckpoint(f"{path}: a worker's state is no JSON: {error}") from None
    start = b"".join(padded_pieces((text,), _aligned(len(text))))
    if len(start) - LENGTH_BYTES > MAX_HEADER_BYTES:  # no reader would accept it
        raise InvalidCheckpoint(
            f"{path}: the state without its tensors takes {len(start)} bytes; expected at most "
            f"{MAX_HEADER_BYTES}"
        )
    with _reported(path):
        descriptor = disk.create(path)
        try:
            disk.write(descriptor, start, 0)
            for name, tensor in ordered:
                begin = len(start) + entries[name]["data_offsets"][0]
                disk.write(descriptor, tensor.payload, begin)
            disk.sync(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):  # a full disk needs the space
                disk.remove(path)
            raise
        finally:
            disk.close(descriptor)
    return WrittenPart(len(start) + end, hashlib.sha256(start).hexdigest())


def _described(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _escaped_bytes(text: str) -> int:
    return len(to_json(text))


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turn an OSError into InvalidCheckpoint, which names the file."""
    try:
        yield
    except OSError as error:
        raise InvalidCheckpoint(f"{path} cannot be written: {error.strerror or error}") from error
