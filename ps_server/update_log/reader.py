"""Reads an update log: the ranges that it has all of, and its frames in order (SEMANTICS S13).

    segments --scan: heads only--> where each range begins --frames: checked--> payloads, in order

Rules:
    - A torn end of the newest segment ends the log: nobody saw the frame that was to be there. A
      process that dies leaves at most a short frame; a power cut may leave anything in the last
      group of a synced log. Anything else that is broken is damage. So is a wrong length, which
      looks like an end except that intact frames lie behind it.
    - The last group of a synced log is checked before anything in it counts: a range begins with no
      snapshot of a torn end, but where it began before.

Invariants:
    ULR-1  `frames` yields intact frames only.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError

from ps_core.errors import InvalidUpdateLog
from ps_core.keys import RangeId
from ps_server.update_log.disk_stall import DiskOperations
from ps_server.update_log.format import (
    GROUP_COUNT,
    HEAD_BYTES,
    MAGIC,
    FrameKind,
    Head,
    frame_bytes,
    group_at,
    head_at,
    intact_behind,
    is_intact,
    payload_at,
)
from ps_server.update_log.segment_file import SegmentFile
from pushpull.v1 import update_log_pb2

FORMAT_VERSION = 1

_WITHOUT_RANGES = FrameKind.HEADER, FrameKind.TABLE, FrameKind.END

_ENDS_WITHIN = "the segment ends within a frame"
_IS_DAMAGED = "a frame is damaged: its checksum is another"

_RANGES = 2**16
"""More ranges than any cluster has, for a segment without a header."""


class RangeStart(NamedTuple):
    """Place of a range's beginning: its BEGIN, or the first frame of its whole SNAPSHOT."""

    segment: int
    offset: int


class LogFrame(NamedTuple):
    """A frame. Its payload is a view of the segment."""

    segment: int
    offset: int
    head: Head
    payload: memoryview


@dataclass(slots=True)
class Segment:
    """A segment. `end` is the end of its whole frames, and `last_group` the begin of those
    that were written last: a synced log has synced everything before them.
    """

    number: int
    path: Path
    header: update_log_pb2.UpdateLogHeader
    file: SegmentFile
    end: int = 0
    last_group: int = 0
    is_torn: bool = False  # bytes lie behind its end
    has_ranges: bool = False  # it has something of a range, and not only its end

    @property
    def mapped(self) -> memoryview:
        """See `SegmentFile`."""
        return self.file.mapped


@dataclass(slots=True)
class LogContents:
    """Segments and ranges of a log.

    Attributes:
        segments: by number, ascending; those before the first with a header are left out.
        starts: the ranges that have not ended, and where each begins.
    """

    segments: dict[int, Segment] = field(default_factory=dict)
    starts: dict[RangeId, RangeStart] = field(default_factory=dict)
    byte_count: int = 0

    @property
    def newest(self) -> Segment | None:
        return self.segments[max(self.segments)] if self.segments else None

    def frames(self, since: int = 0) -> Iterator[LogFrame]:
        """Frames of the segments from number `since` on, in the order of their decisions.

        Raises:
            InvalidUpdateLog: a frame is damaged; names the file and the byte.
        """
        for number, segment in self.segments.items():
            if number >= since:
                yield from _frames(segment)


def scan(paths: Mapping[int, Path], operations: DiskOperations | None = None) -> LogContents:
    """Find the segments and ranges of a log, from the heads of its frames. `paths` ascend, and
    `operations` are those of this thread on the disk.

    Blocking: reads the heads.

    Raises:
        InvalidUpdateLog: a segment is damaged, or of another version.
    """
    contents = LogContents()
    newest = max(paths, default=0)
    for number, path in paths.items():
        segment = _opened(number, path, operations or DiskOperations())
        if segment is None:
            if number != newest:
                raise InvalidUpdateLog(f"{path}: it has no header, and is not the newest segment")
            continue  # its writer died when it began it
        contents.segments[number] = segment
        contents.byte_count += len(segment.mapped)
        _look_through(segment, contents.starts, is_newest=number == newest)
    return contents


def _opened(number: int, path: Path, operations: DiskOperations) -> Segment | None:
    file = SegmentFile(path, operations)
    mapped = file.mapped
    if not mapped:
        return None
    file.read(0, len(MAGIC) + HEAD_BYTES)
    magic = bytes(mapped[: len(MAGIC)])
    if magic != MAGIC[: len(mapped)] and any(magic):  # after a power cut there may be zeros
        raise InvalidUpdateLog(f"{path}: this is no segment of an update log of this version")
    head = None
    with contextlib.suppress(InvalidUpdateLog):
        head = head_at(mapped, len(MAGIC))
    if head is not None:
        file.read(len(MAGIC), len(MAGIC) + frame_bytes(head.length))
    if head is None or not is_intact(mapped, len(MAGIC), head):
        file.read(0, len(mapped))
        if any(each.kind is not FrameKind.TABLE for each in intact_behind(mapped, 0, _RANGES)):
            raise InvalidUpdateLog(f"{path}: its header is damaged")
        return None
    try:
        payload = payload_at(mapped, len(MAGIC), head)
        header = update_log_pb2.UpdateLogHeader.FromString(bytes(payload))
    except DecodeError as error:
        raise InvalidUpdateLog(f"{path}: its header is damaged: {error}") from None
    if header.format_version != FORMAT_VERSION:
        raise InvalidUpdateLog(
            f"{path}: format version {header.format_version}; expected {FORMAT_VERSION}"
        )
    return Segment(number, path, header, file)


