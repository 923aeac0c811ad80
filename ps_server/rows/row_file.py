"""Rows on disk: records of one length, by position, in a file without a name.

    free --taken--> in use --freed--> free, when every transfer that was open then has ended

The file is memory of the server, and nothing more: it ends with the process, and what must outlive
that is with the backups, in checkpoints and in the update log.

Rules:
    - A read gives what the position had when it began, even if its row is written anew, or leaves.
    - Transfers are made by other threads, in pieces, so that a disk has several to do.
    - Positions are taken at the file's end until half of the file is free, so that most writes
      are one piece; then the free ones are taken, in order.
    - On a disk that is full, those free ones are taken that the file has space for. Positions
      behind its end, which the disk has refused, are none any more.

Invariants:
    RF-1  A position that a transfer is under way for is not taken.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ps_core.errors import check
from ps_core.sliced_work import Waiting
from ps_server.rows.row_kernels import Numbers

Records = npt.NDArray[np.uint8]
"""Shapes: (records, bytes of one), C-contiguous."""

_PIECE_COUNT = 64
_MOST_PIECES = 8
"""A transfer has at most so many pieces, of at least so many records each."""

_LEAST_COUNT = 1024
_WINDOW_COUNT = 65_536
"""Positions that are looked at together."""

_MOST_WINDOWS = 16
"""So many times in one turn of the loop, if there may be too few free ones."""


class RecordFile(Protocol):
    """A file of records, as `ps_runtime.system.record_disk.RecordFile`: thread-safe and blocking;
    its operations raise OSError.
    """

    def read(self, records: Records, positions: Numbers, places: Numbers) -> None: ...

    def write(self, records: Records, positions: Numbers) -> None: ...


class RecordDisk(Protocol):
    """Files, and threads for them, as `ps_runtime.system.record_disk.RecordDisk`."""

    def file(self) -> RecordFile: ...

    def submit(self, operation: Callable[[], OSError | None]) -> Waiting: ...


@dataclass
class _Era:
    """The transfers that began in a stretch of time, and the positions freed in it."""

    open_count: int = 0
    freed: list[Numbers] = field(default_factory=list)


class Positions:
    """Which positions of a file are in use."""

    def __init__(self) -> None:
        self._is_free = np.zeros(0, bool)
        self._free_count = 0
        self._hand = 0
        self._eras: deque[_Era] = deque((_Era(),))
        self._written_end = 0  # of those that the file has space for
        self._has_refused = False  # there may be free ones behind it
        self.end = 0  # of those that were ever in use
        self.used_count = 0

    def take(self, count: int) -> Numbers:
        """Positions that are free, ascending."""
        if self._free_count < max(count, self.end // 2):
            self.used_count += count
            begin, self.end = self.end, self.end + count
            if self.end > len(self._is_free):
                more = np.zeros(max(self.end, _LEAST_COUNT), bool)  # twice as many
                self._is_free = np.concatenate((self._is_free, more))
            return np.arange(begin, self.end)
        return self._sweep(count, self.end)

    def retake(self, count: int) -> Numbers:
        """So many free positions, or fewer, that the file has space for, ascending."""
        end = self._written_end
        return self._sweep(count, end, min(_MOST_WINDOWS, end // _WINDOW_COUNT + 2))

    def _sweep(self, count: int, end: int, window_count: int = -1) -> Numbers:
        """The next so many free positions below `end`; fewer, if so many windows have fewer."""
        found: list[Numbers] = [np.empty(0, np.int64)]
        left = min(count, self._free_count)
        while left and window_count:
            window_count -= 1
            if self._hand >= end:
                self._hand = 0
            window = self._is_free[self._hand : min(self._hand + _WINDOW_COUNT, end)]
            some = np.flatnonzero(window)[:left]
            window[some] = False
            found.append(some + self._hand)
            left -= len(some)
            self._hand += len(window) if left else int(some[-1]) + 1
        taken = np.sort(np.concatenate(found))
        self._free_count -= len(taken)
        self.used_count += len(taken)
        return taken

    def free(self, positions: Numbers) -> None:
        """Free positions, each once."""
        if len(positions):
            self.used_count -= len(positions)
            self._eras[-1].freed.append(positions)
            self._free_now()

    def written(self, positions: Numbers) -> None:
        """The file reaches behind these positions."""
        self._written_end = max(self._written_end, int(positions[-1]) + 1)

    def refused(self, positions: Numbers) -> None:
        """Free positions, each once, that the disk did not take."""
        self._has_refused = True
        self.free(positions)

    def open(self) -> _Era:
        """Begin a transfer; what is freed from now on is not taken before it ends."""
        if self._eras[-1].freed:
            self._eras.append(_Era())
        self._eras[-1].open_count += 1
        return self._eras[-1]

    def close(self, era: _Era) -> None:
        """End a transfer."""
        check(era.open_count > 0, "RF-1", "a transfer ends twice")
        era.open_count -= 1
        self._free_now()

    def _free_now(self) -> None:
        while not self._eras[0].open_count:
            for positions in self._eras[0].freed:
                self._is_free[positions] = True
                self._free_count += len(positions)
            self._eras[0].freed.clear()
            if len(self._eras) == 1:
                break
            self._eras.popleft()
        if self._has_refused and bool(self._is_free[self._written_end : self.end].all()):
            self._is_free[self._written_end : self.end] = False
            self._free_count -= self.end - self._written_end
            self.end, self._has_refused = self._written_end, False


class Transfer(NamedTuple):
    """Records on their way between memory and the file."""

    positions: Numbers
    records: Records
    pieces: Sequence[Waiting]
    era: _Era

    @property
    def is_done(self) -> bool:
        return all(piece.done() for piece in self.pieces)

    @property
    def failure(self) -> OSError | None:
        """The first error. Waits for the end."""
        failures: list[OSError | None] = [piece.result() for piece in self.pieces]
        return next((each for each in failures if each is not None), None)


class _Read(NamedTuple):
    """Records to read into their places; `pieces` gets what to wait for."""

    records: Records
    positions: Numbers
    places: Numbers
    pieces: list[Waiting]


class RowFile:
    """A file of records of `record_bytes`. Belongs to one thread, but for its transfers."""

    def __init__(self, disk: RecordDisk, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        self._submit = disk.submit
        self._file = disk.file()
        self.positions = Positions()
        self._gathered: list[_Read] | None = None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Reads that begin in this context are made as one, at its end."""
        gathered: list[_Read] = []
        self._gathered = gathered
        try:
            yield
        finally:
            self._gathered = None
            self._begin(gathered)

    def read(self, positions: Numbers) -> Transfer:
        """Begin to read the records at these positions, in this order."""
        order = np.argsort(positions)
        records = np.empty((len(positions), self.record_bytes), np.uint8)
        read = _Read(records, positions[order], order, [])
        if self._gathered is None:
            self._begin([read])
        else:
            self._gathered.append(read)
        return Transfer(positions, records, read.pieces, self.positions.open())

    def _begin(self, reads: Sequence[_Read]) -> None:
        """Have other threads make some reads, each a part of all."""
        count = max(_PIECE_COUNT, -(-sum(len(read.positions) for read in reads) // _MOST_PIECES))
        parts: list[_Read] = []
        left = count
        for read in reads:
            begin = 0
            while begin < len(read.positions):
                some = slice(begin, begin + left)
                part = read._replace(positions=read.positions[some], places=read.places[some])
                parts.append(part)
                begin, left = begin + len(part.positions), left - len(part.positions)
                if not left:
                    self._submit_parts(parts)
                    parts, left = [], count
        if parts:
            self._submit_parts(parts)

    def _submit_parts(self, parts: Sequence[_Read]) -> None:
        waiting = self._submit(lambda: self._reads(parts))
        for part in parts:
            part.pieces.append(waiting)

    def write(self, records: Records, positions: Numbers) -> Transfer:
        """Begin to write records to positions that were taken for them."""
        pieces = (self._submit(lambda: self._writes(records, positions)),)
        return Transfer(positions, records, pieces, self.positions.open())

    def end(self, transfer: Transfer) -> None:
        """Forget a transfer. A caller that drops one does this, too, when it is done."""
        self.positions.close(transfer.era)

    def _reads(self, parts: Sequence[_Read]) -> OSError | None:
        try:
            for records, positions, places, _ in parts:
                self._file.read(records, positions, places)
        except OSError as error:
            return error
        return None

    def _writes(self, records: Records, positions: Numbers) -> OSError | None:
        try:
            self._file.write(records, positions)
        except OSError as error:
            return error
        return None
