"""Mutations: a committed decision's changes of values, done by the primary and sent to backups.

An accumulator holds the sums of an update, is detached from the store, and opaque here. On its way
to a backup it is a `SentAccumulator`: before it is averaged (after it, where it was kept), in the
table's own arithmetic. Both ends run the same arithmetic on the same numbers.
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
    """A copy in memory of its own."""
    return tuple([each._replace(payload=bytes(each.payload)) for each in blocks])


class SentAccumulator(NamedTuple):
    """An accumulator on its way to a backup, block by block.

    Attributes:
        is_reduced: it is only to be scaled.
        means: the running means of delay compensation, of those blocks that have one.
    """

    blocks: tuple[Elements, ...]
    is_reduced: bool = False
    means: tuple[Elements, ...] = ()

    def fixed(self) -> SentAccumulator:
        """A copy in memory of its own."""
        return self._replace(blocks=fixed_elements(self.blocks), means=fixed_elements(self.means))


class Put(NamedTuple):
    """Apply a sum. `accumulator` is None after a `KeptSum`: the server has it."""

    record: Record
    accumulator: Any


class KeptSum(NamedTuple):
    """A sum was reduced, and waits for its scale; `Put` follows."""

    record: Record
    accumulator: Any


class Dropped(NamedTuple):
    """Drop a sum, whether it was kept or not."""

    record: Record


class Assigned(NamedTuple):
    """Initial values, or an edit's: values, or optimizer state that it lays beside. `parts` are
    (block, payload) pairs; `Elements` on their way to a backup.
    """

    record: Record
    parts: tuple[Any, ...]


Mutation = Put | KeptSum | Dropped | Assigned
