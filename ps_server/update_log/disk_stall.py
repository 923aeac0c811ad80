"""Decides when the disk of an update log does not answer (SEMANTICS S13).

    an operation begins --looked at, now and then--> it ends
                             +-- lasts for `LOG_STALL_S` --> the log has failed

Rules:
    - Only time in which the server was awake counts: of the time between two looks at most
      `_MOST_LOOK_S`. A server that is paused does not ask its disk for anything.
    - A disk that goes on, however slowly, answers. So an operation is of a bounded number of bytes,
      or may last; a disk that has one of these is waited for, and said to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ps_core import limits
from ps_runtime.observe import logs

_MOST_LOOK_S = 1.0

_SAID_S = 5.0
"""A disk that is busy with one operation for so long is said to be waited for."""

_REMEDY = "mend the disk, and start the server again if it ends; nothing, if the disk is only slow"


class DiskStall:
    """Time for which a disk is busy with one operation, as seen by another thread."""

    def __init__(self) -> None:
        self._operation = 0
        self._looked_s = -math.inf
        self._lasts_s = 0.0

    @property
    def is_to_be_said(self) -> bool:
        """True if the disk is to be said to be waited for, as of the last look."""
        return self._lasts_s >= _SAID_S

    def has_failed(self, operations: DiskOperations, now_s: float) -> bool:
        """True if one of these lasts too long that may not; as `is_too_long`."""
        may_last = operations.may_last  # first: what lasts too long was under way then, too
        return self.is_too_long(operations.current, now_s) and not may_last

    def is_too_long(self, operation: int, now_s: float) -> bool:
        """True if it lasts too long; to be called several times a second.

        Args:
            operation: number of the operation that is under way; 0: none is.
        """
        passed_s = min(now_s - self._looked_s, _MOST_LOOK_S)
        is_same = operation and operation == self._operation
        self._lasts_s = self._lasts_s + passed_s if is_same else 0.0
        self._operation, self._looked_s = operation, now_s
        return self._lasts_s >= limits.LOG_STALL_S


class DiskOperations:
    """Operations of one thread on a disk, for another that looks at them.

    Attributes:
        current: the number of the operation that is under way; 0: none is.
        may_last: True if it may take long without being stuck, such as a sync of much.
    """

    def __init__(self) -> None:
        self.current = 0
        self.may_last = False
        self._count = 0

    @contextmanager
    def under_way(self, *, may_last: bool = False) -> Iterator[None]:
        """An operation, for as long as the body takes. Within another one it counts alone; what is
        left of that one counts as one more.
        """
        is_within, outer_may_last = bool(self.current), self.may_last
        self._begin(may_last=may_last)
        try:
            yield
        finally:
            if is_within:
                self._begin(may_last=outer_may_last)
            else:
                self.current = 0

    def _begin(self, *, may_last: bool) -> None:
        self._count += 1
        self.may_last = may_last
        self.current = self._count


def say_of_wait(path: Path, *, waits: bool) -> None:
    """Log that the disk of the update log in `path` is waited for, or answers again."""
    if waits:
        logs.warning("waiting_for_log_disk", path=str(path), for_s=_SAID_S, remedy=_REMEDY)
    else:
        logs.info("log_disk_answers", path=str(path))


def say_of_end(path: Path, *, is_synced: bool) -> None:
    """Log that the update log in `path` ends, and its disk does not answer."""
    reason = f"the disk does not answer for {limits.LOG_STALL_S:g} s"
    if not is_synced:
        reason += "; the log was not synced: after another boot it gives nothing back"
    logs.warning("update_log_not_closed", path=str(path), reason=reason, remedy=_REMEDY)
