"""Writes a server's update log: a thread carries frames to the newest segment (SEMANTICS S13).

    append --queue--> thread: written, synced --loop--> on_written: released

Rules:
    - `on_written` is called when the system has a record; with `is_synced` when the disk has it.
    - A log whose write failed has failed: nothing counts as written after that. So has one whose
      disk is busy with one operation for `LOG_STALL_S` in which the server was awake: else its
      ranges would wait, and nobody take them over.
    - The header of a writer's first segment is synced, whatever the setting: it shows after a power
      cut that something followed, even if nothing else of that is left.
    - A log without sync that is closed has the disk take all of it, and then a last segment, which
      has a header only and counts as synced: it shows the next boot that nothing is lost.
    - Before a synced log is written to, the disk has all that its last writers left unsynced. Those
      syncs alone may last longer: nothing bounds their bytes.
    - A synced log syncs every `_SYNC_BYTES`, or little more, within a group too: a sync of more
      could last longer than a disk may that is slow, and goes on. A disk that takes less than that
      in `LOG_STALL_S`, 4 MB a second, fails all the same.
    - Groups of frames are counted without gaps.
    - Written bytes go to the disk, and out of the system's memory, window by window.
    - The thread also removes old segments, so that a slow disk holds up no loop.

Everything but the thread belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ps_core import limits
from ps_core.errors import InvalidUpdateLog
from ps_core.keys import AssignmentEpoch, RangeId, TableId
from ps_runtime.observe import logs
from ps_runtime.system import clock
from ps_runtime.system.disk import Disk, WriteBehind
from ps_server.update_log.directory import LogDirectory
from ps_server.update_log.disk_stall import DiskOperations, DiskStall, say_of_end, say_of_wait
from ps_server.update_log.format import (
    GROUP_COUNT,
    MAGIC,
    FrameKind,
    Head,
    frame_bytes,
    packed,
    padding,
)
from ps_server.update_log.segments import LogSegments
from pushpull.v1 import update_log_pb2

_PIECES_BYTES = 8 * 1024 * 1024
"""A snapshot is written in operations of so many bytes, or little more."""

_SYNC_BYTES = 64 * 1024 * 1024
"""A synced log syncs when so many bytes wait for it, or little more."""

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class LogSetting:
    """Size and durability of a log.

    Attributes:
        bound_bytes: above it the oldest segments go that no range needs.
        is_synced: frames count as written when the disk has them, not when the system has them.
    """

    bound_bytes: int
    is_synced: bool = False


class LogItem(NamedTuple):
    """Frames of one kind, range and number. A payload comes in pieces, which must not change until
    they are written. `term` is their primary's, and is not written.
    """

    kind: FrameKind
    payloads: Sequence[Sequence[bytes | memoryview]]
    range_id: RangeId = RangeId(0)
    number: int = 0
    term: AssignmentEpoch = AssignmentEpoch(0)


@dataclass(slots=True)
class Written:
    """Frames that were written together; `numbers` are those of the newest records, by range and
    term, and `begin_count` counts the ranges that begin in them.
    """

    numbers: dict[tuple[RangeId, AssignmentEpoch], int] = field(default_factory=dict)
    begin_count: int = 0
    byte_count: int = 0


class _NextSegment(NamedTuple):
    """Frames go to another segment from here on, which begins with `first`; the last one has no
    more than that.
    """

    number: int
    first: Sequence[LogItem]
    is_last: bool = False


class _UnsyncedSegment(NamedTuple):
    """This segment was written without sync; what is written next is worth no more."""

    number: int


class _OldSegment(NamedTuple):
    """No range needs this segment."""

    number: int


_Job = LogItem | _UnsyncedSegment | _NextSegment | _OldSegment


class UpdateLog:
    """The log of one server, from when it registered.

    Args:
        header: of its segments; the segment's number is put in.
        unsynced: segments of the same log that the disk may not have.

    Attributes:
        on_written: called on the loop with what was written since the last call.
        failure: set when a write failed.
        queued_bytes: bytes that wait to be written.
    """

    def __init__(
        self,
        directory: LogDirectory,
        header: update_log_pb2.UpdateLogHeader,
        setting: LogSetting,
        segments: LogSegments,
        unsynced: Sequence[int] = (),
    ) -> None:
        self.on_written: Callable[[Written], None] = _nothing
        self.failure: InvalidUpdateLog | None = None
        self.queued_bytes = 0
        self._directory = directory
        self._header = header
        self.segments = segments
        self._tables: dict[TableId, bytes] = {}
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._writer = _Writer(directory, setting.is_synced, self._queue, self._said)
        self._stall, self._waits = DiskStall(), False
        self._is_synced, self._unsynced = setting.is_synced, set(unsynced)
        if self._is_synced:
            self._have_synced()
        self._next_segment()
        self._writer.start()

    # --- appending

    def append(self, item: LogItem) -> None:
        size_bytes = _size(item)
        self.queued_bytes += size_bytes
        self.segments.append(item.kind, item.range_id, size_bytes)
        self._queue.put(item)

    def add_table(self, table_id: TableId, raw: bytes) -> None:
        """Write a table to this segment and all later ones."""
        self._tables[table_id] = raw
        self.append(LogItem(FrameKind.TABLE, ((raw,),)))

    def forget_table(self, table_id: TableId, state_bytes: int) -> None:
        """Write a removed table, which had so many bytes here, to no later segment."""
        del self._tables[table_id]
        self.segments.forget_table(state_bytes)

    def turn(self, state_bytes: int) -> None:
        """Begin another segment if this one `is_full`, and remove those that no range needs."""
        if self.segments.is_full(state_bytes):
            self._next_segment()
        for number in self.segments.let_go():
            self._unsynced.discard(number)
            self._queue.put(_OldSegment(number))

    def _next_segment(self, *, is_last: bool = False) -> None:
        self._header.segment = self.segments.newest + 1
        first = [LogItem(FrameKind.HEADER, ((self._header.SerializeToString(),),))]
        tables = () if is_last else self._tables.values()
        first += [LogItem(FrameKind.TABLE, ((raw,),)) for raw in tables]
        number = self.segments.begin(len(MAGIC) + sum(map(_size, first)))
        self._queue.put(_NextSegment(number, first, is_last))
        if not self._header.is_synced:
            self._unsynced.add(number)

    def _have_synced(self) -> None:
        """Have the disk take what was written without sync."""
        for number in sorted(self._unsynced):
            self._queue.put(_UnsyncedSegment(number))
        self._unsynced.clear()

    # --- the thread's reports

    def _said(self, written: Written | None, problem: str) -> None:
        try:
            self._loop.call_soon_threadsafe(self._heard, written, problem)
        except RuntimeError:  # the loop has ended
            logs.debug("update_log_unheard")

    def _heard(self, written: Written | None, problem: str) -> None:
        if written is None or self.failure is not None:
            self._fail(problem)
            return
        self.queued_bytes -= written.byte_count
        self.segments.wrote(written.begin_count)
        self.on_written(written)

    def _fail(self, problem: str) -> None:
        if problem and self.failure is None:
            self.failure = InvalidUpdateLog(problem)
            logs.error("update_log_failed", reason=problem)

    def look(self, now_s: float) -> None:
        """See that the disk goes on; to be called several times a second."""
        if self._stall.has_failed(self._writer.operations, now_s):
            self._fail(
                _problem(self._directory, f"the disk does not answer for {limits.LOG_STALL_S:g} s")
            )
        if self._waits != self._stall.is_to_be_said:
            self._waits = not self._waits
            say_of_wait(self._directory.path, waits=self._waits)

    async def close(self) -> None:
        """Write everything that was appended, have the disk take it, and release the directory. If
        the disk does not answer, not even a sync that may last, that is said, and the lock stays
        until the process ends.
        """
        self.on_written = _nothing
        if not self._is_synced and self.failure is None:
            self._have_synced()
            self._header.is_synced = True
            self._next_segment(is_last=True)
        self._queue.put(None)
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        while self._writer.is_alive():
            if self._stall.is_too_long(self._writer.operations.current, clock.now_s()):
                say_of_end(self._directory.path, is_synced=self._is_synced)
                break
            self._writer.join(_LOOK_S)
        self._directory.close()


def _problem(directory: LogDirectory, said: str) -> str:
    return (
        f"{directory.path}: the update log cannot be written: {said}; all answered updates are in "
        "it: mend that, and start again"
    )


class _Writer(threading.Thread):
    """Does jobs until it gets None. `operations` are its own on the disk."""

    def __init__(
        self,
        directory: LogDirectory,
        is_synced: bool,
        source: queue.SimpleQueue[_Job | None],
        said: Callable[[Written | None, str], None],
    ) -> None:
        super().__init__(name="update-log", daemon=True)
        self._directory = directory
        self._disk: Disk = directory.disk
        self._is_synced = is_synced
        self._source = source
        self._say = said
        self._descriptor: int | None = None
        self._offset = 0
        self._behind = WriteBehind()
        self._segment = 0
        self._group = 0
        self._unsynced_bytes = 0
        self.operations = DiskOperations()
        directory.is_written = True

    def run(self) -> None:
        try:
            with self._failing():
                is_closed = False
                while not is_closed:
                    items, is_closed = self._next()
                    self._say(self._write(items), "")
            with self._failing():
                self._close()
        finally:
            self._directory.is_written = False

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """The log has failed if the body raises."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing counts as written now
            self._say(None, _problem(self._directory, str(error) or type(error).__name__))

    def _close(self) -> None:
        """Close the file, once, whatever comes of it: another may have its number then."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with self.operations.under_way():  # a network's file is written when it is closed
                self._disk.close(descriptor)

    def _next(self) -> tuple[list[_Job], bool]:
        """Jobs that wait, at least one; and True if the log was closed behind them. A server that
        ends may append more, which nobody sees.
        """
        items: list[_Job] = []
        while not items or not self._source.empty():
            item = self._source.get()
            if item is None:
                return items, True
            items.append(item)
        return items, False

    def _write(self, items: Sequence[_Job]) -> Written:
        # Jobs without frames are of no group: behind a gap a torn end would look like damage.
        self._group += any(isinstance(item, LogItem | _NextSegment) for item in items)
        written = Written()
        for item in items:
            match item:
                case _UnsyncedSegment(number):
                    with self.operations.under_way(may_last=True):
                        self._directory.sync(number)
                case _NextSegment():
                    self._begin(item)
                case _OldSegment(number):
                    with self.operations.under_way():
                        self._remove(number)
                case LogItem(kind):
                    self._put(item)
                    written.byte_count += _size(item)
                    if kind in (FrameKind.SNAPSHOT, FrameKind.RECORD):
                        written.numbers[item.range_id, item.term] = item.number
                    if kind in (FrameKind.SNAPSHOT, FrameKind.BEGIN):
                        written.begin_count += 1
        if self._is_synced and self._descriptor is not None:
            self._sync(self._descriptor)
        return written

    def _begin(self, segment: _NextSegment) -> None:
        is_first = self._descriptor is None
        if self._is_synced and self._descriptor is not None:
            self._sync(self._descriptor)
        self._close()
        with self.operations.under_way():
            self._descriptor = self._disk.create(self._directory.segment(segment.number))
            self._disk.write(self._descriptor, MAGIC, 0)
        self._segment, self._offset, self._behind = segment.number, len(MAGIC), WriteBehind()
        for item in segment.first:
            self._put(item)
        if self._is_synced or is_first or segment.is_last:
            self._sync(self._descriptor)
            with self.operations.under_way():
                self._disk.sync_directory(self._directory.path)
                self._directory.has_begun()

    def _sync(self, descriptor: int) -> None:
        with self.operations.under_way():
            self._disk.sync(descriptor)
        self._unsynced_bytes = 0

    def _remove(self, number: int) -> None:
        path = self._directory.segment(number)
        try:
            self._disk.remove(path)
        except OSError as error:  # it only takes space
            logs.warning("update_log_segment_left", path=str(path), reason=str(error))

    def _put(self, item: LogItem) -> None:
        time_s, group = time.time(), self._group % GROUP_COUNT
        pieces: list[bytes | memoryview] = []
        byte_count = 0
        for index, payload in enumerate(item.payloads):
            length, is_last = sum(map(len, payload)), index == len(item.payloads) - 1
            head = Head(length, item.kind, is_last, item.range_id, group, item.number, time_s)
            pieces += packed(head, *payload), *payload, padding(length)
            byte_count += length
            if is_last or byte_count >= _PIECES_BYTES:
                self._write_pieces(pieces)
                pieces, byte_count = [], 0

    def _write_pieces(self, pieces: Sequence[bytes | memoryview]) -> None:
        if self._descriptor is None:
            return
        with self.operations.under_way():
            byte_count = self._disk.write_all(self._descriptor, pieces, self._offset)
            self._offset += byte_count
            for window in self._behind.written(self._offset):
                self._disk.let_go(self._descriptor, *window)
        self._unsynced_bytes += byte_count
        if self._is_synced and self._unsynced_bytes >= _SYNC_BYTES:
            self._sync(self._descriptor)


def _size(item: LogItem) -> int:
    return sum(frame_bytes(sum(map(len, payload))) for payload in item.payloads)


def _nothing(written: Written) -> None:
    del written
