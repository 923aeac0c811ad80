"""The directory of a server's update log: its lock, its id, its segments (SEMANTICS S13).

    DIR/lock        held with flock by the server that writes, for as long as it lives
    DIR/log_id      32 hexadecimal digits; then those of logs before it, a line each
    DIR/00000001.log, ...       segments, by number; old ones may be of a log of another id
    DIR/00000001.damaged, ...   segments of a damaged log

Invariants:
    LOG-3  One process at most has a directory open.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from ps_core import limits
from ps_core.errors import InvalidUpdateLog, Recovering
from ps_runtime.system.disk import DISK, Disk
from ps_server.update_log.disk_stall import DiskOperations
from ps_server.update_log.segment_file import SegmentFile

_SEGMENT = re.compile(r"([0-9]{8,})\.log")
_LOG_ID = "log_id"
_UNUSED = "unused"
"""Has the id of the log until its first segment is on the disk."""
_SET_ASIDE = ".damaged"
_RETRY_MS = 200
_PIECE_BYTES = 8 * 1024 * 1024


class LogDirectory:
    """A directory whose lock this process holds. `log_id` has 16 bytes; `is_new` if no segment of
    it was ever begun; `is_marked` while a file says so, which may outlive the first segment's
    beginning. `former_ids` are those of logs before it, the newest first: nothing of them is
    claimed any more. While `is_written`, `close` leaves the lock: a thread may yet write, and only
    the end of the process ends that. `operations` are those of the thread that reads the log; syncs
    among them may last.
    """

    def __init__(
        self, path: Path, disk: Disk = DISK, operations: DiskOperations | None = None
    ) -> None:
        """Take the lock of the directory, which is made if it is missing.

        Raises:
            Recovering: another process has the lock; it may be about to die.
            InvalidUpdateLog: the directory cannot be made or read; the message names the path.
        """
        self.path = path
        self.disk = disk
        self.is_written = False
        self._operations = operations or DiskOperations()
        try:
            if not path.exists():
                with self._operations.under_way(may_last=True):
                    disk.make_durable_directory(path)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            with ExitStack() as cleanup:
                cleanup.callback(self.close)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.log_id, *former_ids = self._known_ids() or (b"",)
                self.former_ids = tuple(former_ids)
                self.is_new = not self.log_id
                self.is_marked = not self.is_new and self._unused_id() == self.log_id
                if self.is_new:
                    self.renew()
                cleanup.pop_all()
        except BlockingIOError:
            raise Recovering(
                f"{path}: another server writes this update log; it is free when that server ends",
                retry_after_ms=_RETRY_MS,
            ) from None
        except OSError as error:
            raise InvalidUpdateLog(f"{path}: no update log can be kept there: {error}") from error

    def _known_ids(self) -> list[bytes]:
        name = self.path / _LOG_ID
        try:
            found = [bytes.fromhex(each) for each in name.read_text(encoding="ascii").split()]
        except FileNotFoundError:
            return []
        except ValueError:
            found = []
        if {len(each) for each in found} != {limits.LOG_ID_BYTES}:
            raise InvalidUpdateLog(
                f"{name}: expected {2 * limits.LOG_ID_BYTES} hexadecimal digits a line"
            )
        return found

    def _unused_id(self) -> bytes:
        try:
            return bytes.fromhex((self.path / _UNUSED).read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return b""

    def has_begun(self) -> None:
        """The disk has a segment of this log.

        Blocking: until it has that, too.
        """
        if self.is_marked:
            self.disk.remove(self.path / _UNUSED)
            self.disk.sync_directory(self.path)
            self.is_marked = self.is_new = False

    def renew(self) -> None:
        """Draw another id: what is written from now on is another log. The scheduler gives it
        nothing that was the former one's, and expects that one no more.
        """
        name, drawn = self.path / _LOG_ID, secrets.token_bytes(limits.LOG_ID_BYTES)
        known = filter(None, (self.log_id, *self.former_ids))
        former_ids = tuple(known)[: limits.MAX_FORMER_LOGS]
        self._write(self.path / _UNUSED, drawn.hex())  # first: it is of no other log
        self._write(name, "\n".join(each.hex() for each in (drawn, *former_ids)))
        for directory in (self.path, self.path.parent):  # which may be new
            self._sync_directory(directory)
        self.log_id, self.former_ids, self.is_new, self.is_marked = drawn, former_ids, True, True

    def _write(self, name: Path, text: str) -> None:
        beside = name.with_suffix(".tmp")
        with self._synced(self.disk.create(beside)) as descriptor:
            self.disk.write(descriptor, text.encode(), 0)
        self.disk.rename(beside, name)

    def set_aside(self) -> None:
        """Rename a damaged log's segments, so that another log begins here. Segments that were set
        aside before are removed.

        The new id is written first: the scheduler must not give ranges back to this log.
        """
        try:
            self.renew()
            for old in self.path.glob(f"*{_SET_ASIDE}"):
                with self._operations.under_way():  # each alone: all of them may take long
                    self.disk.remove(old)
            for segment in segments_in(self.path).values():
                with self._operations.under_way():
                    self.disk.rename(segment, segment.with_suffix(_SET_ASIDE))
            self._sync_directory(self.path)
        except OSError as error:
            raise InvalidUpdateLog(f"{self.path}: it cannot be set aside: {error}") from error

    @contextmanager
    def _synced(self, descriptor: int) -> Iterator[int]:
        """A file that is on the disk after the body, and closed."""
        try:
            yield descriptor
            with self._operations.under_way(may_last=True):
                self.disk.sync(descriptor)
        finally:
            self.disk.close(descriptor)

    def _sync_directory(self, path: Path) -> None:
        with self._operations.under_way(may_last=True):
            self.disk.sync_directory(path)

    def segment(self, number: int) -> Path:
        return self.path / f"{number:08d}.log"

    def cut(self, number: int, size_bytes: int) -> None:
        """Cut the torn end off a segment: nobody saw it, and within the log it would be damage.

        Blocking: until the disk has it.
        """
        with self._synced(self.disk.reopen(self.segment(number))) as descriptor:
            self.disk.truncate(descriptor, size_bytes)

    def sync(self, number: int) -> None:
        """Have a segment on the disk, as the system has it.

        Blocking: until the disk has it.
        """
        with self._synced(self.disk.reopen(self.segment(number))):
            pass
        self.disk.sync_directory(self.path)

    def make_durable(self, number: int, file: SegmentFile, begin: int, end: int) -> None:
        """Have a segment on the disk, with what its file has up to byte `end` and nothing behind.

        From byte `begin` on, where the last sync ended, it is written once more: its writer may
        have been killed before the next sync, or that may have failed, and then the system may take
        for written what is not. This may be gigabytes: each piece is read when its turn comes.

        Blocking: until the disk has it.
        """
        with self._synced(self.disk.reopen(self.segment(number))) as descriptor:
            for at in range(begin, end, _PIECE_BYTES):
                self.disk.write(descriptor, file.copy(at, min(at + _PIECE_BYTES, end)), at)
            self.disk.truncate(descriptor, end)
        self.disk.sync_directory(self.path)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self.is_written:
            return
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def segments_in(path: Path) -> dict[int, Path]:
    """Segments of a directory by number, ascending. The process with the lock may be writing."""
    found = ((_SEGMENT.fullmatch(each.name), each) for each in path.glob("*.log"))
    numbered = {int(match[1]): each for match, each in found if match is not None}
    return dict(sorted(numbered.items()))


def boot_id() -> str:
    """Id of this machine's boot; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
