"""What a server has written of its blocks, so that the next checkpoint need not write them again.

    written, of checkpoint N --N is the base of the next--> referred to where nothing has changed
                             --any other is, or none--> forgotten

Rules:
    - Of a block is known where its bytes are: in the file of the checkpoint that wrote them,
      however many checkpoints ago. So no reference leads to another one.
    - A block is the same if its version is, and nothing but updates has changed its store since
      (`ShardStore.lineage`): not initial values, a copy from another server, a checkpoint that was
      loaded, or a range that left and came back.
    - A checkpoint counts when it is named as the base: who made its manifest knows that it is
      complete. One that failed is forgotten when the next begins; what is forgotten ends in a
      thread, since it is of all blocks.

What it deliberately does not do: keep values or checksums of its own making (the header that was
written has them).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ps_core.keys import TableId
from ps_core.manifest import place_in
from ps_runtime.checkpoint.part_file import StoredBlock
from ps_runtime.checkpoint.part_header import clear_by_entry
from ps_server.values.shard_store import ShardStore

BlockKey = tuple[TableId, int]


@dataclass(frozen=True, slots=True)
class WrittenBlock:
    """A block as it was written, by whichever checkpoint; `stored.place` says where.

    `lineage` is that of its store then.
    """

    lineage: object
    stored: StoredBlock
    byte_count: int

    @property
    def directory(self) -> str:
        """The checkpoint that has its bytes."""
        return self.stored.place.partition("/")[0]


class WrittenBlocks:
    """Of one server: what its newest checkpoint has, and what the one before had."""

    def __init__(self) -> None:
        self._known: dict[int, dict[BlockKey, WrittenBlock]] = {}
        self._forgotten: deque[dict[BlockKey, WrittenBlock]] = deque()

    def base(self, number: int) -> Base:
        """What may be referred to if checkpoint `number` is the base; 0: nothing may."""
        known = self._known.pop(number, {})
        self._forgotten += self._known.values()
        self._known = {number: known} if known else {}
        return Base(known)

    def wrote(self, number: int, blocks: dict[BlockKey, WrittenBlock]) -> None:
        """The part of a checkpoint is written: these are its blocks, wherever their bytes are."""
        self._known[number] = blocks

    def end_forgotten(self) -> None:
        """What no base has any more is given up. For a thread."""
        while self._forgotten:
            clear_by_entry(self._forgotten.popleft())


class Base:
    """What a checkpoint may refer to.

    Args:
        blocks: what the base has of this server's blocks.
    """

    def __init__(self, blocks: Mapping[BlockKey, WrittenBlock]) -> None:
        self._blocks = blocks

    def unchanged(
        self, table_id: TableId, store: ShardStore, blocks: Iterable[int]
    ) -> dict[BlockKey, WrittenBlock]:
        """Those of these blocks that are now as they were written."""
        found = {}
        for block in blocks:
            known = self._blocks.get((table_id, block))
            if (
                known is not None
                and known.lineage is store.lineage
                and known.stored.version == store.version(block)
            ):
                found[table_id, block] = known
        return found


def written_in(
    directory: str, file: str, lineage: object, stored: StoredBlock, byte_count: int
) -> WrittenBlock:
    """A block that a checkpoint has just written itself."""
    return WrittenBlock(lineage, replace(stored, place=place_in(directory, file)), byte_count)
