"""Placement of ranges on servers: greedy by bytes; and the hand-overs that spread them again.

Rules:
    - A range is placed when the first table puts a block into it, and placement never moves it.
    - The heaviest range goes first, to the server that holds the fewest bytes; ties go to the
      server with the fewest ranges, then to the lowest node id. (Longest processing time first: at
      most 4/3 of the best possible maximum, Graham 1969; here ranges of one table differ by about a
      block, so it is far closer.)
    - A range is handed over only if its new primary then has no more bytes than the former one has
      left. So the sum of the squares of these bytes shrinks with each hand-over, and they end.
      Servers that differ by a tenth of their mean, or less, are even.

Invariants:
    PL-1  Every range that holds bytes has exactly one server, one of `servers` or its former one.
    PL-2  From an empty map, consecutive blocks of one size spread over the servers within two
          blocks or 10 % of even, whichever is larger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache

from ps_core import limits
from ps_core.cluster_view import RangeAssignment
from ps_core.errors import check
from ps_core.keys import NodeId, RangeId, slot_of_ordinal
from ps_core.tables.table import Table


def fullest_range(table: Table, range_count: int) -> tuple[RangeId, int]:
    counts = _blocks_by_range(table, range_count)
    fullest = min(counts, key=lambda range_id: (-counts[range_id], range_id))
    return fullest, counts[fullest]


@lru_cache(maxsize=4)
def _ranges_by_ordinal(range_count: int) -> list[RangeId]:
    """The range of each ordinal below `limits.SLOT_COUNT`; later ordinals repeat them."""
    slots = (slot_of_ordinal(ordinal) for ordinal in range(limits.SLOT_COUNT))
    return [RangeId(((slot + 1) * range_count - 1) // limits.SLOT_COUNT) for slot in slots]


def _blocks_by_range(table: Table, range_count: int) -> dict[RangeId, int]:
    """Blocks of a table by range, in the order of ranges, without empty ones. The loop is the
    standard library's, because a table may have a million blocks and the scheduler one thread.
    """
    ranges = _ranges_by_ordinal(range_count)
    rounds, rest = divmod(table.block_count, len(ranges))
    begin = table.first_ordinal % len(ranges)
    counts = Counter(ranges[begin : begin + rest])
    counts.update(ranges[: max(0, begin + rest - len(ranges))])
    if rounds:
        for range_id, count in Counter(ranges).items():
            counts[range_id] += rounds * count
    return {range_id: counts[range_id] for range_id in sorted(counts)}


def bytes_by_range(table: Table, range_count: int) -> dict[RangeId, int]:
    """Parameter bytes of a table by range, without empty ranges, as the servers store them: float32
    (float64 for float64 tables), blocks padded to `limits.BLOCK_ALIGNMENT_ELEMENTS`.
    """
    element_bytes = table.spec.accumulator_element_bytes
    block_bytes = table.spec.block_elements * element_bytes
    held_bytes = {
        range_id: count * block_bytes
        for range_id, count in _blocks_by_range(table, range_count).items()
    }
    if table.spec.rows is not None:  # nobody knows how many rows will come: all are alike
        return held_bytes
    alignment = limits.BLOCK_ALIGNMENT_ELEMENTS
    last_elements = -(-table.block_length(table.block_count - 1) // alignment) * alignment
    ranges = _ranges_by_ordinal(range_count)
    last = ranges[(table.first_ordinal + table.block_count - 1) % len(ranges)]
    held_bytes[last] -= block_bytes - last_elements * element_bytes
    return held_bytes


def place(
    primaries: Mapping[RangeId, NodeId],
    range_bytes: Mapping[RangeId, int],
    servers: Iterable[NodeId],
) -> dict[RangeId, NodeId]:
    """Servers for the ranges that hold bytes and are not in `primaries`, by range."""
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


def hand_overs(
    ranges: Iterable[RangeAssignment],
    range_bytes: Mapping[RangeId, int],
    servers: Iterable[NodeId],
    targets_of: Callable[[RangeAssignment], Collection[NodeId]],
    most: int,
) -> dict[RangeId, NodeId]:
    """The next hand-overs, `most` at most, that spread the bytes of primaries over the servers:
    targets by range. `targets_of`: the servers that may take a range.
    """
    held = dict.fromkeys(sorted(servers), 0)
    given = [r for r in ranges if r.primary in held and range_bytes.get(r.range_id)]
    for each in given:
        if each.primary is not None:
            held[each.primary] += range_bytes[each.range_id]
    found: dict[RangeId, NodeId] = {}
    while len(found) < most:
        spread = max(held.values(), default=0) - min(held.values(), default=0)
        if 10 * spread * len(held) <= sum(held.values()):
            break
        choices = [
            (held[each.primary] - held[target], range_bytes[each.range_id], -each.range_id, -target)
            for each in given
            if each.range_id not in found and 2 * range_bytes[each.range_id] <= spread
            if each.primary is not None
            for target in targets_of(each)
            if target in held
            and 2 * range_bytes[each.range_id] <= held[each.primary] - held[target]
        ]
        if not choices:
            break
        _, moved_bytes, range_id, target = max(choices)
        (former,) = [each.primary for each in given if each.range_id == -range_id]
        found[RangeId(-range_id)] = NodeId(-target)
        held[NodeId(-target)] += moved_bytes
        if former is not None:
            held[former] -= moved_bytes
    return found
