"""Operations of a disk that durable files need.

A file is durable when it is synced *and* the directory that names it is. Every operation raises
OSError when it fails, and none retries.

`Disk` is a class so that a test can cut the power between any two operations.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_MAX_PIECE_COUNT = 512
"""Buffers in one system call; Linux takes 1024."""

_WINDOW_BYTES = 8 * 1024 * 1024
_WINDOW_COUNT = 4
"""The disk has had time for a window that lies this many windows behind the end."""

Payload = bytes | bytearray | memoryview
"""Bytes to write: C-contiguous."""


def flat_bytes(payload: Payload) -> memoryview:
    """The payload as bytes, without a copy; TypeError unless it is C-contiguous."""
    view = memoryview(payload)
    return view.cast("B") if view.nbytes else memoryview(b"")


class Disk:
    """The operating system's operations. Thread-safe, blocking; all raise OSError."""

    def create(self, path: Path) -> int:
        """Create an empty file, or empty the one of that name; returns its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def reopen(self, path: Path) -> int:
        """Open an existing file for reading and writing; returns its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        os.ftruncate(descriptor, size_bytes)

    def write(self, descriptor: int, payload: Payload, offset: int) -> None:
        """Write all of `payload` at `offset`."""
        rest = flat_bytes(payload)
        while rest:
            count = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[count:], offset + count

    def write_all(self, descriptor: int, pieces: Sequence[bytes | memoryview], offset: int) -> int:
        """Write all of `pieces`, of bytes each, in order from `offset`; returns the byte count."""
        begin = offset
        for first in range(0, len(pieces), _MAX_PIECE_COUNT):
            some = pieces[first : first + _MAX_PIECE_COUNT]
            size_bytes = sum(map(len, some))
            count = os.pwritev(descriptor, some, offset)
            if count < size_bytes:  # a signal, a full disk, or more than one call may write
                self.write(descriptor, memoryview(b"".join(some))[count:], offset + count)
            offset += size_bytes
        return offset - begin

    def sync(self, descriptor: int) -> None:
        """Make the file's content durable."""
        os.fsync(descriptor)

    def let_go(self, descriptor: int, offset: int, byte_count: int) -> None:
        """Drop this part of the file from memory, as far as the disk has it; start to write the
        rest. Blocking: not for the disk, as long as it keeps up.
        """
        os.posix_fadvise(descriptor, offset, byte_count, os.POSIX_FADV_DONTNEED)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """`source` takes the name of `target` atomically; durable after `sync_directory`."""
        source.rename(target)

    def sync_directory(self, path: Path) -> None:
        """Make durable which names the directory has."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_directory(self, path: Path) -> None:
        """Create a directory and those above it, if they are missing."""
        path.mkdir(parents=True, exist_ok=True)

    def make_durable_directory(self, path: Path) -> None:
        """Create missing directories durably."""
        missing = [place for place in (path, *path.parents) if not place.exists()]
        self.make_directory(path)
        for made in missing:
            self.sync_directory(made.parent)

    def remove(self, path: Path) -> None:
        """Remove a file, if it exists."""
        path.unlink(missing_ok=True)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()


class WriteBehind:
    """Windows of a file, written from its beginning to its end, to drop from memory.

    A window is dropped when it is written, and again when the disk should have it. The next windows
    reuse its memory. Otherwise the system takes new pages for the whole file from what others have
    read, and stops the writer when too many pages have not been written to the disk.
    """

    def __init__(self) -> None:
        self._window = 0

    def written(self, end: int) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) of windows to drop, each once: all before `end` is written."""
        while (self._window + 1) * _WINDOW_BYTES <= end:
            for window in (self._window, self._window - _WINDOW_COUNT):
                if window >= 0:
                    yield window * _WINDOW_BYTES, _WINDOW_BYTES
            self._window += 1


DISK = Disk()
