"""Each relation between limits is seen to bite: the module is run again with one number changed."""

from __future__ import annotations

import ast
from importlib.abc import InspectLoader

import pytest

from ps_core import limits
from ps_core.errors import InvariantViolation

assert isinstance(limits.__loader__, InspectLoader)
TREE = ast.parse(limits.__loader__.get_source(limits.__name__) or "")


def run_with(name: str, value: float) -> None:
    """Run what `ps_core.limits` says, with another value of one limit."""
    tree = ast.parse(ast.unparse(TREE))
    (chosen,) = (
        statement
        for statement in tree.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name
    )
    chosen.value = ast.Constant(value)
    exec(compile(ast.fix_missing_locations(tree), limits.__name__, "exec"), {})  # noqa: S102


KIB, MIB = 1024, 1024**2


@pytest.mark.parametrize(
    ("relation", "name", "holds", "breaks"),
    [
        ("LIM-1", "DEFAULT_BLOCK_ELEMENTS", 64 * KIB, 64 * KIB + 32),
        ("LIM-2", "MAX_BLOCK_ELEMENTS", 512 * KIB, 512 * KIB + 1),
        ("LIM-2", "MAX_MESSAGE_BYTES", 4 * MIB + 64 * KIB, 4 * MIB + 64 * KIB - 1),
        ("LIM-3", "FOREIGN_MAX_MESSAGE_BYTES", 2 * MIB + 64 * KIB, 2 * MIB + 64 * KIB - 1),
        ("LIM-4", "HEARTBEAT_INTERVAL_S", 1.5, 1.6),
        ("LIM-5", "RANGE_COUNT", 256, 257),
        ("LIM-5", "LARGE_CLUSTER_RANGE_COUNT", 4096, 4097),
        ("LIM-5", "MAX_RANGE_COUNT", 65_536, 65_537),
        ("LIM-6", "LANE_BATCH_BYTES", 8 * MIB, 8 * MIB + 1),
        ("LIM-7", "MAX_LANE_SEGMENT_BYTES", 16 * MIB, 16 * MIB - 1),
        ("LIM-8", "LEASE_S", 29.9, 30.0),
        ("LIM-9", "SLICE_S", 0.005, 0.0051),
        ("LIM-10", "MAX_TURN_S", 0.05, 0.051),
        ("LIM-11", "MAX_LEDGER_GAP_COUNT", 2 * 4608 + 1, 2 * 4608),
        ("LIM-12", "MAX_TABLE_BLOCK_COUNT", 4608 * 64, 4608 * 64 + 1),
        ("LIM-13", "MAX_NAMED_BLOCK_COUNT", 32 * KIB, 32 * KIB + 1),
        ("LIM-14", "MAX_COLLECTIVE_BYTES", 2 * MIB, 2 * MIB + 1),
        ("LIM-15", "MAX_PULLED_ROW_BYTES", 8 * MIB, 8 * MIB + 1),
    ],
)
def test_a_limit_that_contradicts_another_is_refused(
    relation: str, name: str, holds: float, breaks: float
) -> None:
    run_with(name, holds)
    with pytest.raises(InvariantViolation) as failure:
        run_with(name, breaks)
    assert failure.value.invariant == relation


def test_an_answer_has_as_many_rows_as_fit_and_no_more_than_are_hashed_in_a_turn() -> None:
    assert limits.most_pulled_rows(256 * KIB) == 8
    assert limits.most_pulled_rows(256 * KIB + 1) == 7
    assert limits.most_pulled_rows(64) == limits.most_pulled_rows(8) == limits.MAX_ROW_COUNT
