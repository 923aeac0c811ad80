"""Where a pull's blocks go in the caller's memory, and what it asks for, against a twin that copies
element by element.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_core.cluster_view import ClusterView, RangeAssignment
from ps_core.keys import AssignmentEpoch, NodeId, RangeId, key_ranges
from ps_core.tables.table import Table
from ps_worker.spec.values import Region, blocks_of
from ps_worker.steps.steps import TableSteps
from ps_worker.transport.pulls import PullOrder, _PullProgress, _request, _target
from tests.examples import examples
from tests.property.shard_twin import table

BLOCK_ELEMENTS = 64
RANGE_COUNT = 4


def order_of(of: Table, region: Region, array: str = "") -> PullOrder:
    memory = np.zeros(region.element_count * 4, np.uint8)
    steps = TableSteps(of, _NoSink())
    return PullOrder(of, region, memory, 7, False, False, 0.0, steps, array=array)


class _NoSink:
    """A sink of steps; a pull makes none."""

    def open_step(self, *_: object) -> None:
        raise AssertionError("a pull began a step")

    submit = withdraw = together = seal = open_step


@st.composite
def regions(draw: st.DrawFn) -> tuple[Table, Region]:
    count = draw(st.integers(1, 5 * BLOCK_ELEMENTS))
    begin = draw(st.integers(0, count - 1))
    end = draw(st.integers(begin + 1, count))
    return table([count]), Region(begin, end, (end - begin,))


@settings(max_examples=examples(200), deadline=None)
@given(regions())
def test_each_element_of_a_region_comes_from_its_block(of: tuple[Table, Region]) -> None:
    model, region = of
    order = order_of(model, region)
    all_values = np.arange(1, model.spec.element_count + 1, dtype="<f4")
    for block in blocks_of(model, region):
        length = model.block_length(block)
        start = block * BLOCK_ELEMENTS
        payload = all_values[start : start + length].tobytes()
        target, skip_bytes = _target(order, block, length)
        target[:] = np.frombuffer(payload, np.uint8, target.nbytes, skip_bytes)
    assert order.raw.view("<f4").tolist() == all_values[region.begin : region.end].tolist()


def view_of(model: Table) -> ClusterView:
    ranges = tuple(
        RangeAssignment(RangeId(number), slots, AssignmentEpoch(10 + number), NodeId(1), (), ())
        for number, slots in enumerate(key_ranges(RANGE_COUNT))
    )
    return ClusterView(1, "cluster", 1, 1, (), ranges, (model,))


@settings(max_examples=examples(100), deadline=None)
@given(regions(), st.data(), st.sampled_from([0.0001, 0.25, 10.0]))
def test_a_request_names_what_is_left_of_a_range_unless_all_of_it_is(
    of: tuple[Table, Region], data: st.DataObject, wait_s: float
) -> None:
    model, _ = of
    by_range = model.blocks_by_range(RANGE_COUNT)
    wanted = {
        range_id: set(data.draw(st.sets(st.sampled_from(blocks), min_size=1)))
        for range_id, blocks in by_range.items()
    }
    asked = sorted(data.draw(st.sets(st.sampled_from(sorted(by_range)), min_size=1)))
    whole = {range_id: len(blocks) for range_id, blocks in by_range.items()}
    order = order_of(model, Region(0, model.spec.element_count, ()), "step")
    request = _request(_PullProgress(order, wanted, whole), view_of(model), asked, wait_s)
    assert (request.clock, request.array, request.deadline_ms) == (
        7, "step", max(1, int(wait_s * 1000)),
    )  # fmt: skip
    assert [each.range_id for each in request.ranges] == asked
    for each in request.ranges:
        own = RangeId(each.range_id)
        assert each.assignment_epoch == 10 + own
        is_whole = len(wanted[own]) == whole[own]
        assert list(each.blocks) == ([] if is_whole else sorted(wanted[own]))
