"""What a read of many single blocks asks for: no more than a server looks at."""

from __future__ import annotations

from ps_core import limits
from ps_core.keys import RangeId
from ps_worker.transport.pulls import named_by_block
from pushpull.v1 import parameters_pb2

WHOLE = dict.fromkeys(map(RangeId, range(64)), 3125)
"""A table of 200,000 blocks."""


def test_ranges_beyond_what_a_request_may_name_are_asked_for_whole() -> None:
    counts = dict.fromkeys(WHOLE, 1000)
    named = named_by_block(counts, WHOLE)
    assert len(named) == limits.MAX_NAMED_BLOCK_COUNT // 1000
    request = parameters_pb2.PullRequest(table_id=1, clock=2**40, deadline_ms=10_000)
    for range_id in WHOLE:
        blocks = range(199_000, 200_000) if range_id in named else ()
        request.ranges.add(range_id=range_id, assignment_epoch=2**30, blocks=blocks)
    assert request.ByteSize() <= limits.MAX_ENTRY_BYTES


def test_what_is_wanted_whole_is_never_named_and_little_always() -> None:
    counts = {**dict.fromkeys(WHOLE, 3000), RangeId(0): 3125, RangeId(1): 1, RangeId(2): 7}
    named = named_by_block(counts, WHOLE)
    assert RangeId(0) not in named
    assert {RangeId(1), RangeId(2)} <= named
    assert sum(counts[range_id] for range_id in named) <= limits.MAX_NAMED_BLOCK_COUNT


def test_ranges_are_named_the_fewest_blocks_first_up_to_the_last_that_a_request_may_name() -> None:
    most = limits.MAX_NAMED_BLOCK_COUNT
    whole = dict.fromkeys(map(RangeId, range(4)), 2 * most)
    counts = {RangeId(0): most - 7, RangeId(1): 6, RangeId(2): 1, RangeId(3): most}
    assert named_by_block(counts, whole) == {RangeId(0), RangeId(1), RangeId(2)}
    counts[RangeId(2)] = 2
    assert named_by_block(counts, whole) == {RangeId(1), RangeId(2)}
