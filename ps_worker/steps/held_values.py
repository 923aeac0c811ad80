"""The values of a table that a client has in memory, as it pulled them last (SEMANTICS S22).

A pull into that memory says which versions it has; blocks that are still the same do not come.

Invariants:
    HV-1  A block is held only while its memory has all elements of the value that came.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ps_core.keys import AssignmentEpoch


class HeldValue(NamedTuple):
    """The name of a block's value, and the updates by others that are in it."""

    assignment_epoch: AssignmentEpoch
    edit_count: int
    version: int
    peer_version: int


class HeldValues:
    """The values in one piece of memory. Pulls into it note what comes; whoever else writes there
    calls `forget`, while no pull is in flight.
    """

    def __init__(self) -> None:
        self._values: dict[int, HeldValue] = {}

    def forget(self) -> None:
        """The memory has something else."""
        self._values.clear()

    def copy(self) -> HeldValues:
        """For a pull into other memory, which leaves out what is still the same."""
        found = HeldValues()
        found._values.update(self._values)
        return found

    def swap(self, other: HeldValues) -> None:
        """The two pieces of memory change places."""
        self._values, other._values = other._values, self._values

    def is_same(self, other: HeldValues, block: int) -> bool:
        """True if both have the block, with equal bytes."""
        value, there = self._values.get(block), other._values.get(block)
        return value is not None and there is not None and value[:3] == there[:3]

    def drop(self, block: int) -> None:
        """The memory of a block is about to be written (HV-1)."""
        self._values.pop(block, None)

    def take(self, block: int, value: HeldValue) -> bool:
        """A block is there, whole; True if it was written, False if it was held."""
        is_new = block not in self._values
        self._values[block] = value
        return is_new

    def find(self, block: int, assignment_epoch: AssignmentEpoch) -> HeldValue | None:
        """The block's value, if it is held and came under this epoch."""
        value = self._values.get(block)
        is_of_epoch = value is not None and value.assignment_epoch == assignment_epoch
        return value if is_of_epoch else None

    def claims(
        self, blocks: Iterable[int], assignment_epoch: AssignmentEpoch
    ) -> tuple[int, list[int | None]]:
        """The versions of a range's blocks, None if not held, for a pull under this epoch; and the
        edit count of all of them. Values from before an edit are not claimed.
        """
        found = [self.find(block, assignment_epoch) for block in blocks]
        edit_count = max((value.edit_count for value in found if value is not None), default=0)
        return edit_count, [
            value.version if value is not None and value.edit_count == edit_count else None
            for value in found
        ]
