"""A disk whose operations end when the test says, or when somebody waits for them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from random import Random
from typing import Any

from ps_server.rows.row_file import RowDisk
from ps_server.rows.row_kernels import Numbers, Records


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
    """Operations end late, by draws; some writes fail for want of space."""

    def __init__(self, seed: int, full_share: float = 0.0) -> None:
        self._draws = Random(seed)
        self._full_share = full_share
        self.fails_reads = False
        self.read_count = self.write_count = self.refused_count = 0

    def submit(self, operation: Callable[[], OSError | None]) -> Deferred:
        return Deferred(self, operation)

    def ends_now(self) -> bool:
        return self._draws.random() < 0.3

    def read(self, file: int, records: Records, positions: Numbers, places: Numbers) -> None:
        if self.fails_reads:
            raise OSError(errno.EIO, "Input/output error")
        self.read_count += len(positions)
        super().read(file, records, positions, places)

    def write(self, file: int, records: Records, positions: Numbers) -> None:
        if self._draws.random() < self._full_share:
            self.refused_count += len(positions)
            raise OSError(errno.ENOSPC, "No space left on device")
        self.write_count += len(positions)
        super().write(file, records, positions)
