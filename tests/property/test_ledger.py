"""The ledger against a dumb twin: a dictionary that forgets nothing."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ps_core.errors import InvalidConfig, InvalidKeys, InvariantViolation
from ps_core.ledger import Ending, Ledger, Outcome
from ps_core.limits import MAX_LEDGER_GAP_COUNT

ENDINGS = st.sampled_from([Ending(outcome) for outcome in Outcome])
ACTIONS = st.one_of(
    st.tuples(st.just("end"), st.integers(1, 30), ENDINGS),
    st.tuples(st.just("confirm"), st.integers(0, 35), ENDINGS),
)


@given(st.lists(ACTIONS, max_size=80))
@example([("end", sequence, Ending(Outcome.APPLIED)) for sequence in (2, 4, 3, 1)])
def test_it_answers_as_a_dictionary_would(actions: list[tuple[str, int, Ending]]) -> None:
    """LED-1, LED-2."""
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
        assert ledger.confirmed == confirmed
        assert len(ledger.kept) == len([n for n in twin if n > confirmed])
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
    """LED-3."""
    ledger = Ledger()
    for sequence in range(1, MAX_LEDGER_GAP_COUNT + 11):
        ledger.end(sequence, Ending(Outcome.APPLIED))
    assert len(ledger.kept) == MAX_LEDGER_GAP_COUNT
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
    assert (ledger.low_water, len(ledger.kept)) == (2, 3)
    ledger.confirm(2)
    for sequence in (1, 3):  # confirmed by who cannot know it, and never ended
        ledger.overturn(sequence, Ending(Outcome.INVALID))
    assert not ledger.has_ended(3)
    assert len(ledger.kept) == 1


def test_zero_is_no_sequence() -> None:
    for ledger in (Ledger(), Ledger.of(2, 2, {})):
        assert [ledger.has_ended(sequence) for sequence in (-1, 0)] == [False, False]


def test_a_sequence_within_reach_is_let_pass() -> None:
    ledger = Ledger.of(7, 7, {})
    for sequence in (1, 7, 8, 7 + MAX_LEDGER_GAP_COUNT):
        ledger.check_in_reach(sequence)
    with pytest.raises(InvalidKeys, match=f"expected 1 to {7 + MAX_LEDGER_GAP_COUNT}"):
        ledger.check_in_reach(8 + MAX_LEDGER_GAP_COUNT)


def test_what_was_confirmed_has_ended_though_nothing_of_it_is_kept() -> None:
    ledger = Ledger.of(3, 3, {})
    assert [ledger.has_ended(sequence) for sequence in (1, 2, 3, 4)] == [True, True, True, False]


def test_an_ending_says_nothing_beside_its_outcome_unless_told() -> None:
    ending = Ending(Outcome.APPLIED)
    assert (ending.error, ending.staleness, ending.squares) == (None, 0, ())


@given(st.lists(ACTIONS, max_size=20), st.sets(st.integers(1, 40)), ENDINGS)
def test_many_that_end_alike_end_as_one_after_the_other(
    before: list[tuple[str, int, Ending]], sequences: set[int], ending: Ending
) -> None:
    ledger, twin = course(before), course(before)
    fresh = [sequence for sequence in sequences if not ledger.has_ended(sequence)]
    ledger.end_all(fresh, ending)
    for sequence in fresh:
        twin.end(sequence, ending)
    assert everything(ledger) == everything(twin)
    for again in fresh[:1]:
        with pytest.raises(InvariantViolation, match=f"LED-1.*sequence {again} ends twice"):
            ledger.end_all([again], ending)


def test_of_many_outcomes_as_few_are_kept_as_of_single_ones() -> None:
    """LED-3."""
    ledger = Ledger()
    ledger.end_all(range(1, MAX_LEDGER_GAP_COUNT + 11), Ending(Outcome.APPLIED))
    assert len(ledger.kept) == MAX_LEDGER_GAP_COUNT
    assert (ledger.low_water, ledger.confirmed) == (MAX_LEDGER_GAP_COUNT + 10, 10)


# --- ledgers of other servers


def course(actions: list[tuple[str, int, Ending]]) -> Ledger:
    """A ledger to which all of it happened that can."""
    ledger = Ledger()
    for kind, sequence, ending in actions:
        if kind == "confirm":
            ledger.confirm(sequence)
        elif not ledger.has_ended(sequence):
            ledger.end(sequence, ending)
    return ledger


def everything(ledger: Ledger) -> tuple[int, int, dict[int, Ending]]:
    return ledger.low_water, ledger.confirmed, dict(ledger.kept)


@given(st.lists(ACTIONS, max_size=40), st.lists(ACTIONS, max_size=40))
def test_a_copy_is_the_same_and_goes_its_own_way(
    before: list[tuple[str, int, Ending]], after: list[tuple[str, int, Ending]]
) -> None:
    ledger = course(before)
    for twin in (ledger.copy(), Ledger.of(ledger.low_water, ledger.confirmed, ledger.kept)):
        as_it_was = everything(ledger)
        assert everything(twin) == as_it_was
        for kind, sequence, ending in after:
            if kind == "confirm":
                twin.confirm(sequence)
            elif not twin.has_ended(sequence):
                twin.end(sequence, ending)
        assert everything(ledger) == as_it_was
        assert everything(twin) == everything(course(before + after))


def kept(*sequences: int) -> dict[int, Ending]:
    return dict.fromkeys(sequences, Ending(Outcome.APPLIED))


FAR = MAX_LEDGER_GAP_COUNT


@pytest.mark.parametrize(
    ("low_water", "confirmed", "sequences"),
    [
        (0, 0, ()), (3, 3, ()), (3, 1, (2, 3)), (1, 0, (1,)), (3, 1, (2, 3, 5, 9)),
        (0, 0, (2,)), (0, 0, (FAR,)), (3, 3, (3 + FAR,)), (FAR, 0, range(1, FAR + 1)),
        (FAR + 5, 5, range(6, FAR + 6)),
    ],
)  # fmt: skip
def test_a_ledger_that_can_be_is_taken_over(
    low_water: int, confirmed: int, sequences: Iterable[int]
) -> None:
    ledger = Ledger.of(low_water, confirmed, kept(*sequences))
    assert everything(ledger) == (low_water, confirmed, kept(*sequences))


@pytest.mark.parametrize(
    ("low_water", "confirmed", "sequences"),
    [
        (0, -1, (0,)),  # nothing was confirmed before the first
        (1, 2, ()),  # confirmed before it ended
        (3, 1, (2,)), (3, 1, (3,)), (3, 1, ()),  # ended, and its outcome is not there
        (3, 1, (1, 2, 3)), (3, 3, (2,)),  # kept although it was confirmed
        (3, 1, (2, 3, 4)), (0, 0, (1,)),  # the low-water mark stands too low
        (0, 0, (FAR + 1,)), (3, 3, (4 + FAR,)),  # beyond reach
        (FAR + 1, 0, range(1, FAR + 2)),  # more than a ledger keeps
    ],
)  # fmt: skip
def test_a_ledger_that_cannot_be_is_refused(
    low_water: int, confirmed: int, sequences: Iterable[int]
) -> None:
    with pytest.raises(InvalidConfig, match=f"ended up to {low_water}, was confirmed"):
        Ledger.of(low_water, confirmed, kept(*sequences))


def test_what_is_kept_cannot_be_changed_from_outside() -> None:
    ledger = Ledger.of(1, 0, kept(1))
    with pytest.raises(TypeError):
        ledger.kept[2] = Ending(Outcome.APPLIED)  # type: ignore[index]  # which is what is tested