def _look_through(segment: Segment, starts: dict[RangeId, RangeStart], *, is_newest: bool) -> None:
    end, group = len(MAGIC), 0
    snapshot: RangeStart | None = None
    broken = _broken_at(segment) if is_newest and segment.header.is_synced else None
    limit = len(segment.mapped) if broken is None else broken
    try:
        for offset, head in _heads(segment.file, limit):
            here, range_id = RangeStart(segment.number, offset), RangeId(head.range_id)
            segment.has_ranges |= head.kind not in _WITHOUT_RANGES
            if head.kind is FrameKind.SNAPSHOT:
                snapshot = snapshot or here
                if head.is_last:
                    starts[range_id], snapshot = snapshot, None
            else:
                snapshot = None
            if head.kind is FrameKind.BEGIN:
                starts[range_id] = here
            elif head.kind is FrameKind.END:
                starts.pop(range_id, None)
            if head.group != group and offset > len(MAGIC):
                segment.last_group = offset
            end, group = offset + frame_bytes(head.length), head.group
    except InvalidUpdateLog as error:
        if not (is_newest and segment.header.is_synced):  # after a power cut there may be zeros
            raise InvalidUpdateLog(f"{segment.path}: {error.message}") from None
    segment.end, segment.is_torn = end, end < len(segment.mapped)
    if segment.is_torn and not (is_newest and not _goes_on(segment, end, group)):
        said = _ENDS_WITHIN if broken is None else _IS_DAMAGED
        raise InvalidUpdateLog(f"{segment.path}: at byte {end}: {said}")


def has_its_last_group(segment: Segment) -> bool:
    """True if the frames that were written last are intact, as the system has them now. It may have
    let go of what it had when they were first read, and the disk may have something else.

    Blocking: reads them.
    """
    at = max(segment.last_group, len(MAGIC))
    with contextlib.suppress(InvalidUpdateLog):
        for offset, head in _heads(segment.file, segment.end, at):
            if not _is_intact(segment, offset, head):
                return False
            at = offset + frame_bytes(head.length)
    return at == segment.end


def _broken_at(segment: Segment) -> int | None:
    """The place of the first broken frame among those that a power cut may have torn: from the end
    back to a frame of another group than those behind it, before which all was synced.
    """
    file, places = segment.file, array("Q")
    group: int | None = None
    with contextlib.suppress(InvalidUpdateLog):  # after a power cut there may be zeros
        places.extend(offset for offset, _ in _heads(file, len(file.mapped)))
    broken = None
    for offset in reversed(places):
        file.read(offset, offset + HEAD_BYTES)
        head = head_at(file.mapped, offset)
        if head is None or not _is_intact(segment, offset, head):
            broken = offset
        elif group in (None, head.group):
            group = head.group
        else:
            break
    return broken


def _is_intact(segment: Segment, offset: int, head: Head) -> bool:
    """See `is_intact`; the frame is in memory then."""
    segment.file.read(offset, offset + frame_bytes(head.length))
    return is_intact(segment.mapped, offset, head)


def _heads(file: SegmentFile, end: int, offset: int = len(MAGIC)) -> Iterator[tuple[int, Head]]:
    """The places and heads of whole frames from `offset` on, and before `end`."""
    mapped = file.mapped[:end]
    file.read(offset, min(offset + HEAD_BYTES, end))
    while (head := head_at(mapped, offset)) is not None:
        yield offset, head
        offset += frame_bytes(head.length)
        file.read(offset, min(offset + HEAD_BYTES, end))


def _frames(segment: Segment) -> Iterator[LogFrame]:
    for offset, head in _heads(segment.file, segment.end):
        if not _is_intact(segment, offset, head):
            raise InvalidUpdateLog(f"{segment.path}: at byte {offset}: {_IS_DAMAGED}")
        yield LogFrame(segment.number, offset, head, payload_at(segment.mapped, offset, head))


def _goes_on(segment: Segment, offset: int, group: int) -> bool:
    """True if frames behind a broken one show that it is damaged, and not a torn end.

    A process that dies leaves nothing behind the frame that it wrote in part. In a synced log only
    frames of a later group, which were written after the broken one was synced, show damage. The
    broken frame, in the newest segment, is at `offset`; the one before is of `group`. If its head
    has no group that can be, as where it is zeros, it counts as one of the group behind it, unless
    a whole group is missing between the two: in logs of older writers some numbers are of none.
    """
    header = segment.header
    segment.file.read(offset, len(segment.mapped))
    found = intact_behind(segment.mapped, offset, header.range_count)
    if not header.is_synced:
        return next(found, None) is not None
    behind = {(head.group - group) % GROUP_COUNT for head in found}  # from the one before
    if len(behind) != 1:
        return bool(behind)
    (newest,) = behind
    own = (group_at(segment.mapped, offset) - group) % GROUP_COUNT
    is_another = own != newest and own <= max(newest, 1)
    return is_another or (header.groups_are_consecutive and newest > 1)
