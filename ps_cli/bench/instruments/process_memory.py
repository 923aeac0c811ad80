"""How much memory a process has, and how much it had at most: what the kernel says of it.

A page counts once, for the process that owns it. Memory that processes share is an anonymous file
that its owner alone may write to, so what a process maps of such files and may only read is
another's: it is in the process's resident set, and is taken out of it here.
"""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_SAMPLE_INTERVAL_S = 0.02
_KIB = 1024
_RESET_PEAK = "5"
"""What proc_pid_clear_refs(5) takes to forget VmHWM."""

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ (\S{4}) \S+ \S+ \d+\s*(.*)")


@dataclass(frozen=True, slots=True)
class Resident:
    """A process's resident memory: private, shared, and file pages (libraries) in `total_bytes`."""

    total_bytes: int
    private_bytes: int
    shared_bytes: int


def resident(pid: int) -> Resident:
    """What the process has at present."""
    fields = _status(pid)
    return Resident(fields["VmRSS"], fields["RssAnon"], fields["RssShmem"])


def thread_count(pid: int) -> int:
    """Threads of a process."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(text.partition("\nThreads:")[2].split(maxsplit=1)[0])


def borrowed_bytes(pid: int) -> int:
    """Resident pages of other processes' shared memory that the process can only read."""
    total_bytes = 0
    is_borrowed = False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        mapping = _MAPPING.match(line)
        if mapping is not None:
            rights, path = mapping.groups()
            is_borrowed = path.startswith("/memfd:") and rights[1] == "-" and rights[3] == "s"
        elif is_borrowed and line.startswith("Rss:"):
            total_bytes += int(line.split()[1]) * _KIB
    return total_bytes


class PeakWatch:
    """Watches a process's memory. A context manager: the figures are there at its end.

    The kernel keeps the peak; a thread that looks every 20 ms says of what kind of memory it was,
    and stands in for the kernel where that does not let itself be reset.

    Args:
        pid: the process.
        since_its_start: its peak is that of its whole life, not of the time under watch.
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
        """The most that the process had resident, less what it had borrowed at the end."""
        return self._peak_bytes - self.borrowed_bytes

    @property
    def growth_bytes(self) -> int:
        """By how much its own memory rose above the unshared part of what it had before.

        So memory that it shares counts whenever it was made: a worker makes its ring as it joins.
        """
        return self.peak_bytes - (self.before.total_bytes - self.before.shared_bytes)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()
        if exception[0] is not None:  # the process may be gone, which is not the news
            return
        self._look()
        self.borrowed_bytes = borrowed_bytes(self._pid)
        self._peak_bytes = self.highest.total_bytes
        if self._is_kept_by_kernel:
            self._peak_bytes = max(self._peak_bytes, _status(self._pid)["VmHWM"])

    def _sample(self) -> None:
        # A process that has ended has no sizes any more; whoever waits for it says that it ended.
        with contextlib.suppress(OSError, KeyError):
            while not self._stopped.wait(_SAMPLE_INTERVAL_S):
                self._look()

    def _look(self) -> None:
        found = resident(self._pid)
        if found.total_bytes > self.highest.total_bytes:
            self.highest = found


def _status(pid: int) -> dict[str, int]:
    """The sizes in the process's status, in bytes."""
    sizes = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            sizes[name] = int(value.split()[0]) * _KIB
    return sizes


def _reset_peak(pid: int) -> bool:
    """Make the kernel forget the peak of a process; whether it did."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK, encoding="utf-8")
    except OSError:
        return False
    return True
