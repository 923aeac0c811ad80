"""Blocks as they were at a cut, until they are written: copied before they change, not before.

    captured --about to change--> copied --taken--> written
             --its turn has come---------taken--> written

Rules:
    - A range is captured in the stretch in which its cut was answered: between two updates.
    - What is about to change is handed over at once, whatever waits already. What does not change
      is handed over when whoever writes asks for more.

Invariants:
    CW-1  Each block of a captured range is handed over once, as it was when the range was captured.

What it deliberately does not do: write, or hold copies (`checkpoint_parts` does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ps_core.keys import RangeId, TableId
from ps_server.values.shard_store import ShardStore
from ps_server.values.store_copy import SavedBlock

Key = tuple[TableId, RangeId]
TakeBlock = Callable[[Key, SavedBlock], None]
"""Gets a block of a range: views that are good for the length of the call."""


class Captures:
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
