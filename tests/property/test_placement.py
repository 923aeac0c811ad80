"""Slots, ranges and placement: every slot once, every block somewhere, every server its share."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core import limits
from ps_core.errors import InvariantViolation
from ps_core.keys import (
    NodeId,
    RangeId,
    TableId,
    key_ranges,
    range_count_for,
    range_of_slot,
    slot_of_ordinal,
)
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from scheduler.machine.placement import bytes_by_range, place

pytestmark = pytest.mark.slow

RANGES = limits.RANGE_COUNT
ordinals = st.integers(0, 2**40)


def table_of(block_count: int, first_ordinal: int, elements: int = 64, short: int = 0) -> Table:
    """A table of `block_count` blocks of `elements`; the last is `short` elements shorter."""
    spec = TableSpec(
        name="t",
        dtype=DType.FLOAT32,
        element_count=block_count * elements - short,
        optimizer=OptimizerSpec(OptimizerKind.SGD),
        block_elements=elements,
    )
    return Table(TableId(1), first_ordinal, spec.validated())


@pytest.mark.thorough
@given(count=st.one_of(st.integers(1, 2_000), st.sampled_from([1, 255, 256, 257, 65_535, 65_536])))
def test_ranges_cover_every_slot_exactly_once_in_order(count: int) -> None:
    ranges = key_ranges(count)
    assert len(ranges) == count
    assert ranges[0].begin == 0
    assert ranges[-1].end == limits.SLOT_COUNT
    assert all(a.end == b.begin for a, b in pairwise(ranges))
    sizes = {r.end - r.begin for r in ranges}
    assert max(sizes) - min(sizes) <= 1
    for range_id, slots in enumerate(ranges):
        assert range_of_slot(slots.begin, count) == range_id
        assert range_of_slot(type(slots.end)(slots.end - 1), count) == range_id


def test_any_65536_consecutive_ordinals_take_every_slot() -> None:
    assert len({slot_of_ordinal(7 + n) for n in range(limits.SLOT_COUNT)}) == limits.SLOT_COUNT


@given(
    block_count=st.integers(1, 700),
    first=ordinals,
    elements=st.sampled_from([64, 128, 256]),
    data=st.data(),
)
def test_bytes_by_range_counts_each_block_where_the_table_puts_it(
    block_count: int, first: int, elements: int, data: st.DataObject
) -> None:
    table = table_of(block_count, first, elements, data.draw(st.integers(0, elements - 1)))
    expected: Counter[RangeId] = Counter()
    for block in range(block_count):
        padded = -(-table.block_length(block) // limits.BLOCK_ALIGNMENT_ELEMENTS) * 64
        expected[table.range_of_block(block, RANGES)] += padded * 4
    assert bytes_by_range(table, RANGES) == dict(expected)
    assert bytes_by_range(table, RANGES).keys() == table.blocks_by_range(RANGES).keys()


@pytest.mark.parametrize("first", [0, 7, limits.SLOT_COUNT - 3])
def test_a_table_of_more_blocks_than_slots_takes_every_slot_as_often(first: int) -> None:
    rounds = bytes_by_range(table_of(3 * limits.SLOT_COUNT + 5, first), RANGES)
    rest = bytes_by_range(table_of(5, first), RANGES)
    sizes = [r.end - r.begin for r in key_ranges(RANGES)]
    assert rounds == {
        RangeId(n): 3 * size * 256 + rest.get(RangeId(n), 0) for n, size in enumerate(sizes)
    }


@pytest.mark.thorough
@pytest.mark.parametrize("block_count", [10, 100, 1_000, 10_000])
@given(first=ordinals, server_count=st.integers(1, 16))
def test_blocks_spread_evenly_over_servers_from_an_empty_map(
    block_count: int, first: int, server_count: int
) -> None:
    """PL-2."""
    held = bytes_by_range(table_of(block_count, first), range_count_for(server_count))
    servers = [NodeId(n) for n in range(1, server_count + 1)]
    placed = place({}, held, servers)
    blocks = Counter(dict.fromkeys(servers, 0))
    for range_id, node_id in placed.items():
        blocks[node_id] += held[range_id] // 256
    assert sum(blocks.values()) == block_count
    even = block_count / server_count
    assert all(abs(count - even) <= max(2, even / 10) for count in blocks.values())


@pytest.mark.parametrize(
    ("servers", "ranges"), [(1, 64), (4, 64), (5, 128), (8, 128), (9, 256), (500, 256)]
)
def test_a_cluster_has_as_few_ranges_as_share_evenly(servers: int, ranges: int) -> None:
    assert range_count_for(servers) == ranges


servers_lists = st.lists(st.integers(1, 40).map(NodeId), min_size=1, max_size=16, unique=True)
loads = st.dictionaries(st.integers(0, RANGES - 1).map(RangeId), st.integers(1, 2**40))


@pytest.mark.thorough
@given(servers=servers_lists, held=loads, data=st.data())
def test_only_ranges_without_a_server_are_placed_and_all_of_those(
    servers: list[NodeId], held: dict[RangeId, int], data: st.DataObject
) -> None:
    kept = data.draw(st.sets(st.sampled_from(sorted(held)))) if held else set()
    holders = st.sampled_from([*servers, NodeId(99)])  # 99 is a server that is not to get more
    primaries = {range_id: data.draw(holders) for range_id in kept}
    placed = place(primaries, held, servers)
    assert placed.keys() == held.keys() - kept
    assert set(placed.values()) <= set(servers)


@pytest.mark.thorough
@given(servers=servers_lists, held=loads, data=st.data())
def test_placement_depends_on_values_not_on_order(
    servers: list[NodeId], held: dict[RangeId, int], data: st.DataObject
) -> None:
    shuffled = {r: held[r] for r in data.draw(st.permutations(sorted(held)))}
    other = data.draw(st.permutations(servers))
    assert place({}, held, servers) == place({}, shuffled, other)


@pytest.mark.thorough
@given(servers=servers_lists, held=loads)
def test_no_server_exceeds_the_even_share_by_more_than_the_heaviest_range(
    servers: list[NodeId], held: dict[RangeId, int]
) -> None:
    total: Counter[NodeId] = Counter()
    for range_id, node_id in place({}, held, servers).items():
        total[node_id] += held[range_id]
    bound = sum(held.values()) / len(servers) + max(held.values(), default=0)
    assert max(total.values(), default=0) <= bound


@given(first=ordinals, sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_later_tables_move_nothing_and_stay_balanced(first: int, sizes: list[int]) -> None:
    servers = [NodeId(n) for n in (1, 2, 3)]
    primaries: dict[RangeId, NodeId] = {}
    held: Counter[RangeId] = Counter()
    ordinal = first
    for size in sizes:
        held.update(bytes_by_range(table_of(size, ordinal), RANGES))
        ordinal += size
        placed = place(primaries, held, servers)
        assert not placed.keys() & primaries.keys()
        primaries |= placed
    assert primaries.keys() == held.keys()
    counts = Counter(primaries.values())
    assert max(counts.values()) - min(counts[s] for s in servers) <= len(primaries) / 3 + 1


def test_the_heaviest_range_goes_first() -> None:
    held = {RangeId(0): 1, RangeId(1): 1, RangeId(2): 2}
    placed = place({}, held, [NodeId(7), NodeId(5)])
    assert placed == {RangeId(2): NodeId(5), RangeId(0): NodeId(7), RangeId(1): NodeId(7)}


def test_ranges_to_place_and_nobody_to_take_them_is_a_bug_of_the_caller() -> None:
    with pytest.raises(InvariantViolation, match="PL-1"):
        place({}, {RangeId(0): 1}, [])
    assert place({RangeId(0): NodeId(1)}, {RangeId(0): 1}, []) == {}
