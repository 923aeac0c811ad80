"""Blocks that a server has written to checkpoints, to which the next one may refer.

    written, of checkpoint N --N is the base of the next--> referred to if unchanged
                             --otherwise------------------> forgotten

Rules:
    - A block's place is the file of the checkpoint that wrote its bytes, however many checkpoints
      ago. So no reference leads to another reference.
    - A block is unchanged if its version is, and nothing but updates has changed its store since
      (`ShardStore.lineage`): no initial values, copy from another server, loaded checkpoint, or
      range that left and came back.
    - A checkpoint counts when it is named as the base: the scheduler, which made its manifest,
      knows that it is complete. A failed one is forgotten when the next begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ps_core.keys import TableId
from ps_runtime.checkpoint.part_file import StoredBlock
from ps_runtime.checkpoint.part_header import clear_by_entry
from ps_server.values.row_store import Store

BlockKey = tuple[TableId, int]


@dataclass(frozen=True, slots=True)
class WrittenBlock:
    """A block in the file `stored.place`, with the lineage of its store at that time."""

    lineage: object
    stored: StoredBlock
    byte_count: int

    @property
    def directory(self) -> str:
        return self.stored.place.partition("/")[0]


class WrittenBlocks:
    """Blocks of one server in its newest checkpoint and the one before."""

    def __init__(self) -> None:
        self._known: dict[int, dict[BlockKey, WrittenBlock]] = {}
        self._forgotten: deque[dict[BlockKey, WrittenBlock]] = deque()

    def base(self, number: int) -> Mapping[BlockKey, WrittenBlock]:
        """Take checkpoint `number` as the base; 0: none. Blocks of others are forgotten."""
        known = self._known.pop(number, {})
        self._forgotten += self._known.values()
        self._known = {number: known} if known else {}
        return known

    def wrote(self, number: int, blocks: dict[BlockKey, WrittenBlock]) -> None:
        """The part of checkpoint `number` is written, and has these blocks."""
        self._known[number] = blocks

    def end_forgotten(self) -> None:
        """Free forgotten blocks. For a thread: it takes time for each block."""
        while self._forgotten:
            clear_by_entry(self._forgotten.popleft())


def unchanged(
    base: Mapping[BlockKey, WrittenBlock],
    table_id: TableId,
    store: Store,
    blocks: Iterable[int],
) -> dict[BlockKey, WrittenBlock]:
    """The blocks that have not changed since they were written to the base."""
    found = {}
    for block in blocks:
        known = base.get((table_id, block))
        if (
            known is not None
            and known.lineage is store.lineage
            and known.stored.version == store.version(block)
        ):
            found[table_id, block] = known
    return found
