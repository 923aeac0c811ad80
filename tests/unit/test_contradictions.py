"""Entries that contradict each other: the range machine refuses them and loses nothing."""

from __future__ import annotations

import pytest

from ps_core.errors import InvalidKeys, InvalidTensor
from ps_core.keys import RangeId, TableId
from ps_core.ledger import Outcome, ReplyKind
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_server.ranges.events import SealEvent, SealTerms, StepId
from ps_server.ranges.range_machine import RangeMachine
from ps_server.ranges.range_state import RangeState
from ps_server.ranges.staging_memory import TableStaging
from tests.unit.machine_harness import PLACE, Bench, applied, kinds, make_table, outcomes, problem


@pytest.fixture
def bsp() -> Bench:
    return Bench(make_table())


@pytest.mark.parametrize(
    ("held", "words"),
    [("another step's push", "which is an entry of clock 2"), ("a seal", "entry of clock 1")],
)
def test_only_a_push_of_the_same_step_can_be_replaced(bsp: Bench, held: str, words: str) -> None:
    if held == "a seal":
        bsp.seal(0, 2, 1)
    else:
        bsp.push(0, 2, 2)
    refused = bsp.push(0, 3, 1, replaces=2)
    assert kinds(refused) == [ReplyKind.ERROR]
    assert isinstance(problem(refused), InvalidKeys)
    assert words in str(problem(refused))
    # The number was not consumed and what was named is still held.
    bsp.push(0, 1, 1, block=1)
    bsp.push(0, 3, 1, block=2) if held == "a seal" else bsp.seal(0, 3, 1)
    bsp.seal(1, 1, 1)
    assert applied(bsp.effects)[0][0] == 1


def test_what_is_in_effect_cannot_be_replaced(bsp: Bench) -> None:
    bsp.push(0, 1, 1)
    bsp.seal(0, 2, 1)
    assert "clock 1 is sealed" in str(problem(bsp.push(0, 3, 1, replaces=1)))
    bsp.seal(1, 1, 1)
    assert applied(bsp.effects) == [(1, [(0, 1)])]


def test_a_seal_that_waits_keeps_the_blocks_that_it_came_for(bsp: Bench) -> None:
    bsp.push(0, 1, 1)
    bsp.seal(0, 3, 1)
    assert "was sealed as 3" in str(problem(bsp.push(0, 4, 1, replaces=1)))
    bsp.push(0, 2, 1, block=1)
    bsp.seal(1, 1, 1)
    assert applied(bsp.effects) == [(1, [(0, 1), (0, 2)])]


def test_a_wrong_seal_does_not_forgive_invalid_pushes(bsp: Bench) -> None:
    bsp.push(0, 1, 1, problem=InvalidTensor("wrong"))
    bsp.seal(0, 2, 1, (("nonsense", 1.0),))
    assert outcomes(bsp.seal(0, 3, 1)) == {(0, 3): Outcome.INVALID}
    bsp.seal(0, 4, 1, skip=True)
    bsp.seal(1, 1, 1)
    assert outcomes(bsp.effects)[0, 4] is Outcome.APPLIED


def test_a_wrong_seal_leaves_no_step_behind(bsp: Bench) -> None:
    bsp.push(0, 1, 1)
    for clock in range(100, 200):
        bsp.seal(0, 1, clock)
    assert list(bsp.machine.state.by_rank[0].steps) == [1]


def test_invalid_initial_values_are_not_skipped() -> None:
    bench = Bench(make_table(from_rank_zero=True))
    bench.push(0, 1, 0, is_assign=True, problem=InvalidTensor("wrong"))
    carried = SealEvent(PLACE, bench.sender(0), 2, SealTerms(0), skip_if_invalid=True)
    assert outcomes(bench.machine.entry(carried, 100.0)) == {(0, 2): Outcome.INVALID}
    assert not bench.machine.state.initialized
    bench.push(0, 3, 0, is_assign=True, replaces=1)
    assert applied(bench.seal(0, 4, 0)) == [(0, [(0, 3)])]


def test_an_error_names_some_of_many_invalid_pushes(bsp: Bench) -> None:
    for sequence in range(1, 101):
        bsp.push(0, sequence, 1, problem=InvalidTensor("wrong"))
    text = str(problem(bsp.seal(0, 101, 1)))
    assert "100 invalid pushes (1, 2, 3, 4, 5, 6, 7, 8, ...)" in text


def test_a_given_back_number_that_comes_as_another_thing_ends_once(bsp: Bench) -> None:
    bsp.push(1, 1, 1)
    bsp.machine.give_back(StepId(1, 1), [])
    bsp.push(1, 1, 2)
    bsp.seal(1, 2, 1, last=True)
    assert outcomes(bsp.effects)[1, 1] is Outcome.WITHDRAWN


def test_a_last_step_that_was_given_back_may_be_sent_again(bsp: Bench) -> None:
    bsp.push(1, 1, 1)
    bsp.seal(1, 2, 1, last=True)
    bsp.machine.give_back(StepId(1, 1), [])
    assert kinds(bsp.push(1, 1, 1)) == [ReplyKind.RECEIVED]
    bsp.seal(0, 1, 1)
    assert applied(bsp.effects) == [(1, [(1, 1)])]
    assert bsp.machine.state.by_rank[1].left_clock == 1


def test_a_converted_payload_of_an_odd_last_block_has_room() -> None:
    spec = TableSpec(
        "odd", DType.FLOAT32, 3, OptimizerSpec(OptimizerKind.SGD), block_elements=64, gate_bytes=1
    )
    table = Table(TableId(1), 0, spec.validated())
    staging = TableStaging(table)
    staging.add(RangeMachine(RangeState(table, RangeId(0), (0,), 1, staging)))
    assert staging.admit(StepId(1, 0), 256, [])
