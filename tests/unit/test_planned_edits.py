"""The edits of a step, in their order, and the words and names that workers compare."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ps_core.errors import EditRefused, InvariantViolation
from ps_core.tables.optimizers import STEP_ARRAY, VALUES_ARRAY
from ps_worker.spec.optimizers import SGD
from ps_worker.training.planned_edits import (
    ASLEEP,
    PASSED,
    PlannedEdits,
    digest_of,
    edit_refused,
    names_of,
    problem_of,
)
from ps_worker.training.served_state import LoadedState, digest_of_arrays
from ps_worker.training.tables.trained_table import TrainedTable
from tests.unit.table_client import parameter, trained_tables

ARRAY = "momentum_buffer"


def awake_and_asleep() -> tuple[TrainedTable, TrainedTable]:
    frozen = parameter(5.0)
    frozen.requires_grad_(False)
    awake, asleep = trained_tables(SGD(lr=1.0), [parameter(1.0, 2.0), parameter(3.0), frozen])
    return awake, asleep


def loaded(table: TrainedTable) -> LoadedState:
    return LoadedState({table: {ARRAY: torch.zeros(3), STEP_ARRAY: torch.zeros(3)}})


def order(edits: PlannedEdits) -> list[tuple[str, bool]]:
    """The edits as they are made, each with whether all are in place with it."""
    found = []
    while edits:
        found.append((edits.next, edits.is_in_place_with_next))
        edits.ended()
    return found


def test_parameters_are_one_edit() -> None:
    awake, _ = awake_and_asleep()
    edits = PlannedEdits()
    assert not edits
    edits.plan({awake: [1]}, None, "")
    assert edits.digest == edits.edit_digest == digest_of({awake: [1]})
    assert order(edits) == [("", True)]


def test_state_is_one_edit_for_each_array_and_parameters_come_before() -> None:
    awake, _ = awake_and_asleep()
    edits = PlannedEdits()
    state = loaded(awake)
    edits.plan({}, state, "")
    assert order(edits) == [(ARRAY, False), (STEP_ARRAY, True)]
    edits.plan({awake: [0]}, state, "", passed_count=2)
    assert edits.edit_digest == digest_of({awake: [0]})
    assert edits.digest not in (edits.edit_digest, state.digest)
    assert order(edits) == [
        (PASSED, False),
        (PASSED, False),
        (VALUES_ARRAY, False),
        (ARRAY, False),
        (STEP_ARRAY, True),
    ]


def test_tables_that_sleep_are_edited_once_the_others_are_in_place() -> None:
    awake, asleep = awake_and_asleep()
    edits = PlannedEdits()
    edits.plan({awake: [0], asleep: [0]}, None, "")
    assert order(edits) == [("", True), (ASLEEP, True)]


def test_invalid_values_are_an_edit_without_a_name_that_no_state_comes_with() -> None:
    """Which is refused at all workers."""
    awake, asleep = awake_and_asleep()
    edits = PlannedEdits()
    edits.plan({awake: [0], asleep: [0]}, loaded(awake), "it is not finite")
    assert edits.edit_digest == b""
    assert order(edits) == [("", True)]


def test_a_refusal_ends_all_edits_but_for_that_of_a_clock_that_is_passed() -> None:
    """A worker that has died may have sealed it as a step."""
    awake, _ = awake_and_asleep()
    edits = PlannedEdits()
    refused = EditRefused("worker 3 changed parameters, and worker 2 did not")
    edits.plan({awake: [0]}, None, "", passed_count=1)
    assert edits.name_at(3) == PASSED.encode()
    assert edits.ended(refused) is None
    assert (edits.next, edits.name_at(3)) == ("", edits.digest)
    assert edits.ended(refused) is refused
    assert not edits


def test_the_next_edits_values_are_those_of_its_array() -> None:
    awake, asleep = awake_and_asleep()
    state = loaded(awake)
    edits = PlannedEdits()
    edits.plan({}, state, "")
    assert edits.values(awake) is state.arrays[awake][ARRAY]
    assert edits.values(asleep) is None
    edits.ended()
    assert edits.values(awake) is state.arrays[awake][STEP_ARRAY]
    edits.forget()
    with pytest.raises(InvariantViolation, match="EDIT-1"):
        _ = edits.next
    edits.plan({awake: [0]}, None, "")
    with pytest.raises(InvariantViolation, match="EDIT-1"):
        edits.values(awake)


def test_changes_have_the_same_name_at_all_workers_that_made_the_same() -> None:
    (one, _), (other, _) = awake_and_asleep(), awake_and_asleep()
    assert digest_of({one: [0]}) == digest_of({other: [0]})
    assert digest_of({one: [0]}) != digest_of({one: [1]}) != digest_of({one: [0, 1]})
    before = digest_of({one: [0]})
    one.layout.placed[0].tensor.data[0] = 9.0
    assert digest_of({one: [0]}) != before


def test_names_and_values_cannot_be_taken_for_each_other() -> None:
    values = torch.tensor([1.0])
    (table,) = trained_tables(SGD(lr=1.0), [parameter(1.0)])
    assert LoadedState({table: {"ab": values}}).digest != LoadedState({table: {"a": values}}).digest
    one, other = (LoadedState({table: {name: values}}).digest for name in ("a", "b"))
    assert one != other
    arrays = [[("a", "bc", values)], [("ab", "c", values)], [("abc", "", values)]]
    assert len({digest_of_arrays(each) for each in arrays}) == 3


def test_a_few_names_are_listed_and_the_others_counted() -> None:
    (table,) = trained_tables(SGD(lr=1.0), [parameter(float(i)) for i in range(5)])
    first = "'parameter.0', 'parameter.1', 'parameter.2'"
    assert names_of({table: [0]}) == "'parameter.0'"
    assert names_of({table: [0, 1, 2]}) == first
    assert names_of({table: [0, 1, 2, 3]}) == f"{first} and 1 more"
    assert names_of({table: range(5)}) == f"{first} and 2 more"


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite_are_a_problem_unless_allowed(bad: float) -> None:
    (table,) = trained_tables(SGD(lr=1.0), [parameter(1.0), parameter(2.0, 3.0)])
    assert problem_of({table: [0, 1]}, may_be_infinite=False) == ""
    table.layout.placed[1].tensor.data[1] = bad
    assert "'parameter.1' was given an infinity" in problem_of(
        {table: [0, 1]}, may_be_infinite=False
    )
    assert problem_of({table: [0]}, may_be_infinite=False) == ""
    assert problem_of({table: [0, 1]}, may_be_infinite=True) == ""


def test_another_shape_is_a_problem() -> None:
    (table,) = trained_tables(SGD(lr=1.0), [nn.Parameter(torch.ones(2, 3))])
    table.layout.placed[0].tensor.data = torch.ones(3, 2)
    assert "has shape (3, 2); expected (2, 3)" in problem_of({table: [0]}, may_be_infinite=True)


def test_workers_look_at_tables_that_sleep_at_one_clock_of_the_model() -> None:
    """However often each has asked: after waits that expired, or since it has joined."""
    _, asleep = awake_and_asleep()
    asleep.write_parameters()
    asleep.layout.placed[0].tensor.data.fill_(2.0)  # autograd does not hear of it
    for asked in (1, 3):
        edits = PlannedEdits()
        found = [edits.found([asleep], clock) for clock in range(33) for _ in range(asked)]
        assert [place // asked for place, edited in enumerate(found) if edited] == sorted(
            [15, 31] * asked
        )
    edits.plan({asleep: [0]}, None, "")
    assert edits.found([asleep], 16) == {asleep: [0]}, "it was planned"


def test_a_look_is_not_passed_over_where_steps_take_two_clocks() -> None:
    """An edit takes a clock of its own, before that of the gradients."""
    _, asleep = awake_and_asleep()
    asleep.write_parameters()
    asleep.layout.placed[0].tensor.data.fill_(2.0)
    edits = PlannedEdits()
    assert [clock for clock in range(0, 50, 2) if edits.found([asleep], clock)] == [16, 32, 48]
    later = PlannedEdits()  # of a worker that has joined
    assert [clock for clock in range(32, 50, 2) if later.found([asleep], clock)] == [48]
    edits.plan({asleep: [0]}, None, "")
    edits.found([asleep], 63)  # again, as a wait for the edit has expired: others do not ask
    edits.forget()
    assert edits.found([asleep], 64)


def test_the_remedy_for_frozen_parameters_is_to_leave_them_out() -> None:
    awake, asleep = awake_and_asleep()
    frozen = edit_refused({asleep: [0]}, "model", "under asp")
    assert "give the optimizer only the parameters that it trains" in frozen
    assert "set_consistency" not in frozen
    assert "set_consistency('bsp')" in edit_refused({asleep: [0], awake: [0]}, "model", "under asp")
