"""Which server serves which range: greedy by bytes, with bounded movement.

Rules:
    - A range is placed when the first table puts a block into it, and not moved while it holds
      blocks: until ranges can be transferred, a range that moves loses what it holds. So a
      placement moves nothing, and the traffic of the ranges that are placed goes on undisturbed.
    - The heaviest range goes first, to the server that holds the fewest bytes; ties go to the
      server with the fewest ranges, then to the lowest node id. (Longest processing time first: at
      most 4/3 of the best possible maximum, Graham 1969; here ranges of one table differ by about a
      block, so it is far closer.)
    - The same arguments give the same placement, whatever the order of the mappings.

Invariants:
    PL-1  Every range that holds bytes has exactly one server, and it is one of `servers` or the one
          that had the range before.
    PL-2  From an empty map, consecutive blocks of one size spread over the servers within two
          blocks or 10 % of even, whichever is larger.

What it deliberately does not do: know nodes, tables' names or epochs, or look at measured load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from ps_core import limits
from ps_core.errors import check
from ps_core.keys import NodeId, RangeId, slot_of_ordinal
from ps_core.tables import Table

_RANGES_A_SERVER = 16
"""One more or less is 6 % of a server's share."""


def range_count_for(server_count: int) -> int:
    """Key ranges of a cluster of so many servers: as few as share evenly, a power of two."""
    wanted = limits.RANGE_COUNT
    while wanted < server_count * _RANGES_A_SERVER:
        wanted *= 2
    return min(wanted, limits.LARGE_CLUSTER_RANGE_COUNT)


def fullest_range(table: Table, range_count: int) -> tuple[RangeId, int]:
    """The range that holds most blocks of a table, and how many."""
    counts = np.bincount(_ranges_of_blocks(table, range_count), minlength=range_count)
    fullest = int(counts.argmax())
    return RangeId(fullest), int(counts[fullest])


def _ranges_of_blocks(table: Table, range_count: int) -> npt.NDArray[np.int64]:
    """Vectorised: a table may have a million blocks, and the scheduler has one thread."""
    step = slot_of_ordinal(1)
    first = slot_of_ordinal(table.first_ordinal)
    slots = (first + np.arange(table.block_count, dtype=np.int64) * step) % limits.SLOT_COUNT
    ranges: npt.NDArray[np.int64] = ((slots + 1) * range_count - 1) // limits.SLOT_COUNT
    return ranges


def bytes_by_range(table: Table, range_count: int) -> dict[RangeId, int]:
    """Parameter bytes that a table puts into each range; ranges that hold none are absent.

    Counted as the servers store them: float32 (float64 for float64 tables), blocks padded to
    `limits.BLOCK_ALIGNMENT_ELEMENTS`.
    """
    ranges = _ranges_of_blocks(table, range_count)
    element_bytes = table.spec.accumulator_element_bytes
    counts = np.bincount(ranges, minlength=range_count)
    held_bytes = counts * (table.spec.block_elements * element_bytes)
    alignment = limits.BLOCK_ALIGNMENT_ELEMENTS
    last_elements = -(-table.block_length(table.block_count - 1) // alignment) * alignment
    held_bytes[ranges[-1]] -= (table.spec.block_elements - last_elements) * element_bytes
    return {RangeId(int(index)): int(held_bytes[index]) for index in np.flatnonzero(counts)}


def place(
    primaries: Mapping[RangeId, NodeId],
    range_bytes: Mapping[RangeId, int],
    servers: Iterable[NodeId],
) -> dict[RangeId, NodeId]:
    """Servers for the ranges that hold bytes and have none.

    Args:
        primaries: who serves which range already; these stay.
        range_bytes: what each range holds, in bytes, the new blocks included.
        servers: who may get a range; at least one unless every range has its server.

    Returns:
        The new assignments only, by range.
    """
    held_bytes = dict.fromkeys(sorted(servers), 0)
    held_count = dict.fromkeys(held_bytes, 0)
    for range_id, node_id in primaries.items():
        if node_id in held_bytes:
            held_bytes[node_id] += range_bytes.get(range_id, 0)
            held_count[node_id] += 1
    empty = sorted(range_bytes.keys() - primaries.keys(), key=lambda r: (-range_bytes[r], r))
    check(bool(held_bytes) or not empty, "PL-1", "ranges to place and no server to take them")
    placed: dict[RangeId, NodeId] = {}
    for range_id in empty:
        node_id = min(held_bytes, key=lambda n: (held_bytes[n], held_count[n], n))
        placed[range_id] = node_id
        held_bytes[node_id] += range_bytes[range_id]
        held_count[node_id] += 1
    return placed
