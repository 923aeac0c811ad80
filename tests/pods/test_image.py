"""CONTAINERS.md: how large the images are, and how little of them a change of code is."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.system.containers import BUILD_TIMEOUT_S, IMAGE, SCHEDULER_IMAGE, Compose, engine
from tests.tidy.source import ROOT

pytestmark = pytest.mark.timeout(2 * BUILD_TIMEOUT_S)

PAGE = (ROOT / "docs/guides/CONTAINERS.md").read_text(encoding="utf-8")
SMALL, LARGE = "ps_core", "ps_server"
PIECE = 1 << 20
NEAR = 0.2
"""How far a page's figure may be from what there is."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of an image: the digest of what it has, its names, its size, and that of a push."""

    digest: str
    names: list[str]
    size: int
    pushed: int


def digests(image: str) -> list[str]:
    """The digests of what an image's layers have, the base first."""
    found: list[str] = json.loads(
        engine("image", "inspect", "--format", "{{json .RootFS.Layers}}", image)
    )
    return found


def layers(image: str, wanted: list[str], folder: Path) -> list[Layer]:
    """Some layers of an image, measured as a registry has them."""
    saved = folder / "saved.tar"
    engine("save", "--output", str(saved), image)
    found = []
    with tarfile.open(saved) as archive:
        manifest = archive.extractfile("manifest.json")
        assert manifest is not None
        (described,) = json.load(manifest)
        for digest, path in zip(digests(image), described["Layers"], strict=True):
            layer = archive.extractfile(path)
            if digest not in wanted or layer is None:
                continue
            with tarfile.open(fileobj=layer) as files:
                names = files.getnames()
            layer.seek(0)
            packer, size, pushed = zlib.compressobj(), 0, 0
            while piece := layer.read(PIECE):
                size, pushed = size + len(piece), pushed + len(packer.compress(piece))
            found.append(Layer(digest, names, size, pushed + len(packer.flush())))
    saved.unlink()
    return found


@pytest.mark.parametrize("image", [IMAGE, SCHEDULER_IMAGE])
@pytest.mark.usefixtures("built")
def test_the_images_are_as_large_as_the_page_says(image: str, tmp_path: Path) -> None:
    target = "scheduler" if image == SCHEDULER_IMAGE else "the last"
    (row,) = re.findall(rf"^\| `?{target}`? \|.*?\| (\d+) MB \| (\d+) MB \|$", PAGE, re.MULTILINE)
    _, *above = digests(image)
    found = layers(image, above, tmp_path)
    measured = [sum(each.size for each in found), sum(each.pushed for each in found)]
    assert measured == pytest.approx([int(figure) * 10**6 for figure in row], rel=NEAR)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[str]:
    """The image as another clone builds it, with a comment in two packages: files have other times
    there.
    """
    clone = tmp_path / "clone"
    clone.mkdir()
    copy = f"git ls-files -z | tar c --null -T - | tar x -m -C {clone}"
    subprocess.run(["bash", "-ec", copy], cwd=ROOT, check=True)
    for package in (SMALL, LARGE):
        module = clone / package / "__init__.py"
        module.write_text(f"# A comment.\n{module.read_text(encoding='utf-8')}", encoding="utf-8")
    names = [f"pushpull-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    Compose(clone).build(IMAGE=names[0], SCHEDULER_IMAGE=names[1])
    yield names[0]
    engine("image", "rm", "--force", *names)


@pytest.mark.usefixtures("built")
def test_a_comment_is_a_push_of_its_package_and_of_the_list_of_files(
    elsewhere: str, tmp_path: Path
) -> None:
    new = [digest for digest in digests(elsewhere) if digest not in digests(IMAGE)]
    small, large, files = layers(elsewhere, new, tmp_path)
    for layer, name in ((small, SMALL), (large, LARGE), (files, "pushpull-0.1.0.dist-info")):
        (folder,) = {
            found[1] for each in layer.names if (found := re.search("site-packages/([^/]+)", each))
        }
        assert folder == name
    for layer in (small, large):
        pushed = layer.pushed + files.pushed
        (figure,) = re.findall(
            rf"in\s+`{SMALL if layer is small else LARGE}`.*? (\d+)\s+kB", PAGE, re.DOTALL
        )
        assert pushed == pytest.approx(int(figure) * 1000, rel=NEAR)
