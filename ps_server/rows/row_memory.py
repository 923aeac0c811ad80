"""A check that the rows of one server find memory.

A row that is new is refused where tables would take more than they may, or where the machine, or
the container, has little left, whoever has the rest. Rows that are there are updated and read as
before; a backup does as its primary, and a checkpoint or a log is read whatever it takes.

With a directory for them (`RowTier`), rows go to its disk where memory is full, so that a new row
is refused only if the disk is full, too, or the index of all rows needs the memory.

The bytes in use are measured now and then, and rows that were made since are added.
"""

from __future__ import annotations

from ps_core.errors import TableFull
from ps_server.rows.reserved_memory import Prefault, no_prefault
from ps_server.rows.row_arrays import MemoryUse
from ps_server.rows.row_tier import RowTier

_MIB = 2**20

INDEX_BYTES = 24
"""The most that a row takes beside its values and state."""

LEAST_LEFT_SHARE = 0.05
"""Share of the machine's memory that is left to others."""


class RowMemory:
    """The memory of one server's tables.

    Attributes:
        evicted_count: rows that were evicted here.
        prefault: has the pages of rows to come ready before they are written.
        tier: the disk for rows that do not fit; None: there is none.

    Args:
        limit_bytes: bytes that all tables may take here; 0: no bound.
        machine_bytes: of the machine, or the container; 0: not known.
    """

    def __init__(
        self,
        limit_bytes: int = 0,
        machine_bytes: int = 0,
        prefault: Prefault = no_prefault,
        tier: RowTier | None = None,
    ) -> None:
        self.prefault = prefault
        self.tier = tier
        self._limit_bytes = limit_bytes
        self._least_left_bytes = int(machine_bytes * LEAST_LEFT_SHARE)
        self._left_bytes: int | None = None
        self._used_bytes = 0
        self.evicted_count = 0

    def measured(self, use: MemoryUse) -> None:
        """Take what all tables here use."""
        self._used_bytes = use.byte_count
        if self.tier is not None:
            self.tier.measured(use.frame_bytes)

    def measured_left(self, left_bytes: int) -> None:
        """Take the bytes that the machine has left; below 0: it does not say."""
        self._left_bytes = left_bytes if left_bytes >= 0 else None

    def made(self, byte_count: int) -> None:
        """Rows of so many bytes were made."""
        self._used_bytes += byte_count
        if self._left_bytes is not None:
            self._left_bytes -= byte_count

    def evicted(self, row_count: int, byte_count: int) -> None:
        """Rows that took so many bytes were evicted; their pages are for others to come."""
        self.evicted_count += row_count
        self._used_bytes -= byte_count

    def framed(self, byte_count: int) -> None:
        """Frames of so many bytes were made, or given back, if it is below 0."""
        if self.tier is not None:
            self.tier.frame_bytes += byte_count
        self.made(byte_count)

    def frames_that_fit(self, count: int, frame_bytes: int) -> int:
        """The frames that find memory, so many at most; below 0: those that are too many."""
        left_bytes = [self._limit_bytes - self._used_bytes] if self._limit_bytes else []
        if self._left_bytes is not None:
            left_bytes.append(self._left_bytes - self._least_left_bytes)
        return min([count, *(each // frame_bytes for each in left_bytes)])

    def has_space(self, byte_count: int) -> bool:
        """True if rows of so many bytes may be made."""
        return not self._refusal(byte_count)

    def check(self, table: str, row_count: int, row_bytes: int) -> None:
        """Raise TableFull if so many new rows find no space."""
        refusal = self._refusal(row_count * row_bytes)
        if refusal:
            disk_failed = self.tier is not None and self.tier.failure is not None
            raise TableFull(
                f"table '{table}' has no space for {row_count} new rows of {row_bytes} bytes: "
                f"{refusal}; expected {'space on that disk, ' if disk_failed else ''}fewer rows, "
                "or a checkpoint restored on more or larger servers"
            )

    def _refusal(self, byte_count: int) -> str:
        if not byte_count:
            return ""  # also where there is too much already
        tier, disk_words = self.tier, ""
        if tier is not None and tier.failure is None:
            byte_count -= tier.frame_bytes  # these rows would be written
        elif tier is not None:
            disk_words = f", and its disk takes no rows ({tier.failure})"
        used_bytes = self._used_bytes + byte_count
        if self._limit_bytes and used_bytes > self._limit_bytes:
            return (
                f"tables take {self._used_bytes / _MIB:.0f} MiB on this server, and may take "
                f"{self._limit_bytes / _MIB:.0f} (memory_mb){disk_words}"
            )
        left_bytes = self._left_bytes
        if left_bytes is not None and left_bytes - byte_count < self._least_left_bytes:
            return (
                f"this server's machine has {max(0, left_bytes) / _MIB:.0f} MiB of memory left, of "
                f"which {self._least_left_bytes / _MIB:.0f} are not for tables{disk_words}"
            )
        return ""
