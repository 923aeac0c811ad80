"""Each idiom of Lightning, Accelerate and the Hugging Face Trainer, with the servers and without.

They have a file of their own for their imports, which take longer than all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.idioms.kit import IDIOMS, Idiom
from tests.idioms.table import Comparison, comparison
from tests.integration.framework_jobs import IMPORTED

pytestmark = pytest.mark.thorough

THEIRS = [found for found in IDIOMS if found.is_of_framework]


@pytest.fixture(scope="module")
def compared() -> Iterator[Comparison]:
    with comparison(IMPORTED) as compared:
        yield compared


def test_the_table_is_as_long_as_the_page_says() -> None:
    assert len(THEIRS) == 37


@pytest.mark.parametrize("found", THEIRS, ids=lambda found: found.name.replace(" ", "-"))
def test_it_is_equal_or_refused(found: Idiom, compared: Comparison) -> None:
    compared.check(found)
