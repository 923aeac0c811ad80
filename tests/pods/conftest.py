"""The image of all pods."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.containers import BUILD_TIMEOUT_S, IMAGE, Compose, engine

DOCKERFILE = f"""\
FROM {IMAGE}
COPY train.py ./
CMD ["pushpull", "worker", "train.py"]
"""


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The project's image, with the test's script."""
    project = Compose()("build", timeout_s=BUILD_TIMEOUT_S)
    assert project.returncode == 0, project.stdout[-4000:]
    folder = tmp_path_factory.mktemp("image")
    built = f"pushpull-{uuid.uuid4().hex[:8]}"
    shutil.copy(Path(__file__).with_name("train.py"), folder)
    (folder / "Dockerfile").write_text(DOCKERFILE)
    engine("build", "--quiet", "--tag", built, str(folder))
    yield built
    engine("image", "rm", "--force", built)
