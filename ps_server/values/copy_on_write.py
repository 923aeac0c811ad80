"""Blocks as they were at a cut, until they are written: copied before they change, not before; and
which captured ranges may change before they are written: those whose copies fit (S10).

    captured --about to change--> copied --taken--> written
             --its turn has come---------taken--> written

    planned --fits--> open: its blocks may change, and are copied before they do
            --else--> held: nothing of it changes; its blocks are copied in their turn
    held    --what is left of it fits--> open

Rules:
    - A range is captured in the stretch in which its cut was answered: between two updates.
    - What is about to change is handed over at once, whatever waits already. What does not change
      is handed over when whoever writes asks for more.
    - What open ranges may still need counts as taken: a range that is open never lacks room.
    - What was decided before a range is held may still be applied: it is copied without room.
    - A range that is larger than all the room is open when enough of it has been written.

Invariants:
    CW-1  Each block of a captured range is handed over once, as it was when the range was captured.

What it deliberately does not do: write, or hold copies (`checkpoint_parts` does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ps_core.keys import RangeId, TableId
from ps_server.values.shard_store import ShardStore
from ps_server.values.store_copy import SavedBlock

Key = tuple[TableId, RangeId]
TakeBlock = Callable[[Key, SavedBlock], None]
"""Gets a block of a range: views that are good for the length of the call."""


class RangeSnapshots:
    """What a server has captured for one checkpoint.

    Args:
        take: where blocks go that are about to change.
    """

    def __init__(self, take: TakeBlock) -> None:
        self._take = take
        self._stores: dict[Key, ShardStore] = {}
        self._blocks: dict[Key, dict[int, None]] = {}

    def add(self, key: Key, store: ShardStore, blocks: Iterable[int]) -> None:
        """These blocks are as they shall be written."""
        captured = dict.fromkeys(blocks)
        if captured:
            self._stores[key], self._blocks[key] = store, captured

    def before_change(self, key: Key, blocks: Iterable[int]) -> None:
        """These blocks, some of which may be captured, are about to change."""
        captured = self._blocks.get(key)
        if not captured:
            return
        store = self._stores[key]
        for block in blocks:
            if block in captured:
                del captured[block]
                self._forget_if_done(key)
                self._take(key, store.saved(block))

    @property
    def has_more(self) -> bool:
        """Whether any block has not been handed over."""
        return bool(self._blocks)

    def has(self, key: Key) -> bool:
        """Whether any block of a range has not been handed over."""
        return key in self._blocks

    def next(self, of: Iterable[Key]) -> tuple[Key, SavedBlock] | None:
        """A block that has not been handed over: views that are good until anything changes. None
        if all have.

        Args:
            of: the ranges that it may be of; the first that has one.
        """
        key = next((each for each in of if each in self._blocks), None)
        if key is None:
            return None
        captured = self._blocks[key]
        block = next(iter(captured))
        del captured[block]
        saved = self._stores[key].saved(block)
        self._forget_if_done(key)
        return key, saved

    def end(self) -> None:
        """Nobody writes any more."""
        self._take = _nothing
        self._stores.clear()
        self._blocks.clear()

    def _forget_if_done(self, key: Key) -> None:
        if not self._blocks[key]:
            del self._blocks[key], self._stores[key]


def _nothing(key: Key, block: SavedBlock) -> None:
    del key, block


class CopyQuota:
    """The room for the copies of one checkpoint.

    Args:
        bound_bytes: what copies that wait to be written may take.
    """

    def __init__(self, bound_bytes: int) -> None:
        self._bound_bytes = bound_bytes
        self._open: dict[Key, int] = {}  # bytes that are captured and not copied
        self._held: dict[Key, int] = {}
        self._waiting_bytes = 0

    @property
    def held(self) -> Sequence[Key]:
        """The ranges that must not change, in the order in which they were planned."""
        return list(self._held)

    @property
    def turns(self) -> Sequence[Key]:
        """The ranges whose blocks may be copied though nothing changes them, the best first: those
        that training waits for, one by one where others may need the room.
        """
        is_free = 2 * self._taken_bytes <= self._bound_bytes or not self._waiting_bytes
        return [*self._held, *self._open] if is_free else list(self._open)

    @property
    def waiting_bytes(self) -> int:
        """What is copied and not written."""
        return self._waiting_bytes

    def plan(self, key: Key, byte_count: int) -> bool:
        """A range of at most so many bytes is about to be captured; whether it may change then."""
        is_open = not self._held and self._fits(byte_count)
        (self._open if is_open else self._held)[key] = byte_count
        return is_open

    def captured(self, key: Key, byte_count: int) -> None:
        """So much of it has to be copied."""
        of = self._held if key in self._held else self._open
        of[key] = byte_count

    def copied(self, key: Key, byte_count: int, *, is_last: bool) -> None:
        """A block of it was copied."""
        self._waiting_bytes += byte_count
        of = self._held if key in self._held else self._open
        if key in of:
            of[key] = 0 if is_last else max(0, of[key] - byte_count)

    def written(self, byte_count: int) -> None:
        """A copy is not needed any more."""
        self._waiting_bytes -= byte_count

    def opened(self) -> list[Key]:
        """The ranges that were held and are open from now on."""
        found = []
        for key, byte_count in list(self._held.items()):
            if not self._fits(byte_count):
                break
            self._open[key] = self._held.pop(key)
            found.append(key)
        return found

    @property
    def _taken_bytes(self) -> int:
        return self._waiting_bytes + sum(self._open.values())

    def _fits(self, byte_count: int) -> bool:
        return not byte_count or self._taken_bytes + byte_count <= self._bound_bytes
