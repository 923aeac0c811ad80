"""The disk that rows go to when a server's memory for tables is full."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ps_core.errors import InvalidConfig
from ps_server.rows.row_file import ROW_DISK, RowDisk, RowFile, Submit

_LEAST_FRAME_COUNT = 4096
_THREAD_COUNT = 8
"""A disk does so many reads in little more time than one."""


def submit_to_threads() -> Submit:
    """Threads for the disk's operations."""
    return ThreadPoolExecutor(_THREAD_COUNT, "rows").submit


class RowTier:
    """The directory for one server's rows, and what its disk did.

    Attributes:
        fetched_count, written_count: rows that were read from files, and written to them.
        frame_bytes: of memory for rows that could be on disk.
        failure: the disk's last answer was this error; None: it took what it got.
        least_frame_count: rows of a partition that are in memory, whatever they take.

    Args:
        submit: has another thread do the disk's operations.
    """

    def __init__(
        self,
        directory: Path,
        submit: Submit,
        disk: RowDisk = ROW_DISK,
        least_frame_count: int = _LEAST_FRAME_COUNT,
    ) -> None:
        self._directory = directory
        self._submit = submit
        self._disk = disk
        self.least_frame_count = least_frame_count
        self.fetched_count = self.written_count = self.frame_bytes = 0
        self.failure: OSError | None = None
        self._is_tried = True

    def check(self) -> None:
        """Raise InvalidConfig if no file can be made. Blocking."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._disk.close(self._disk.create(self._directory))
        except OSError as error:
            raise InvalidConfig(
                f"rows_dir is '{self._directory}', where no file can be made: {error.strerror}; "
                "expected a directory that the server may write to"
            ) from error

    def file(self, record_bytes: int) -> RowFile:
        """A file for rows of one table."""
        return RowFile(self._directory, record_bytes, self._submit, self._disk)

    @property
    def takes(self) -> bool:
        """True if rows may be written: the disk took the last ones, or may be tried again."""
        return self._is_tried

    def measured(self, frame_bytes: int) -> None:
        """Take the bytes of all frames. Since the last call the disk may have got space."""
        self.frame_bytes, self._is_tried = frame_bytes, True

    def took(self) -> None:
        """The disk took some rows."""
        self.failure, self._is_tried = None, True

    def refused(self, failure: OSError) -> None:
        """The disk did not take some rows."""
        self.failure, self._is_tried = failure, False
