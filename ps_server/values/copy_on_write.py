"""Copy-on-write snapshots for checkpoints: blocks of a cut are copied only before they change, and
a range may change before it is written only if its copies fit in memory (S10).

    captured --about to change--> copied --taken--> written
             --its turn has come---------taken--> written

    planned --fits--> open: its blocks may change, and are copied before they do
            --else--> held: nothing of it changes; its blocks are copied in their turn
    held    --what is left of it fits--> open

Rules:
    - A range is captured in the stretch in which its cut was answered: between two updates.
    - Copies that open ranges may still need count as taken: an open range always has space.
    - Updates decided before a range is held may still be applied, and copied beyond the quota.

Invariants:
    CW-1  Each block of a captured range is handed over once, or all of its rows, each once, as it
          was when the range was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ps_core.keys import RangeId, TableId
from ps_core.sliced_work import Work, at_once
from ps_server.values.row_pieces import PartitionSnapshot
from ps_server.values.row_store import RowStore, Store
from ps_server.values.store_copy import SavedBlock

Key = tuple[TableId, RangeId]
TakeBlock = Callable[[Key, SavedBlock], None]
"""Takes a block of a range: views that are valid during the call."""


class _Captured(NamedTuple):
    """Blocks of a captured range that are left, in their order, and partitions by block."""

    store: Store
    blocks: dict[int, None]
    rows: dict[int, PartitionSnapshot]


class RangeSnapshots:
    """Blocks that a server has captured for one checkpoint; `take` gets those about to change."""

    def __init__(self, take: TakeBlock) -> None:
        self._take = take
        self._captured: dict[Key, _Captured] = {}

    def add(self, key: Key, store: Store, blocks: Iterable[int]) -> None:
        """Capture these blocks as they are."""
        if isinstance(store, RowStore):
            rows = {block: store.capture(block) for block in blocks}
            captured = _Captured(store, dict.fromkeys(rows), rows)
        else:
            captured = _Captured(store, dict.fromkeys(blocks), {})
        if captured.blocks:
            self._captured[key] = captured

    def before_change(self, key: Key, blocks: Iterable[int]) -> None:
        """Hand over captured blocks among these, which are about to change. A partition of rows
        keeps them itself, row by row.
        """
        if key not in self._captured:
            return
        captured = self._captured[key]
        for block in blocks:
            if block in captured.blocks and block not in captured.rows:
                self._take(key, self._handed_over(key, block))

    @property
    def has_more(self) -> bool:
        return bool(self._captured)

    def has(self, key: Key) -> bool:
        return key in self._captured

    def taking(self, of: Iterable[Key]) -> Work[tuple[Key, SavedBlock] | None]:
        """A block of the first of these ranges that has one: views, valid until any change. Or its
        next rows, copied, for which the disk may be waited for; anything may change meanwhile.
        """
        for key in of:
            if key in self._captured:
                block = next(iter(self._captured[key].blocks))
                return key, (yield from self._handing_over(key, block))
        return None

    def end(self) -> None:
        """Forget all captured blocks."""
        for captured in self._captured.values():
            for snapshot in captured.rows.values():
                snapshot.end()
        self._captured.clear()

    def _handed_over(self, key: Key, block: int) -> SavedBlock:
        return at_once(self._handing_over(key, block))

    def _handing_over(self, key: Key, block: int) -> Work[SavedBlock]:
        captured = self._captured[key]
        store, snapshot = captured.store, captured.rows.get(block)
        if snapshot is None or not isinstance(store, RowStore):
            found = store.saved(block)
        else:
            found = yield from store.saving_rows(block, snapshot)
            if not snapshot.is_done:
                return found
        captured.blocks.pop(block, None)
        if not captured.blocks:
            self._captured.pop(key, None)
        return found


class CopyQuota:
    """A memory quota for the copies of one checkpoint that wait to be written."""

    def __init__(self, bound_bytes: int) -> None:
        self._bound_bytes = bound_bytes
        self._open: dict[Key, int] = {}  # bytes that are captured and not copied
        self._held: dict[Key, int] = {}
        self.waiting_bytes = 0  # copied and not yet written

    @property
    def held(self) -> Sequence[Key]:
        """Ranges that must not change, in the order of `plan`."""
        return list(self._held)

    @property
    def turns(self) -> Sequence[Key]:
        """Ranges whose blocks may be copied although nothing changes them, the best first: those
        that training waits for, one by one where others may need the space.
        """
        is_free = 2 * self._taken_bytes <= self._bound_bytes or not self.waiting_bytes
        return [*self._held, *self._open] if is_free else list(self._open)

    def plan(self, key: Key, byte_count: int) -> bool:
        """Plan to capture a range of at most so many bytes; True if it may change then."""
        is_open = not self._held and self._fits(byte_count)
        (self._open if is_open else self._held)[key] = byte_count
        return is_open

    def captured(self, key: Key, byte_count: int) -> None:
        """Set the bytes of a captured range that must be copied."""
        of = self._held if key in self._held else self._open
        of[key] = byte_count

    def copied(self, key: Key, byte_count: int, *, is_last: bool) -> None:
        self.waiting_bytes += byte_count
        of = self._held if key in self._held else self._open
        if key in of:
            of[key] = 0 if is_last else max(0, of[key] - byte_count)

    def written(self, byte_count: int) -> None:
        self.waiting_bytes -= byte_count

    def opened(self) -> list[Key]:
        """Open the held ranges that fit now."""
        found = []
        for key, byte_count in list(self._held.items()):
            if not self._fits(byte_count):
                break
            self._open[key] = self._held.pop(key)
            found.append(key)
        return found

    @property
    def _taken_bytes(self) -> int:
        return self.waiting_bytes + sum(self._open.values())

    def _fits(self, byte_count: int) -> bool:
        return not byte_count or self._taken_bytes + byte_count <= self._bound_bytes
