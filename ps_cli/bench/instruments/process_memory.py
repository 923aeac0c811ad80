"""The memory of a process, now and at its peak, as the kernel counts it.

A page counts once, for the process that owns it. Shared memory is an anonymous file that only its
owner may write to. So the pages of such files that a process may only read are borrowed from
another one: they are in its resident set, and are subtracted here.
"""

from __future__ import annotations

import contextlib
import re
import threading
from pathlib import Path
from typing import NamedTuple, Self

_SAMPLE_INTERVAL_S = 0.02
_KIB = 1024
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ (\S{4}) \S+ \S+ \d+\s*(.*)")


class Resident(NamedTuple):
    """A process's resident memory; `total_bytes` includes file pages (libraries)."""

    total_bytes: int
    private_bytes: int
    shared_bytes: int


def resident(pid: int) -> Resident:
    fields = _status(pid)
    return Resident(fields["VmRSS"], fields["RssAnon"], fields["RssShmem"])


def thread_count(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(text.partition("\nThreads:")[2].split(maxsplit=1)[0])


def borrowed_bytes(pid: int) -> int:
    """Resident pages of other processes' shared memory that the process can only read."""
    borrowed = 0
    is_borrowed = False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        mapping = _MAPPING.match(line)
        if mapping is not None:
            rights, path = mapping.groups()
            is_borrowed = path.startswith("/memfd:") and rights[1] == "-" and rights[3] == "s"
        elif is_borrowed and line.startswith("Rss:"):
            borrowed += int(line.split()[1]) * _KIB
    return borrowed


class PeakWatch:
    """Watches a process's memory. A context manager: the figures are complete at its end.

    The kernel keeps the peak. A thread samples every 20 ms which kinds of memory it consists of;
    where the kernel's peak cannot be reset, the highest sample is the peak.

    With `since_its_start` the peak is that of the process's whole life.
    """

    def __init__(self, pid: int, *, since_its_start: bool = False) -> None:
        self._pid = pid
        self._is_kept_by_kernel = since_its_start or _reset_peak(pid)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name=f"memory of {pid}", daemon=True)
        self.before = resident(pid)
        self.highest = self.before
        self.borrowed_bytes = borrowed_bytes(pid)
        self._peak_bytes = self.before.total_bytes

    @property
    def peak_bytes(self) -> int:
        """The peak of resident memory, less the memory that is borrowed at the end."""
        return self._peak_bytes - self.borrowed_bytes

    @property
    def growth_bytes(self) -> int:
        """The peak, less the unshared memory before.

        Shared memory counts even if it was made before: a worker makes its ring as it joins.
        """
        return self.peak_bytes - (self.before.total_bytes - self.before.shared_bytes)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()
        if exception[0] is not None:  # the process may be gone, which must not hide the exception
            return
        self._look()
        self.borrowed_bytes = borrowed_bytes(self._pid)
        self._peak_bytes = self.highest.total_bytes
        if self._is_kept_by_kernel:
            self._peak_bytes = max(self._peak_bytes, _status(self._pid)["VmHWM"])

    def _sample(self) -> None:
        # A process that has ended has no sizes.
        with contextlib.suppress(OSError, KeyError):
            while not self._stopped.wait(_SAMPLE_INTERVAL_S):
                self._look()

    def _look(self) -> None:
        found = resident(self._pid)
        if found.total_bytes > self.highest.total_bytes:
            self.highest = found


def _status(pid: int) -> dict[str, int]:
    """The sizes in a process's status, in bytes."""
    sizes = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            sizes[name] = int(value.split()[0]) * _KIB
    return sizes


def _reset_peak(pid: int) -> bool:
    """Make the kernel forget the peak (VmHWM, see proc_pid_clear_refs(5)); False if it refuses."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True
