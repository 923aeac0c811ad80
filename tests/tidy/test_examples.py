"""What hypothesis draws is the same in every run of `make test`, and in every clone."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers


def test_examples_are_drawn_from_the_test_alone(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--hypothesis-profile") is None:
        assert settings().derandomize
        assert settings().database is None, "what failed before is no example of another clone"
    known = providers._get_local_constants()
    assert not len(known), "constants of imported modules: other tests beside, other examples"
