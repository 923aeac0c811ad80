"""The directory of a server's update log: its lock, its id, its segments (SEMANTICS S13).

    DIR/lock        held with flock by the server that writes, for as long as it lives
    DIR/log_id      32 hexadecimal digits
    DIR/00000001.log, ...   segments, by number
    DIR/00000001.damaged, ...   those of a log that was damaged

Invariants:
    LOG-3  One process at most has a directory open.

What it deliberately does not do: know what is in a segment.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import Self

from ps_core.errors import InvalidUpdateLog, Recovering
from ps_runtime.system.disk import DISK, Disk

_SEGMENT = re.compile(r"([0-9]{8,})\.log")
_LOG_ID = "log_id"
_ID_BYTES = 16
_SET_ASIDE = ".damaged"
_RETRY_MS = 200
_PIECE_BYTES = 8 * 1024 * 1024


class LogDirectory:
    """A directory that this process has the lock of.

    Attributes:
        path: where it is.
        log_id: 16 bytes.
    """

    def __init__(self, path: Path, disk: Disk = DISK) -> None:
        """Make it if there is none, and take its lock.

        Raises:
            Recovering: another process has the lock; it may be about to die.
            InvalidUpdateLog: it cannot be made or read; the message names the path.
        """
        self.path = path
        self.disk = disk
        try:
            disk.make_durable_directory(path)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InvalidUpdateLog(f"{path}: no update log can be kept there: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.log_id = self._known_id() or self._drawn_id()
        except BlockingIOError:
            os.close(self._lock)
            raise Recovering(
                f"{path}: another server writes this update log; it is free when that one ends",
                retry_after_ms=_RETRY_MS,
            ) from None
        except OSError as error:
            os.close(self._lock)
            raise InvalidUpdateLog(f"{path}: no update log can be kept there: {error}") from error
        except BaseException:
            os.close(self._lock)
            raise

    def _known_id(self) -> bytes:
        """The id that the directory has; empty: none."""
        name = self.path / _LOG_ID
        try:
            found = bytes.fromhex(name.read_text(encoding="ascii").strip())
        except FileNotFoundError:
            return b""
        except ValueError:
            found = b""
        if len(found) != _ID_BYTES:
            raise InvalidUpdateLog(f"{name}: expected {2 * _ID_BYTES} hexadecimal digits")
        return found

    def _drawn_id(self) -> bytes:
        """Another id, which the directory has from now on."""
        name, drawn = self.path / _LOG_ID, secrets.token_bytes(_ID_BYTES)
        beside = name.with_suffix(".tmp")
        descriptor = self.disk.create(beside)
        try:
            self.disk.write(descriptor, drawn.hex().encode(), 0)
            self.disk.sync(descriptor)
        finally:
            self.disk.close(descriptor)
        self.disk.rename(beside, name)
        for directory in (self.path, self.path.parent):  # which may be new
            self.disk.sync_directory(directory)
        return drawn

    def set_aside(self) -> None:
        """What is there is damaged: another log begins here. Its id comes first: no range is given
        to that as to one that has all of it. Of those that are set aside the newest is left.

        Raises:
            InvalidUpdateLog: it cannot be.
        """
        try:
            self.log_id = self._drawn_id()
            for old in self.path.glob(f"*{_SET_ASIDE}"):
                self.disk.remove(old)
            for segment in self.segments().values():
                self.disk.rename(segment, segment.with_suffix(_SET_ASIDE))
            self.disk.sync_directory(self.path)
        except OSError as error:
            raise InvalidUpdateLog(f"{self.path}: it cannot be set aside: {error}") from error

    def segments(self) -> dict[int, Path]:
        """The segments that there are, by number, ascending."""
        return segments_in(self.path)

    def segment(self, number: int) -> Path:
        """Where a segment is, or will be."""
        return self.path / f"{number:08d}.log"

    def cut(self, number: int, size_bytes: int) -> None:
        """What is behind that byte of a segment was torn when it was written: nobody saw it.

        Blocking: until the disk has it; within the log it would be damage.

        Raises:
            OSError: it cannot be known.
        """
        descriptor = self.disk.reopen(self.segment(number))
        try:
            self.disk.truncate(descriptor, size_bytes)
            self.disk.sync(descriptor)
        finally:
            self.disk.close(descriptor)

    def settle(self, number: int, content: memoryview, begin: int) -> None:
        """The disk has this of a segment, and nothing else.

        Args:
            number: the segment's.
            content: what there is of it that counts.
            begin: up to which byte it was synced. Who wrote the rest may have been killed before
                it was, or told that it could not be: then the system may take for written what is
                not. So it is written once more.

        Blocking: until the disk has it.

        Raises:
            OSError: it cannot be known.
        """
        descriptor = self.disk.reopen(self.segment(number))
        try:
            for at in range(begin, len(content), _PIECE_BYTES):
                # A copy: it lies in the memory of the file that is written.
                self.disk.write(descriptor, bytes(content[at : at + _PIECE_BYTES]), at)
            self.disk.truncate(descriptor, len(content))
            self.disk.sync(descriptor)
        finally:
            self.disk.close(descriptor)
        self.disk.sync_directory(self.path)

    def close(self) -> None:
        """Another may have it. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def segments_in(path: Path) -> dict[int, Path]:
    """The segments in a directory, by number, ascending; whoever has its lock may be writing."""
    found = ((_SEGMENT.fullmatch(each.name), each) for each in path.glob("*.log"))
    numbered = {int(match[1]): each for match, each in found if match is not None}
    return dict(sorted(numbered.items()))


def boot_id() -> str:
    """The boot of this machine; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
