"""The error tree: what an error carries, and the check that survives `python -O`."""

from __future__ import annotations

import pytest

from ps_core import errors


def test_an_error_says_nothing_of_retries_and_clocks_unless_told() -> None:
    error = errors.Overloaded("no room")
    assert (error.message, str(error)) == ("no room", "no room")
    assert (error.retry_after_ms, error.clock) == (0, 0)
    told = errors.AlreadyPast("past", retry_after_ms=5, clock=7)
    assert (told.retry_after_ms, told.clock) == (5, 7)


def test_every_error_of_the_catalogue_is_found_by_its_code() -> None:
    for code, kind in errors.CATALOGUE.items():
        assert kind.code == code
        assert issubclass(kind, errors.PushpullError)


def test_errors_that_travel_under_the_code_of_another() -> None:
    assert errors.PushpullError.code == errors.Internal.code == "INTERNAL"
    assert errors.InvariantViolation.code == errors.Internal.code
    assert errors.GradientChangedAfterPush.code == errors.InvalidTensor.code
    kinds = set(errors.CATALOGUE.values())
    assert not kinds & {errors.InvariantViolation, errors.GradientChangedAfterPush}


def test_a_breach_names_the_invariant() -> None:
    with pytest.raises(errors.InvariantViolation) as failure:
        errors.check(False, "X-1", "sequence 3 ends twice")
    assert failure.value.invariant == "X-1"
    assert failure.value.message == "invariant X-1 violated: sequence 3 ends twice"


def test_what_holds_is_no_breach() -> None:
    errors.check(True, "X-1", "nothing")


def test_a_setting_is_refused_where_its_condition_does_not_hold() -> None:
    errors.check_config(True, "nothing")
    with pytest.raises(errors.InvalidConfig, match="rank is -1"):
        errors.check_config(False, "rank is -1")


@pytest.mark.parametrize(
    ("names", "words"),
    [("", ""), ("a", "a"), ("abc", "a, b, c"), ("abcd", "a, b, c and 1 more")],
)
def test_of_many_names_a_few_are_in_a_message_and_the_others_counted(
    names: str, words: str
) -> None:
    assert errors.listed(tuple(names), 3) == words
