"""Differences of rows between two versions of a partition, against dictionaries."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_cli.checkpoint.row_differences import PartitionRows, compared
from tests.examples import examples

VALUES = np.array([0.0, -0.0, 1.0, np.nan, -np.nan], np.float32)

Rows = dict[int, tuple[int, int]]
ROWS: st.SearchStrategy[Rows] = st.dictionaries(
    st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 2**63, 2**64 - 1]),
    st.tuples(*2 * [st.integers(0, len(VALUES) - 1)]),
)
LENGTHS = st.sampled_from([2, 1 << 16])
"""Elements of a row: of the long ones four are compared at once."""


def partition(rows: Rows, length: int) -> PartitionRows:
    """The rows in the dictionary's order, with its two values at their ends."""
    found = np.zeros((len(rows), length), np.float32)
    found[:, [0, -1]] = VALUES[np.array(list(rows.values()), np.int64).reshape(-1, 2)]
    return PartitionRows(np.array(list(rows), np.uint64), found.view("<u4"))


@settings(max_examples=examples(200))
@given(ROWS, ROWS, LENGTHS)
def test_they_are_those_of_dictionaries(before: Rows, after: Rows, length: int) -> None:
    found = compared(partition(before, length), partition(after, length))
    places = [place for place, each in enumerate(after) if before.get(each) != after[each]]
    assert found.changed.tolist() == places
    assert found.new_count == len(after.keys() - before.keys())
    assert sorted(found.gone.tolist()) == sorted(before.keys() - after.keys())


@settings(max_examples=examples(50))
@given(st.data(), ROWS)
def test_another_order_is_none(choices: st.DataObject, rows: Rows) -> None:
    moved = dict(choices.draw(st.permutations(list(rows.items()))))
    found = compared(partition(rows, 2), partition(moved, 2))
    assert (len(found.changed), found.new_count, len(found.gone)) == (0, 0, 0)
