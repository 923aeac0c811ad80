"""Arrays of rows of which some are in memory, and the others on disk.

A row in memory has a frame. The columns that say which rows leave are in memory for all.

    new row --> dirty --written--> clean --dropped--> on disk --fetched--> clean
                  ^-------changed----'-------------------------changed----->'

Rules:
    - Where a row lies changes nothing that anybody reads: replicas may differ in it.
    - There are as many frames as find memory, and some at least; the last ones are given back where
      there is less of it than before. When frames run out, rows are written that were not used for
      long (the clock algorithm), and dropped when the disk has them.
    - A row is fetched before an update or a pull needs it. One that is not there yet is read at
      once, which holds the caller up; and if all frames are in use, there is one more.
    - A clean row is dropped without another write. A change makes its record free.
    - All rows are read in passing for copies and checkpoints: these are not fetched.
    - If the disk has no more space, rows take that of records that are free (`Positions.retake`);
      without such, or if it takes nothing, they stay in memory. If it does not give back what it
      has, the server ends: others have its rows (`RowsLost`).
    - A push that comes between two steps of an update may end transfers, which changes the place of
      rows. So no array of places is copied across a step.

Invariants:
    TA-1  A row has a frame or a record, and who has which is told the same from both sides.
    TA-2  A frame is in one write at most, and is marked until that ends, whatever row it gets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ps_core.errors import check
from ps_core.sliced_work import Waiting, Work
from ps_server.rows.row_arrays import Column, MemoryUse, Place, RowArrays, Rows
from ps_server.rows.row_file import Records, RowFile, Transfer
from ps_server.rows.row_index import Moves
from ps_server.rows.row_kernels import Numbers
from ps_server.rows.row_memory import RowMemory
from ps_server.rows.row_tier import RowTier

_AT = "at"
"""Kept column: the frame of a row, or -1 - the position of its record."""

_OWNER, _POSITION, _RECENT, _WRITING = "owner", "position", "recent", "writing"
"""Columns of frames: the number of the row or -1, the position of a record with the same content
or -1, the sweeps that the row survives, and 1 while it is written.
"""

_OWN = {
    _OWNER: Column(1, np.dtype(np.int32)),
    _POSITION: Column(1, np.dtype(np.int32)),
    _RECENT: Column(1, np.dtype(np.uint8)),
    _WRITING: Column(1, np.dtype(np.uint8)),
}

_NOWHERE = int(np.iinfo(np.int32).min)
"""The row of this number has moved, or is gone."""

_MOST_RECENT = 2
_HELD = 12
"""Sweeps that a row survives which is about to be used."""

_SWEPT_COUNT = 16_384
_MOST_SWEPT_COUNT = 16 * _SWEPT_COUNT
"""Frames that are looked at in one turn, and together: some milliseconds, and a fraction of one."""

_MOST_WRITTEN_COUNT = 8192
_FREE_SHARE, _WRITTEN_SHARE = 64, 32
"""Shares of all frames: those that are free for rows to come, and those written together."""


class _Write(NamedTuple):
    """Rows that are on their way to the disk; `may_grow`, if their file may get larger by it."""

    frames: Numbers
    transfer: Transfer
    may_grow: bool


class _Fetch(NamedTuple):
    """Rows that are on their way from the disk."""

    numbers: Numbers
    transfer: Transfer


class TieredArrays:
    """As `RowArrays`, with the columns `kept` in memory for all rows."""

    def __init__(
        self,
        columns: Mapping[str, Column],
        kept: Collection[str],
        file: RowFile,
        tier: RowTier,
        memory: RowMemory,
    ) -> None:
        self._columns = dict(columns)
        self._file = file
        self._tier = tier
        self._memory = memory
        kept_columns = {name: each for name, each in columns.items() if name in kept}
        kept_columns[_AT] = Column(1, np.dtype(np.int32))
        framed = {name: each for name, each in columns.items() if name not in kept}
        self._kept = RowArrays(kept_columns, prefault=memory.prefault)
        self._frames = RowArrays({**framed, **_OWN}, prefault=memory.prefault)
        self._spans: dict[str, slice] = {}
        end = 0
        for name, column in framed.items():
            self._spans[name] = slice(end, end + column.row_bytes)
            end += column.row_bytes
        self._count = self._frame_count = self._hand = 0
        self._resident_count = 0
        self._free: list[Numbers] = []
        self._free_count = 0
        self._writes: list[_Write] = []
        self._fetches: list[_Fetch] = []
        self.row_bytes = sum(column.row_bytes for column in columns.values())

    @property
    def names(self) -> Iterable[str]:
        return self._columns

    def memory_use(self, count: int) -> MemoryUse:
        """As of `RowArrays`, with frames that are free."""
        frame_bytes = self._frame_count * self._frames.row_bytes
        byte_count = count * self._kept.row_bytes + frame_bytes
        return MemoryUse(byte_count, frame_bytes, self._count - self._resident_count)

    def empty(self) -> RowArrays:
        """As of `RowArrays`: all in memory."""
        return RowArrays(self._columns)

    @property
    def piece_count(self) -> int:
        return self._frames.piece_count

    def has_space(self, count: int) -> bool:
        """True if all rows are in memory, and so many in all find frames there."""
        is_whole = self._resident_count == self._count
        return is_whole and count - self._count <= self._free_count and self._kept.has_space(count)

    # --- rows that come and go

    def extending(self, count: int) -> Work[None]:
        """As of `RowArrays`. Waits for frames, if rows are being written."""
        self._kept.extend(count)  # at once: what is written between two steps would be lost
        numbers = np.arange(self._count, count)
        self._end_transfers()
        self._make_space(len(numbers))
        while self._free_count < len(numbers) and self._writes:
            yield from self._waiting(self._writes[0].transfer)
            self._end_transfers()
            self._make_space(len(numbers))
        frames = self._take(len(numbers))
        self._put_frames(_OWNER, frames, numbers)
        self._put_frames(_POSITION, frames, -1)
        self._put_frames(_RECENT, frames, 1)
        self._put_kept(_AT, numbers, frames)
        self._count = count
        self._resident_count += len(numbers)

    def moving(self, moves: Moves) -> Work[None]:
        """As of `RowArrays`. Rows on disk stay where they are."""
        tail = np.ones(self._count - moves.left_count, bool)
        tail[moves.of - moves.left_count] = False
        gone = np.concatenate((moves.to, np.flatnonzero(tail) + moves.left_count))
        for begin in range(0, len(gone), _SWEPT_COUNT):
            at = self._at(gone[begin : begin + _SWEPT_COUNT])
            self._file.positions.free(-1 - at[at < 0])
            self._resident_count -= int(np.count_nonzero(at >= 0))
            self._free_frames(at[at >= 0])
            self._put_kept(_AT, gone[begin : begin + _SWEPT_COUNT], np.full(len(at), _NOWHERE))
            yield
        for of, to in moves.pieces(_SWEPT_COUNT):
            at = self._at(of)
            for name in self._kept.names:
                self._put_kept(name, to, self.kept(name, of)[:, 0])
            self._put_frames(_OWNER, at[at >= 0], to[at >= 0])
            self._put_kept(_AT, of, np.full(len(of), _NOWHERE))
            yield
        self._count = moves.left_count

    def _free_frames(self, frames: Numbers) -> None:
        """Free frames, and the records of their rows."""
        positions = self._get_frames(_POSITION, frames)
        self._file.positions.free(positions[positions >= 0])
        self._empty(frames)

    def _empty(self, frames: Numbers) -> None:
        self._put_frames(_OWNER, frames, -1)
        self._put_frames(_POSITION, frames, -1)
        if len(frames):
            self._free.append(frames)
            self._free_count += len(frames)

    # --- what is in memory

    def places(self, numbers: Numbers) -> list[Place]:
        """As of `RowArrays`. Blocking, if a row is not in memory: see `fetching`."""
        at = self._at(numbers)
        if bool((at < 0).any()):
            self._end_transfers()
            self._read_now(np.unique(numbers))
            at = self._at(numbers)
        places = self._frames.places(at)
        self._frames.put(_RECENT, places, np.full((len(at), 1), _MOST_RECENT, np.uint8))
        return places

    def get(self, name: str, places: Sequence[Place], count: int, out: Rows | None = None) -> Rows:
        if name in self._spans:
            return self._frames.get(name, places, count, out)
        return self._kept.get(name, self._kept_places(places, count), count, out)

    def put(self, name: str, places: Sequence[Place], rows: Rows) -> None:
        if name in self._spans:
            self.change(places, len(rows))
            self._frames.put(name, places, rows)
        else:
            self._kept.put(name, self._kept_places(places, len(rows)), rows)

    def slab(self, names: Iterable[str], number: int) -> dict[str, Rows]:
        """As of `RowArrays`, of the rows that are in memory."""
        return self._frames.slab(names, number)

    def kept(self, name: str, numbers: Numbers) -> Rows:
        """A copy of a column of these rows that is in memory for all."""
        return self._kept.get(name, self._kept.places(numbers), len(numbers))

    def change(self, places: Sequence[Place], count: int) -> None:
        """The records of these rows are about to be old."""
        positions = self._frames.get(_POSITION, places, count)
        has_record = positions >= 0
        if bool(has_record.any()):
            self._file.positions.free(positions[has_record].astype(np.int64))
            self._frames.put(_POSITION, places, np.full_like(positions, -1))

    def _kept_places(self, places: Sequence[Place], count: int) -> list[Place]:
        owners = self._frames.get(_OWNER, places, count)[:, 0]
        return self._kept.places(owners.astype(np.int64))

    # --- what is on disk

    def want(self, numbers: Numbers) -> list[Sequence[Waiting]]:
        """Begin to fetch rows that are on disk; returns what to wait for, once it has begun."""
        if self._resident_count == self._count or not bool((self._at(numbers) < 0).any()):
            return []
        self._end_transfers()
        wanted = np.unique(numbers[numbers < self._count])
        at = self._at(wanted)
        wanted = wanted[(at < 0) & (at != _NOWHERE)]
        coming: list[Sequence[Waiting]] = []
        for fetch in self._fetches:
            is_coming = np.isin(wanted, fetch.numbers)
            if bool(is_coming.any()):
                coming.append(fetch.transfer.pieces)
                wanted = wanted[~is_coming]
        if len(wanted):
            self._fetches.append(_Fetch(wanted, self._read(-1 - self._at(wanted))))
            coming.append(self._fetches[-1].transfer.pieces)
        return coming

    def fetching(self, numbers: Numbers) -> Work[None]:
        """Have these rows in memory, as far as there are frames for them."""
        self._make_space(0)
        coming = self.want(numbers)
        at = self._at(numbers)
        self._put_frames(_RECENT, at[at >= 0], _HELD)
        for pieces in coming:
            yield from pieces
        self._end_transfers()

    def reading(self, numbers: Numbers) -> Work[dict[str, Rows]]:
        """Copies of all arrays of these rows, in passing. Shapes: (rows, width)."""
        at = self._at(numbers)
        resident, cold = np.flatnonzero(at >= 0), np.flatnonzero(at < 0)
        found: dict[str, Rows] = {}
        places = self._frames.places(at[resident])
        for name, column in self._columns.items():
            if name in self._spans:
                found[name] = np.empty((len(at), column.width), column.dtype)
                found[name][resident] = self._frames.get(name, places, len(resident))
            else:
                found[name] = self.kept(name, numbers)
        if len(cold):
            transfer = self._read(-1 - at[cold])
            try:
                yield from self._waiting(transfer)
                self._check(transfer)
            finally:
                self._file.end(transfer)
            for name, rows in self._unpacked(transfer.records).items():
                found[name][cold] = rows
        return found

    def _read(self, positions: Numbers) -> Transfer:
        self._tier.fetched_count += len(positions)
        return self._file.read(positions)

    def _read_now(self, numbers: Numbers) -> None:
        """Read what is not in memory yet."""
        numbers = numbers[self._at(numbers) < 0]
        if len(numbers):
            self._arrived(_Fetch(numbers, self._read(-1 - self._at(numbers))))

    def _waiting(self, transfer: Transfer) -> Work[None]:
        yield from transfer.pieces

    def _end_transfers(self) -> None:
        """Take what the disk has done meanwhile."""
        while self._writes and self._writes[0].transfer.is_done:
            self._written(self._writes.pop(0))
        coming, self._fetches = self._fetches, []
        for fetch in coming:
            if fetch.transfer.is_done:
                self._make_space(len(fetch.numbers))
                self._arrived(fetch)
            else:
                self._fetches.append(fetch)

    def _arrived(self, fetch: _Fetch) -> None:
        """Give frames to rows that were read, unless they are gone, or were read already."""
        numbers, transfer = fetch
        self._check(transfer)
        numbers_here = np.minimum(numbers, self._count - 1)
        come = np.flatnonzero(
            (self._at(numbers_here) == -1 - transfer.positions) & (numbers < self._count)
        )
        numbers, positions = numbers[come], transfer.positions[come]
        if len(come):
            frames = self._take(len(come))
            places = self._frames.places(frames)
            for name, rows in self._unpacked(transfer.records[come]).items():
                self._frames.put(name, places, rows)
            self._put_frames(_OWNER, frames, numbers)
            self._put_frames(_POSITION, frames, positions)
            self._put_frames(_RECENT, frames, _HELD)
            self._put_kept(_AT, numbers, frames)
            self._resident_count += len(come)
        self._file.end(transfer)

    def _check(self, transfer: Transfer) -> None:
        if transfer.failure is not None:
            lost = RowsLost(f"the disk does not give back rows that it took: {transfer.failure}")
            self._tier.on_loss(lost)
            raise lost from transfer.failure

    def _written(self, write: _Write) -> None:
        """Drop rows that the disk has, unless they were used or changed meanwhile."""
        frames, transfer, may_grow = write
        self._put_frames(_WRITING, frames, 0)
        same = self._get_frames(_POSITION, frames) == transfer.positions
        if transfer.failure is None:
            self._tier.took(may_grow)
            self._file.positions.written(transfer.positions)
            is_idle = self._get_frames(_RECENT, frames) == 0
            self._drop(frames[same & is_idle])
        else:
            self._tier.refused(transfer.failure, may_grow)
            self._file.positions.refused(transfer.positions[same])
            self._put_frames(_POSITION, frames[same], -1)
        self._file.end(transfer)

    def try_disk(self) -> bool:
        """Take what the disk has done, and write some rows to it, whether memory lacks space or
        not; False if there are none.
        """
        self._end_transfers()
        if self._tier.failure is not None and self._frame_count and not self._writes:
            self._give_up(max(1, self._written_count))
        return bool(self._writes)

    # --- frames

    @property
    def _written_count(self) -> int:
        """Rows that are written together."""
        return min(self._frame_count // _WRITTEN_SHARE, _MOST_WRITTEN_COUNT)

    def _take(self, count: int) -> Numbers:
        """Free frames, or more of them."""
        if self._free_count < count:
            self._grow(count - self._free_count)
        taken: list[Numbers] = [np.empty(0, np.int64)]
        left = count
        while left:
            some = self._free.pop()
            if len(some) > left:
                self._free.append(some[left:])
                some = some[:left]
            taken.append(some)
            left -= len(some)
        self._free_count -= count
        return np.concatenate(taken)

    def _grow(self, count: int) -> None:
        frames = np.arange(self._frame_count, self._frame_count + count)
        self._frame_count += count
        self._frames.extend(self._frame_count)
        self._put_frames(_WRITING, frames, 0)
        self._memory.framed(count * self._frames.row_bytes)
        self._empty(frames)

    def _make_space(self, count: int) -> None:
        """Have free frames for so many rows, or write rows whose frames will be."""
        on_the_way = sum(len(write.frames) for write in self._writes)
        lacking = count - self._free_count - on_the_way
        if self._frame_count >= self._tier.least_frame_count:
            lacking += self._frame_count // _FREE_SHARE
        most = self._memory.frames_that_fit(max(lacking, 0), self._frames.row_bytes)
        least = self._tier.least_frame_count - self._frame_count
        if most < 0 and least < 0:
            too_many_count = min(-most, -least, _SWEPT_COUNT)
            self._shrink(min(too_many_count, self._free_count - count))
            lacking += too_many_count
        if lacking <= 0:
            return
        more = max(most, min(lacking, least))
        if more > 0:
            self._grow(more)
            lacking -= more
        if lacking > 0:
            self._give_up(max(lacking, self._written_count))

    def _shrink(self, count: int) -> None:
        """Give back the last frames, whose rows move to others, which are free."""
        left_count = self._frame_count - count
        last = np.arange(left_count, self._frame_count)
        if count <= 0 or bool(self._get_frames(_WRITING, last).any()):
            return
        free = np.concatenate(self._free)
        free = free[free < left_count]
        of = last[self._get_frames(_OWNER, last) >= 0]
        to, rest = free[: len(of)], free[len(of) :]
        places, own_places = self._frames.places(of), self._frames.places(to)
        for name in self._frames.names:
            if name != _WRITING:  # a write that is under way may name the frames that are free
                self._frames.put(name, own_places, self._frames.get(name, places, len(of)))
        self._put_kept(_AT, self._get_frames(_OWNER, to), to)
        self._free, self._free_count = [rest] if len(rest) else [], len(rest)
        self._frame_count = left_count
        self._hand = min(self._hand, left_count - 1)
        self._frames.release(left_count, self._tier.release)
        self._memory.framed(-count * self._frames.row_bytes)

    def _give_up(self, count: int) -> None:
        """Drop rows that were not used for long; write them first, if the disk lacks them."""
        frames = self._idle(count)
        is_clean = self._get_frames(_POSITION, frames) >= 0
        self._drop(frames[is_clean])
        dirty = frames[~is_clean]
        may_grow, space = self._tier.takes, self._file.positions
        if not (may_grow or self._tier.retakes):
            return
        positions = space.take(len(dirty)) if may_grow else space.retake(len(dirty))
        dirty = dirty[: len(positions)]
        if len(dirty):
            transfer = self._file.write(self._packed(dirty), positions)
            self._tier.written_count += len(dirty)
            self._put_frames(_POSITION, dirty, transfer.positions)
            self._put_frames(_WRITING, dirty, 1)
            self._writes.append(_Write(dirty, transfer, may_grow))

    def _idle(self, count: int) -> Numbers:
        """Frames whose rows were not used for long: a hand goes around them."""
        found: list[Numbers] = [np.empty(0, np.int64)]
        left, swept_count = count, 0
        most = min((_MOST_RECENT + 1) * self._frame_count, _MOST_SWEPT_COUNT)
        while left > 0 and swept_count <= most:
            end = min(self._hand + _SWEPT_COUNT, self._frame_count)
            frames = np.arange(self._hand, end)
            is_used = self._get_frames(_OWNER, frames) >= 0
            frames = frames[is_used & (self._get_frames(_WRITING, frames) == 0)]
            recent = self._get_frames(_RECENT, frames)
            idle = np.flatnonzero(recent == 0)[:left]
            if len(idle) == left:  # the hand stays here
                end = int(frames[idle[-1]]) + 1
                recent, frames = recent[: idle[-1] + 1], frames[: idle[-1] + 1]
            self._put_frames(_RECENT, frames, recent - (recent > 0))
            found.append(frames[idle])
            swept_count += end - self._hand
            left -= len(idle)
            self._hand = 0 if end >= self._frame_count else end
        return np.unique(np.concatenate(found))

    def _drop(self, frames: Numbers) -> None:
        """Leave rows to the disk, which has them."""
        owners = self._get_frames(_OWNER, frames)
        check(not len(frames) or owners.min() >= 0, "TA-1", "a frame without a row is dropped")
        self._put_kept(_AT, owners, -1 - self._get_frames(_POSITION, frames))
        self._resident_count -= len(frames)
        self._empty(frames)

    def _packed(self, frames: Numbers) -> Records:
        """The records of these frames' rows."""
        places = self._frames.places(frames)
        records = np.empty((len(frames), self._file.record_bytes), np.uint8)
        for name, span in self._spans.items():
            rows = self._frames.get(name, places, len(frames))
            records[:, span] = rows.view(np.uint8).reshape(len(frames), -1)
        return records

    def _unpacked(self, records: Records) -> dict[str, Rows]:
        return {
            name: np.ascontiguousarray(records[:, span]).view(self._columns[name].dtype)
            for name, span in self._spans.items()
        }

    def _at(self, numbers: Numbers) -> Numbers:
        return self.kept(_AT, numbers)[:, 0].astype(np.int64)

    def _put_kept(self, name: str, numbers: Numbers, values: npt.NDArray[np.generic]) -> None:
        self._kept.put(name, self._kept.places(numbers), values[:, None])

    def _get_frames(self, name: str, frames: Numbers) -> Numbers:
        found = self._frames.get(name, self._frames.places(frames), len(frames))
        return found[:, 0].astype(np.int64)

    def _put_frames(self, name: str, frames: Numbers, values: Numbers | int) -> None:
        if len(frames):
            rows = np.broadcast_to(np.asarray(values), len(frames))[:, None]
            self._frames.put(name, self._frames.places(frames), rows)


class RowsLost(Exception):
    """The disk did not give back rows that it took."""


def record_bytes(columns: Mapping[str, Column], kept: Collection[str]) -> int:
    """Bytes of a record: of the columns that are not kept."""
    return sum(column.row_bytes for name, column in columns.items() if name not in kept)


def kept_bytes(columns: Mapping[str, Column], kept: Collection[str]) -> int:
    """Bytes of a row that are in memory, whether the row is or not."""
    at_bytes = 4
    return at_bytes + sum(columns[name].row_bytes for name in kept)
