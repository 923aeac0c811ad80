"""Differences between two states of a partition as a replay finds them, against dictionaries."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_server.replay.partitions import RowDifference, differences
from tests.examples import examples

VALUES = np.array([0.0, -0.0, 1.0, np.nan, -np.nan], np.float32)
IDS = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 2**63, 2**64 - 1])
VALUE = st.integers(0, len(VALUES) - 1)

Rows = dict[int, tuple[int, int]]
"""Values and sum of each row, by its id: places in VALUES."""

Candidates = dict[int, int]
"""Counts, by id; 0: it is none any more."""

ROWS: st.SearchStrategy[Rows] = st.dictionaries(IDS, st.tuples(VALUE, VALUE))
CANDIDATES: st.SearchStrategy[Candidates] = st.dictionaries(IDS, st.integers(0, 2))


def state(rows: Rows, candidates: Candidates) -> dict[str, bytes]:
    """The tensors of a checkpoint, in the order of the dictionaries."""
    found = np.zeros((2, len(rows), 2), np.float32)
    found[:, :, 1] = VALUES[np.array(list(rows.values()), np.int64).reshape(-1, 2)].T
    return {
        "ids": np.array(list(rows), np.uint64).tobytes(),
        "values": found[0].tobytes(),
        "sum": found[1].tobytes(),
        "candidate_ids": np.array(list(candidates), np.uint64).tobytes(),
        "candidate_update_count": np.array(list(candidates.values()), np.uint32).tobytes(),
    }


def expected(
    noun: str, made: dict[int, tuple[int, ...]], stored: dict[int, tuple[int, ...]], names: str
) -> set[RowDifference]:
    """Those of two dictionaries, whose values are of arrays of these names."""
    found = {
        f"{noun} are in the log only": made.keys() - stored.keys(),
        f"{noun} are in the checkpoint only": stored.keys() - made.keys(),
    }
    for at, name in enumerate(names.split()):
        both = made.keys() & stored.keys()
        differing = {each for each in both if made[each][at] != stored[each][at]}
        found[f"{noun} differ in {name}"] = differing
    return {RowDifference(what, len(ids), min(ids)) for what, ids in found.items() if ids}


def counted(candidates: Candidates) -> dict[int, tuple[int, ...]]:
    """Those that are candidates still."""
    return {row_id: (count,) for row_id, count in candidates.items() if count}


@settings(max_examples=examples(300))
@given(ROWS, ROWS, CANDIDATES, CANDIDATES)
def test_they_are_those_of_dictionaries(
    rows: Rows, others: Rows, candidates: Candidates, other_candidates: Candidates
) -> None:
    found = list(differences(state(rows, candidates), state(others, other_candidates)))
    assert set(found) == {
        *expected("rows", dict(rows), dict(others), "values sum"),
        *expected(
            "candidates", counted(candidates), counted(other_candidates), "candidate_update_count"
        ),
    }
    assert len(found) == len(set(found))


@settings(max_examples=examples(100))
@given(st.data(), ROWS, CANDIDATES)
def test_another_order_is_none(data: st.DataObject, rows: Rows, candidates: Candidates) -> None:
    moved = dict(data.draw(st.permutations(list(rows.items()))))
    others = dict(data.draw(st.permutations(list(candidates.items()))))
    assert not list(differences(state(rows, candidates), state(moved, others)))


def test_an_array_that_one_of_them_has_not_differs_in_all_rows() -> None:
    one = state({1: (2, 2), 5: (0, 1)}, {})
    other = {name: each for name, each in one.items() if name != "sum"}
    assert list(differences(one, other)) == [RowDifference("rows differ in sum", 2, 1)]
