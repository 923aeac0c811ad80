"""The image of all pods."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.containers import IMAGE, Compose, engine

DOCKERFILE = f"""\
FROM {IMAGE}
COPY train.py ./
CMD ["pushpull", "worker", "train.py"]
"""


@pytest.fixture(scope="session")
def built() -> None:
    """The project's images."""
    Compose().build()


@pytest.fixture(scope="session")
def image(built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The project's image, with the test's script."""
    folder = tmp_path_factory.mktemp("image")
    name = f"pushpull-{uuid.uuid4().hex[:8]}"
    shutil.copy(Path(__file__).with_name("train.py"), folder)
    (folder / "Dockerfile").write_text(DOCKERFILE)
    engine("build", "--quiet", "--tag", name, str(folder))
    yield name
    engine("image", "rm", "--force", name)
