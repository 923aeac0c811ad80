"""deploy/image: what the image installs is what pyproject.toml needs, at the versions of
constraints.txt, and each package has the hashes of its wheels.
"""

from __future__ import annotations

import re

import pytest

from deploy.image_lock import FOLDER, MACHINES, PYTHONS, pinned, split
from tests.tidy.source import ROOT


@pytest.mark.parametrize("name", ["light", "rest"])
def test_the_image_has_what_it_needs_at_the_versions_of_the_constraints(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").replace("\\\n", "")
    entries = [line.split() for line in text.splitlines() if not line.startswith("#")]
    light, rest = split(ROOT / "pyproject.toml")
    packages, versions = {"light": light, "rest": rest}[name], pinned()
    needed = {f"{each}=={versions[each]}" for each in packages}
    assert {entry[0] for entry in entries} == needed, "run make image-lock"
    for _, *hashes in entries:
        assert 1 <= len(hashes) <= len(PYTHONS) * len(MACHINES)
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes)
