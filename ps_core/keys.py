"""Slots and key ranges.

Rules:
    - A block with global ordinal n lives in slot (n * 40503) mod 65536: 40503 is odd and close to
      65536 / golden ratio, so consecutive ordinals spread evenly over any cut of the slots.
    - Ranges are half-open, contiguous, ordered, and cover every slot exactly once.

Invariants:
    KEY-1  ranges(count) covers 0..65535 without gap or overlap.
    KEY-2  range_of_slot(slot, count) is the index of the range that contains the slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NewType

from ps_core.errors import InvalidKeys
from ps_core.limits import LARGE_CLUSTER_RANGE_COUNT, RANGE_COUNT, SLOT_COUNT

NodeId = NewType("NodeId", int)
Incarnation = NewType("Incarnation", int)
AssignmentEpoch = NewType("AssignmentEpoch", int)
RangeId = NewType("RangeId", int)
TableId = NewType("TableId", int)
Slot = NewType("Slot", int)

_GOLDEN = 40_503
_RANGES_A_SERVER = 16  # one more or less is 6 % of a server's share


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Slots from `begin` (inclusive) to `end` (exclusive)."""

    begin: Slot
    end: Slot

    def __contains__(self, slot: int) -> bool:
        return self.begin <= slot < self.end


def slot_of_ordinal(ordinal: int) -> Slot:
    """The slot of the block with global ordinal `ordinal` (from 0)."""
    return Slot((ordinal * _GOLDEN) % SLOT_COUNT)


def range_count_for(server_count: int) -> int:
    """Default number of key ranges: the fewest that share evenly, a power of two."""
    wanted = RANGE_COUNT
    while wanted < server_count * _RANGES_A_SERVER:
        wanted *= 2
    return min(wanted, LARGE_CLUSTER_RANGE_COUNT)


def key_ranges(count: int) -> tuple[KeyRange, ...]:
    """`count` ranges of sizes that differ by at most one slot, in slot order; InvalidKeys if it is
    below 1 or above the number of slots.
    """
    if not 1 <= count <= SLOT_COUNT:
        raise InvalidKeys(f"range count is {count}; expected 1 to {SLOT_COUNT}")
    bounds = [index * SLOT_COUNT // count for index in range(count + 1)]
    return tuple(KeyRange(Slot(a), Slot(b)) for a, b in pairwise(bounds))


def range_of_slot(slot: Slot, count: int) -> RangeId:
    """The index of the range that contains `slot` among `key_ranges(count)`."""
    return RangeId(((slot + 1) * count - 1) // SLOT_COUNT)
