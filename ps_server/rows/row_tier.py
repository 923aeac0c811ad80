"""The disk that rows go to when a server's memory for tables is full."""

from __future__ import annotations

from collections.abc import Callable

from ps_core import limits
from ps_server.rows.reserved_memory import Prefault, no_prefault
from ps_server.rows.row_file import RecordDisk, RowFile


class RowTier:
    """One server's files of rows, and what their disk did.

    Attributes:
        fetched_count, written_count: rows that were read from files, and written to them.
        frame_bytes: of memory for rows that could be on disk.
        failure: the disk's last answer was this error; None: it took what it got.
        least_frame_count: rows of a partition that are in memory, whatever they take.
        on_loss: called when the disk does not give back what it took.
        release: gives pages of memory back to the system.
        takes: files may get larger: the disk took the last rows, or may be tried again.
        retakes: rows may be written in place of others.
    """

    def __init__(
        self,
        disk: RecordDisk,
        least_frame_count: int = limits.LEAST_FRAME_COUNT,
        release: Prefault = no_prefault,
    ) -> None:
        self._disk = disk
        self.on_loss: Callable[[Exception], object] = _nothing
        self.release = release
        self.least_frame_count = least_frame_count
        self.fetched_count = self.written_count = self.frame_bytes = 0
        self.failure: OSError | None = None
        self.takes = self.retakes = True

    def file(self, record_bytes: int) -> RowFile:
        """A file for rows of one table."""
        return RowFile(self._disk, record_bytes)

    def measured(self, frame_bytes: int) -> None:
        """Take the bytes of all frames. Since the last call the disk may have got space."""
        self.frame_bytes, self.takes, self.retakes = frame_bytes, True, True

    def took(self, may_grow: bool) -> None:
        """The disk took some rows; in place of others, if their file might not get larger."""
        if may_grow:
            self.failure, self.takes = None, True

    def refused(self, failure: OSError, may_grow: bool) -> None:
        """The disk did not take some rows."""
        self.failure = failure
        if may_grow:
            self.takes = False
        else:
            self.retakes = False


def _nothing(_: Exception) -> None: ...
