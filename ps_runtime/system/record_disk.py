"""Files of records of one length that are memory of this process: nameless, and gone with it.

Records are read and written in one call for many, compiled and without the GIL where numba is
installed (the extra `rows`), else one by one.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ps_core.errors import InvalidConfig

Records = npt.NDArray[np.uint8]
"""Shapes: (records, bytes of one), C-contiguous."""

Numbers = npt.NDArray[np.int64]

ResultT = TypeVar("ResultT")

_THREAD_COUNT = 8
"""A disk does so many reads in little more time than one."""


class RecordFile:
    """A file, which is created when something is written. Thread-safe, blocking; its operations
    raise OSError.
    """

    def __init__(self, directory: Path, loops: ModuleType | None = None) -> None:
        self._directory = directory
        self._loops = loops or _loops()
        self._file: int | None = None
        self._lock = Lock()

    def create(self) -> int:
        """The file's descriptor."""
        with self._lock:
            if self._file is None:
                with tempfile.TemporaryFile(dir=self._directory) as file:
                    self._file = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._file)
            return self._file

    def read(self, records: Records, positions: Numbers, places: Numbers) -> None:
        """Read the records at these positions into these places of `records`."""
        file, size = self.create(), records.shape[1]
        failed = self._loops.read_records(file, records.ctypes.data, size, positions, places)
        if failed >= 0:
            found = os.pread(file, size, int(positions[failed]) * size)  # raises what is wrong
            raise OSError(f"read {len(found)} of {size} bytes")

    def write(self, records: Records, positions: Numbers) -> None:
        """Write the records to these ascending positions."""
        file, size = self.create(), records.shape[1]
        failed = self._loops.write_records(file, records.ctypes.data, size, positions)
        if failed >= 0:  # of a stretch some bytes may be there: only the next write says why
            for record, position in zip(records[failed:], positions[failed:].tolist(), strict=True):
                done = 0
                while done < size:
                    done += os.pwrite(file, record[done:].data, position * size + done)


class RecordDisk:
    """The files of one directory, and threads for their operations."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._threads = ThreadPoolExecutor(_THREAD_COUNT, "rows")

    def check(self) -> None:
        """Raise InvalidConfig if no file can be made. Blocking."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self.file().create()
        except OSError as error:
            raise InvalidConfig(
                f"rows_dir is '{self._directory}', where no file can be made: {error.strerror}; "
                "expected a directory that the server may write to"
            ) from error

    def file(self) -> RecordFile:
        return RecordFile(self._directory)

    def submit(self, operation: Callable[[], ResultT]) -> Future[ResultT]:
        """Have another thread do it."""
        return self._threads.submit(operation)


@functools.cache
def _loops() -> ModuleType:
    try:
        return importlib.import_module("ps_runtime.system.record_loops")
    except ImportError:  # numba is missing, or of no use beside this numpy
        return importlib.import_module("ps_runtime.system.record_disk")


def read_records(file: int, address: int, size: int, positions: Numbers, places: Numbers) -> int:
    """As of `record_loops`: -1, or the index of the first record that was not read."""
    for at, (position, place) in enumerate(zip(positions.tolist(), places.tolist(), strict=True)):
        if os.preadv(file, [_memory(address + place * size, size)], position * size) != size:
            return at
    return -1


def write_records(file: int, address: int, size: int, positions: Numbers) -> int:
    """As of `record_loops`: -1, or the index of the first of a stretch that was not written."""
    ends: list[int] = [*(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    for at, end in zip([0, *ends], ends, strict=False):
        record = _memory(address + at * size, (end - at) * size)
        if os.pwrite(file, record, int(positions[at]) * size) != len(record):
            return at
    return -1


def _memory(address: int, byte_count: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * byte_count).from_address(address)
