"""The ledger against a dumb twin: a dictionary that forgets nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.errors import InvalidKeys, InvariantViolation
from ps_core.ledger import Ending, Ledger, Outcome
from ps_core.limits import MAX_LEDGER_GAP_COUNT

ENDINGS = st.sampled_from([Ending(outcome) for outcome in Outcome])
ACTIONS = st.one_of(
    st.tuples(st.just("end"), st.integers(1, 30), ENDINGS),
    st.tuples(st.just("confirm"), st.integers(0, 35), ENDINGS),
)


@given(st.lists(ACTIONS, max_size=80))
def test_it_answers_as_a_dictionary_would(actions: list[tuple[str, int, Ending]]) -> None:
    ledger, twin, confirmed = Ledger(), dict[int, Ending](), 0
    for kind, sequence, ending in actions:
        low = next(n for n in range(1, 100) if n not in twin) - 1
        if kind == "confirm":
            ledger.confirm(sequence)
            confirmed = max(confirmed, min(sequence, low))
        elif sequence in twin:
            with pytest.raises(InvariantViolation, match="LED-1"):
                ledger.end(sequence, ending)
        else:
            ledger.end(sequence, ending)
            twin[sequence] = ending
        low = next(n for n in range(1, 100) if n not in twin) - 1
        assert ledger.low_water == low
        assert ledger.kept_count == len([n for n in twin if n > confirmed])
        for number in range(1, 35):
            assert ledger.has_ended(number) == (number in twin)
            if number in twin and number > confirmed:
                assert ledger.ending(number) == twin[number]
            elif number in twin:
                with pytest.raises(InvalidKeys, match="confirmed"):
                    ledger.ending(number)


@pytest.mark.parametrize("sequence", [0, -1, MAX_LEDGER_GAP_COUNT + 1])
def test_a_sequence_out_of_reach_is_refused(sequence: int) -> None:
    with pytest.raises(InvalidKeys, match=f"sequence is {sequence}"):
        Ledger().check_in_reach(sequence)


def test_a_sender_that_never_confirms_costs_a_bounded_number_of_outcomes() -> None:
    ledger = Ledger()
    for sequence in range(1, MAX_LEDGER_GAP_COUNT + 11):
        ledger.end(sequence, Ending(Outcome.APPLIED))
    assert ledger.kept_count == MAX_LEDGER_GAP_COUNT
    assert ledger.has_ended(10)
    with pytest.raises(InvalidKeys, match="forgotten"):
        ledger.ending(10)


def test_an_outcome_that_nobody_was_told_may_be_overturned() -> None:
    ledger = Ledger()
    for sequence in (1, 2, 4):
        ledger.end(sequence, Ending(Outcome.APPLIED))
    ledger.overturn(2, Ending(Outcome.INVALID))
    ledger.overturn(4, Ending(Outcome.INVALID))
    assert [ledger.ending(sequence).outcome for sequence in (1, 2, 4)] == [
        Outcome.APPLIED,
        Outcome.INVALID,
        Outcome.INVALID,
    ]
    assert (ledger.low_water, ledger.kept_count) == (2, 3)
    ledger.confirm(2)
    for sequence in (1, 3):  # confirmed by who cannot know it, and never ended
        ledger.overturn(sequence, Ending(Outcome.INVALID))
    assert not ledger.has_ended(3)
    assert ledger.kept_count == 1


def test_zero_is_no_sequence() -> None:
    assert not Ledger().has_ended(0)
