"""Each idiom of plain torch's users, by two workers of a cluster and by plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.idioms.kit import IDIOMS, Idiom
from tests.idioms.table import Comparison, comparison

pytestmark = pytest.mark.slow

TORCHS = [found for found in IDIOMS if not found.is_of_framework]
CHECKED_SHARE = 3
"""One idiom of so many is compared by `make check`, all others by `make thorough`."""


@pytest.fixture(scope="module")
def compared() -> Iterator[Comparison]:
    with comparison(("torch._dynamo",)) as compared:  # some idioms import it
        yield compared


def test_the_table_is_as_long_as_the_page_says() -> None:
    assert len(TORCHS) >= 80


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(found, marks=pytest.mark.thorough if place % CHECKED_SHARE else ())
        for place, found in enumerate(TORCHS)
    ],
    ids=lambda found: found.name.replace(" ", "-"),
)
def test_it_is_equal_or_refused(found: Idiom, compared: Comparison) -> None:
    compared.check(found)
