"""What a durable file needs of a disk, operation by operation.

Rules:
    - A file is durable when it is synced *and* the directory that names it is.
    - Nothing here retries: what fails raises OSError, and whoever writes says of which file.

It is a class so that a test can cut the power between any two operations.

What it deliberately does not do: buffer, or know what is in a file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_MAX_PIECE_COUNT = 512
"""Buffers of one system call; Linux takes 1024."""

_WINDOW_BYTES = 8 * 1024 * 1024
_WINDOW_COUNT = 4
"""So many windows behind what is written, the disk has had its time."""

Payload = bytes | bytearray | memoryview
"""Bytes to write: C-contiguous."""


def flat_bytes(payload: Payload) -> memoryview:
    """A payload as bytes, without a copy; arrays without elements as well.

    Raises:
        TypeError: it is not C-contiguous.
    """
    view = memoryview(payload)
    return view.cast("B") if view.nbytes else memoryview(b"")


class Disk:
    """The operations, as the operating system has them. Thread-safe."""

    def create(self, path: Path) -> int:
        """A new, empty file in the place of whatever has the name; its descriptor.

        Raises:
            OSError: it cannot be made.
        """
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def reopen(self, path: Path) -> int:
        """A file that is there, to be read and written; its descriptor.

        Raises:
            OSError: it cannot be opened.
        """
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        """The file ends there.

        Raises:
            OSError: it cannot be cut.
        """
        os.ftruncate(descriptor, size_bytes)

    def write(self, descriptor: int, payload: Payload, offset: int) -> None:
        """All of `payload` at `offset`.

        Blocking: the write.

        Raises:
            OSError: not all of it could be written, a full disk for example.
        """
        rest = flat_bytes(payload)
        while rest:
            count = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[count:], offset + count

    def write_all(self, descriptor: int, pieces: Sequence[bytes | memoryview], offset: int) -> int:
        """All of `pieces`, of bytes each, one behind the other, from `offset` on; how many bytes
        that were.

        Blocking: the write.

        Raises:
            OSError: not all of it could be written, a full disk for example.
        """
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
        """What was written to the file outlives a power cut.

        Blocking: until the disk has it.

        Raises:
            OSError: it cannot be known.
        """
        os.fsync(descriptor)

    def let_go(self, descriptor: int, offset: int, byte_count: int) -> None:
        """Nobody reads this part of the file soon: what of it the disk has goes out of memory, and
        the rest begins to be written to it.

        Blocking: not for the disk, as long as it keeps up.

        Raises:
            OSError: the descriptor is none.
        """
        os.posix_fadvise(descriptor, offset, byte_count, os.POSIX_FADV_DONTNEED)

    def close(self, descriptor: int) -> None:
        """Give the descriptor back."""
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """`source` takes the name of `target`, at once; durable after `sync_directory`.

        Raises:
            OSError: it cannot.
        """
        source.rename(target)

    def sync_directory(self, path: Path) -> None:
        """Names that were made, changed and removed in a directory outlive a power cut.

        Blocking: until the disk has them.

        Raises:
            OSError: it cannot be known.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_directory(self, path: Path) -> None:
        """A directory, and those above it; one that exists is left as it is.

        Raises:
            OSError: it cannot be made.
        """
        path.mkdir(parents=True, exist_ok=True)

    def make_durable_directory(self, path: Path) -> None:
        """As `make_directory`; and all that was made outlives a power cut.

        Blocking: until the disk has it.

        Raises:
            OSError: it cannot be made, or that cannot be known.
        """
        missing = [place for place in (path, *path.parents) if not place.exists()]
        self.make_directory(path)
        for made in missing:
            self.sync_directory(made.parent)

    def remove(self, path: Path) -> None:
        """A file is gone, if there was one.

        Raises:
            OSError: it cannot be removed.
        """
        path.unlink(missing_ok=True)

    def remove_directory(self, path: Path) -> None:
        """An empty directory is gone, if it was there.

        Raises:
            OSError: it is not empty, or cannot be removed.
        """
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()


class WriteBehind:
    """What of a file that is written from its beginning to its end should be let go of, and when:
    windows of some bytes, each when it is written, and again when the disk should have it.

    The memory is taken again for what follows. Elsewhere the system looks for new pages for all of
    a file, takes them from what others have read, and stops the writer when too many have not been
    to the disk.
    """

    def __init__(self) -> None:
        self._window = 0

    def written(self, end: int) -> Iterator[tuple[int, int]]:
        """Offsets and lengths to let go of, when all before `end` is written: once each."""
        while (self._window + 1) * _WINDOW_BYTES <= end:
            for window in (self._window, self._window - _WINDOW_COUNT):
                if window >= 0:
                    yield window * _WINDOW_BYTES, _WINDOW_BYTES
            self._window += 1


DISK = Disk()
"""The real one."""
