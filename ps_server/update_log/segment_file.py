"""The bytes of one segment, mapped, and read from the disk before they are used.

A thread that waits for a page of mapped memory keeps the interpreter from all others, so nobody
could say what it waits for; and a page that cannot be read ends the process with a signal. So what
is about to be used is read first, by a system call that does neither.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

from ps_server.update_log.disk_stall import DiskOperations

_PIECE_BYTES = 1024 * 1024


class SegmentFile:
    """An open segment. `operations` are those of the thread that reads it.

    Attributes:
        mapped: its bytes, as of when it was opened; use them after `read`.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, operations: DiskOperations) -> None:
        self._path = path
        self._operations = operations
        with operations.under_way():
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)
            size_bytes = os.fstat(self._descriptor).st_size
            self.mapped = memoryview(b"")
            if size_bytes:
                mapped = mmap.mmap(self._descriptor, size_bytes, access=mmap.ACCESS_READ)
                self.mapped = memoryview(mapped)
        self._piece = memoryview(bytearray(min(size_bytes, _PIECE_BYTES)))

    def read(self, begin: int, end: int) -> None:
        """Have the bytes from `begin` to `end` in memory, as far as there are so many.

        Raises:
            OSError: as of the system; also if the file was cut since it was opened.
        """
        for _ in self._pieces(begin, end):
            pass

    def copy(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to `end`, as the system has them; raises as `read`. For who uses
        them later: the system may drop mapped pages, and would read them again.
        """
        return b"".join(map(bytes, self._pieces(begin, end)))

    def _pieces(self, begin: int, end: int) -> Iterator[memoryview]:
        """Pieces that are read, each until the next."""
        offset, end = begin, min(end, len(self.mapped))
        while offset < end:
            piece = self._piece[: end - offset]
            with self._operations.under_way():
                count = os.preadv(self._descriptor, [piece], offset)
            if not count:
                raise OSError(errno.EIO, f"the file was cut at byte {offset}", str(self._path))
            yield piece[:count]
            offset += count
