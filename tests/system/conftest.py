"""Containers that several modules start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.containers import Compose


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    """A project of the images that `make images` has built; its containers are gone afterwards."""
    project = Compose()
    yield project
    project("down", "--volumes")
