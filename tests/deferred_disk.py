"""A disk in memory, whose operations end late, and some of them with an error."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from ps_server.rows.row_file import RowDisk
from ps_server.rows.row_kernels import Numbers, Records
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


class DeferredDisk(RowDisk):
    """Operations end by draws, or when somebody waits for them; some writes fail for want of space,
    after some of their bytes.
    """

    def __init__(self, seed: object, full_share: float = 0.0) -> None:
        self._draws = Random(f"disk of {seed}")
        self._full_share = full_share
        self._files: list[bytearray] = []
        self.fails_reads = False
        self.read_count = self.write_count = self.refused_count = 0

    def submit(self, operation: Callable[[], OSError | None]) -> Deferred:
        return Deferred(self, operation)

    def ends_now(self) -> bool:
        return self._draws.random() < 0.3

    def create(self, directory: Path) -> int:
        del directory
        self._files.append(bytearray())
        return len(self._files) - 1

    def close(self, file: int) -> None:
        self._files[file] = bytearray()

    def read(self, file: int, records: Records, positions: Numbers, places: Numbers) -> None:
        if self.fails_reads:
            raise OSError(errno.EIO, "Input/output error")
        self.read_count += len(positions)
        size = records.shape[1]
        for position, place in zip(positions.tolist(), places.tolist(), strict=True):
            found = self._files[file][position * size : (position + 1) * size]
            records[place] = np.frombuffer(found, np.uint8)  # refuses what was never written

    def write(self, file: int, records: Records, positions: Numbers) -> None:
        is_full = self._draws.random() < self._full_share
        count = len(positions) // 2 if is_full else len(positions)
        size, memory = records.shape[1], self._files[file]
        for position, record in zip(positions.tolist()[:count], records, strict=False):
            memory.extend(bytes(max(0, (position + 1) * size - len(memory))))
            memory[position * size : (position + 1) * size] = record.tobytes()
        if is_full:
            self.refused_count += len(positions)
            raise OSError(errno.ENOSPC, "No space left on device")
        self.write_count += len(positions)


class FewFrames(RowMemory):
    """Memory for everything, but for rows that can be on disk: of these a partition has the least
    number.
    """

    def frames_that_fit(self, count: int, frame_bytes: int) -> int:
        del count, frame_bytes
        return 0
