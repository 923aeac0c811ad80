"""What a decision does to values once it is committed: done by the primary, sent to backups.

    Put        a sum becomes values
    Kept       a sum was reduced, and waits for its scale; `Put` follows
    Dropped    nothing comes of a sum that was kept, or is in the making
    Assigned   initial values, or an edit's: values, or what it lays beside for optimizer state

An accumulator is what was summed for an update, detached from the sums in the making, and opaque
here. On its way to a backup it is a `SentAccumulator`: before it is averaged (after it, where it
was kept), in the table's own arithmetic. Both ends run the same arithmetic on the same numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ps_server.ranges.events import Record


class Elements(NamedTuple):
    """The elements of one block: of a sum, of values, or of optimizer state.

    Shapes:
        presence: one bit for each of the block's tensors; empty means all.
        payload: little-endian, in the dtype of the table's arithmetic. It may be a view of memory
            that changes when the sum is applied: it is to be written to a message before.
    """

    block: int
    presence: bytes
    payload: bytes | memoryview


def fixed_elements(blocks: tuple[Elements, ...]) -> tuple[Elements, ...]:
    """The same, in memory that does not change."""
    return tuple([each._replace(payload=bytes(each.payload)) for each in blocks])


class SentAccumulator(NamedTuple):
    """An accumulator on its way to a backup, block by block.

    Attributes:
        blocks: the sums.
        is_reduced: it is only to be scaled.
        means: what the running mean of delay compensation becomes
            (`ps_server.values.delay_compensation`), of those blocks that have one.
    """

    blocks: tuple[Elements, ...]
    is_reduced: bool = False
    means: tuple[Elements, ...] = ()

    def fixed(self) -> SentAccumulator:
        """The same, in memory that does not change."""
        return self._replace(blocks=fixed_elements(self.blocks), means=fixed_elements(self.means))


class Put(NamedTuple):
    """A sum becomes values. `accumulator` is None where it was `Kept` before: who has that, has
    it.
    """

    record: Record
    accumulator: Any


class Kept(NamedTuple):
    """A sum was reduced, and waits for its scale."""

    record: Record
    accumulator: Any


class Dropped(NamedTuple):
    """Nothing comes of a sum, whether it was kept or not."""

    record: Record


class Assigned(NamedTuple):
    """Initial values, or an edit's: (block, payload) pairs; `Elements` on their way to a backup."""

    record: Record
    parts: tuple[Any, ...]


Change = Put | Kept | Dropped | Assigned
