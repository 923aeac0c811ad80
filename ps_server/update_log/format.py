"""The format of an update log's segments: frames, one after the other (UPDATE_LOG.md).

    segment = magic of 16 bytes, frames
    frame   = head of 32 bytes, payload, zeros up to the next multiple of 16 bytes

A payload is a serialized message of `pushpull.v1`, named by `FrameKind`. Numbers in the head are
little-endian. Elements lie at multiples of 16 bytes in messages, and so in mapped segments.

Invariants:
    ULF-1  A frame's checksum covers its payload, and its head up to the checksum.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ps_core.errors import InvalidUpdateLog

MAGIC = b"pushpull log 01\n"
_HEAD = struct.Struct("<IBBHIQdI")
HEAD_BYTES = _HEAD.size
_CHECKSUM_BYTES = 4
_ALIGNMENT = 16

_IS_LAST = 1

GROUP_COUNT = 2**32
"""Groups are counted modulo this."""


class FrameKind(enum.IntEnum):
    """Kinds of payloads."""

    HEADER = 1
    """UpdateLogHeader: the first frame of a segment."""
    TABLE = 2
    """Table: before anything else of it in the segment."""
    BEGIN = 3
    """UpdateLogRange: the range has nothing yet; what follows is all of it."""
    SNAPSHOT = 4
    """ReplicateRequest: of a snapshot of the range. Its frames follow each other."""
    RECORD = 5
    """ReplicateRequest: of a record. Its frames follow each other."""
    TAKEN_OVER = 6
    """UpdateLogRange: another server goes on with the range, from where the log is."""
    END = 7
    """UpdateLogRange: the range has another primary, or none, or was placed anew, perhaps for this
    same server; its frames are history.
    """


class Head(NamedTuple):
    """A frame's head.

    Attributes:
        length: bytes of the payload.
        is_last: a snapshot, or a record, is whole with this frame.
        range_id: 0 for headers and tables.
        group: frames of one group were written together; 0 before they are. In a synced log a group
            is on the disk, synced in parts if it is large, before the next is begun.
        number: of the record, or of the newest record that a snapshot has; otherwise 0.
        time_s: time of the write, in seconds since 1970 by the server's clock.
    """

    length: int
    kind: FrameKind
    is_last: bool
    range_id: int
    group: int
    number: int
    time_s: float


def frame_bytes(length: int) -> int:
    return HEAD_BYTES + -(-length // _ALIGNMENT) * _ALIGNMENT


def padding(length: int) -> bytes:
    return bytes(frame_bytes(length) - HEAD_BYTES - length)


def packed(head: Head, *payload: bytes | memoryview) -> bytes:
    """The head as written before its payload, which may come in pieces."""
    flags = _IS_LAST if head.is_last else 0
    raw = _HEAD.pack(
        head.length, head.kind, flags, head.range_id, head.group, head.number, head.time_s, 0
    )[:-_CHECKSUM_BYTES]
    checksum = zlib.crc32(raw)
    for piece in payload:
        checksum = zlib.crc32(piece, checksum)
    return raw + checksum.to_bytes(_CHECKSUM_BYTES, "little")


def head_at(written: memoryview, offset: int) -> Head | None:
    """Head of the frame at `offset`; None if `written` ends before the frame does. Raises
    InvalidUpdateLog for a whole frame of no known kind.
    """
    if offset + HEAD_BYTES > len(written):
        return None
    length, kind, flags, range_id, group, number, time_s, _ = _HEAD.unpack_from(written, offset)
    if offset + frame_bytes(length) > len(written):
        return None
    try:
        known = FrameKind(kind)
    except ValueError:
        raise InvalidUpdateLog(
            f"at byte {offset}: a frame of kind {kind}; expected 1 to {max(FrameKind)}"
        ) from None
    return Head(length, known, bool(flags & _IS_LAST), range_id, group, number, time_s)


def group_at(written: memoryview, offset: int) -> int:
    """Group in the whole head at `offset`, which may be damaged."""
    group: int = _HEAD.unpack_from(written, offset)[4]
    return group


def intact_behind(written: memoryview, offset: int, range_count: int) -> Iterator[Head]:
    """Intact frames behind a broken one, whose length may be wrong: at any multiple of 16 bytes."""
    begin = min(offset + _ALIGNMENT, len(written))
    count = max(0, len(written) - begin) // _ALIGNMENT
    pieces = np.frombuffer(written, np.uint8, count * _ALIGNMENT, begin).reshape(count, _ALIGNMENT)
    is_known = (pieces[:, 4] >= min(FrameKind)) & (pieces[:, 4] <= max(FrameKind))
    for index in np.flatnonzero(is_known & (pieces[:, 5] <= _IS_LAST)):
        at = begin + int(index) * _ALIGNMENT
        head = head_at(written, at)
        if head is not None and head.range_id < range_count and is_intact(written, at, head):
            yield head


def payload_at(written: memoryview, offset: int, head: Head) -> memoryview:
    begin = offset + HEAD_BYTES
    return written[begin : begin + head.length]


def is_intact(written: memoryview, offset: int, head: Head) -> bool:
    covered = written[offset : offset + HEAD_BYTES - _CHECKSUM_BYTES]
    said = written[offset + HEAD_BYTES - _CHECKSUM_BYTES : offset + HEAD_BYTES]
    found = zlib.crc32(payload_at(written, offset, head), zlib.crc32(covered))
    return found == int.from_bytes(said, "little")
