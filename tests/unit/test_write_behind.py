"""What is written goes to the disk and out of memory, window by window; threads that give way."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ps_core.keys import RangeId
from ps_runtime.checkpoint.part_writer import PartWriter, PlannedTable
from ps_runtime.system.background import give_way
from ps_runtime.system.disk import _WINDOW_BYTES as WINDOW_BYTES
from ps_runtime.system.disk import _WINDOW_COUNT as WINDOW_COUNT
from ps_runtime.system.disk import Disk, Payload, WriteBehind
from ps_server.update_log.directory import LogDirectory
from ps_server.update_log.format import FrameKind
from ps_server.update_log.writer import LogItem, Written, _Job, _NextSegment, _Writer


@given(st.lists(st.integers(0, 3 * WINDOW_BYTES), max_size=20))
def test_each_window_is_told_twice_and_never_what_is_not_written(lengths: list[int]) -> None:
    behind, end = WriteBehind(), 0
    told: list[int] = []
    for length in lengths:
        end += length
        for offset, byte_count in behind.written(end):
            assert byte_count == WINDOW_BYTES
            assert offset + byte_count <= end
            told.append(offset // WINDOW_BYTES)
    whole = end // WINDOW_BYTES
    assert sorted(told) == sorted([*range(whole), *range(max(0, whole - WINDOW_COUNT))])


class Memory(Disk):
    """A disk that says which windows of its newest files it was told to let go of, and when."""

    def __init__(self) -> None:
        self.written: set[int] = set()  # windows of which something is
        self.told: list[list[int]] = []

    def create(self, path: Path) -> int:
        self.told.append([])
        self.written.clear()
        return super().create(path)

    def _wrote(self, offset: int, byte_count: int) -> None:
        self.written |= set(range(offset // WINDOW_BYTES, (offset + byte_count) // WINDOW_BYTES))

    def write(self, descriptor: int, payload: Payload, offset: int) -> None:
        super().write(descriptor, payload, offset)
        self._wrote(offset, len(payload))

    def write_all(self, descriptor: int, pieces: Sequence[bytes | memoryview], offset: int) -> int:
        count = super().write_all(descriptor, pieces, offset)
        self._wrote(offset, count)
        return count

    def let_go(self, descriptor: int, offset: int, byte_count: int) -> None:
        super().let_go(descriptor, offset, byte_count)
        assert offset // WINDOW_BYTES in self.written
        self.told[-1].append(offset // WINDOW_BYTES)


def test_an_update_log_lets_go_of_its_segments(tmp_path: Path) -> None:
    source: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
    for segment in (1, 2):
        source.put(_NextSegment(segment, ()))
        for payload in (bytes(100), bytes(3 * WINDOW_BYTES), *[bytes(WINDOW_BYTES)] * 4):
            source.put(LogItem(FrameKind.RECORD, ((payload,),), RangeId(1), 1))
    source.put(None)
    disk = Memory()
    with LogDirectory(tmp_path, disk) as directory:
        writer = _Writer(directory, False, source, _unsaid)
        writer.start()
        writer.join(30.0)
    assert disk.told[-2:] == [[0, 1, 2, 3, 4, 0, 5, 1, 6, 2]] * 2


def _unsaid(written: Written | None, problem: str) -> None:
    assert written is not None, problem


class Held(Memory):
    """Holds a write of a tensor that is longer than a window until it is let on."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.may_end = threading.Event(), threading.Event()

    def write(self, descriptor: int, payload: Payload, offset: int) -> None:
        if len(payload) > WINDOW_BYTES:
            self.began.set()
            assert self.may_end.wait(30)
        super().write(descriptor, payload, offset)


def test_a_part_lets_go_of_what_all_its_threads_have_written(tmp_path: Path) -> None:
    disk = Held()
    writer = PartWriter(tmp_path / "part", [PlannedTable("t", 8, ("values",))], disk)
    window, long = bytes(WINDOW_BYTES), bytes(WINDOW_BYTES + 64)
    writer.append("t", 0, "values", window)
    first = list(disk.told[-1])
    held = threading.Thread(target=writer.append, args=("t", 1, "values", long))
    held.start()
    assert disk.began.wait(30)
    for block in range(2, 7):
        writer.append("t", block, "values", window)
    assert disk.told[-1] == first  # the second window is being written
    disk.may_end.set()
    held.join(30)
    assert not held.is_alive()
    assert disk.told[-1] == [0, 1, 2, 3, 4, 0, 5, 1, 6, 2]
    for block in range(7):
        writer.note_block("t", block, 1, (1,))
    writer.finish(1, "c")
    assert (tmp_path / "part").stat().st_size > 7 * WINDOW_BYTES


def test_a_thread_that_gives_way_is_the_only_one_that_does() -> None:
    def own() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = own()
    expected = max(before, 10) if sys.platform == "linux" else before
    with ThreadPoolExecutor(1, initializer=give_way) as threads:
        assert threads.submit(own).result() == expected
    assert own() == before
