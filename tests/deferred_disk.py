"""A disk in memory, whose operations end late, and some of them with an error."""

from __future__ import annotations

import errno
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from ps_server.rows.row_file import Records
from ps_server.rows.row_kernels import Numbers
from ps_server.rows.row_memory import RowMemory


class Deferred:
    """One operation, which is done when it is first waited for, or drawn to be."""

    def __init__(self, disk: DeferredDisk, operation: Callable[[], Any]) -> None:
        self._disk, self._operation = disk, operation
        self._result: Any = None
        self._is_done = False

    def done(self) -> bool:
        if not self._is_done and self._disk.ends_now():
            self.result()
        return self._is_done

    def result(self) -> Any:
        if not self._is_done:
            self._result, self._is_done = self._operation(), True
        return self._result

    def add_done_callback(self, call: Callable[[Any], object], /) -> None:
        self.result()
        call(self)


class DeferredFile:
    """One file, in memory."""

    def __init__(self, disk: DeferredDisk) -> None:
        self._disk = disk
        self._memory = bytearray()

    def read(self, records: Records, positions: Numbers, places: Numbers) -> None:
        if self._disk.fails_reads:
            raise OSError(errno.EIO, "Input/output error")
        self._disk.read_count += len(positions)
        size = records.shape[1]
        for position, place in zip(positions.tolist(), places.tolist(), strict=True):
            found = self._memory[position * size : (position + 1) * size]
            records[place] = np.frombuffer(found, np.uint8)  # refuses what was never written

    def write(self, records: Records, positions: Numbers) -> None:
        is_full = self._disk.is_full()
        count = len(positions) // 2 if is_full else len(positions)
        size, memory = records.shape[1], self._memory
        for position, record in zip(positions.tolist()[:count], records, strict=False):
            memory.extend(bytes(max(0, (position + 1) * size - len(memory))))
            memory[position * size : (position + 1) * size] = record.tobytes()
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._disk.write_count += len(positions)


class DeferredDisk:
    """Operations end by draws, or when somebody waits for them; a share of the writes fails for
    want of space, after some of their bytes.
    """

    def __init__(self, seed: object, full_share: float = 0.0) -> None:
        self._draws = Random(f"disk of {seed}")
        self.full_share = full_share
        self.fails_reads = False
        self.read_count = self.write_count = 0

    def file(self) -> DeferredFile:
        return DeferredFile(self)

    def submit(self, operation: Callable[[], OSError | None]) -> Deferred:
        return Deferred(self, operation)

    def ends_now(self) -> bool:
        return self._draws.random() < 0.3

    def is_full(self) -> bool:
        return self._draws.random() < self.full_share


class FewFrames(RowMemory):
    """Memory for everything, but for rows that can be on disk: of these a partition has the least
    number, and gives others back.
    """

    def frames_that_fit(self, count: int, frame_bytes: int) -> int:
        del count, frame_bytes
        return -8
